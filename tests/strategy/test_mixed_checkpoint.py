"""Checkpoints of models with sharded modules: one ordinary file, or a folder; across strategies and world sizes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_replicate import ReplicateError, ReplicateStrategy, replicate
from lightning_replicate.consolidate import consolidate
from tests.core.helpers import assert_ranks_equal, assert_same
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, trainer
from tests.strategy.test_mixed import Mixed, full

pytestmark = pytest.mark.slow

SHARD: dict[str, Any] = {"shard": ["net.trunk.*", "net.head"]}


class Resumable(Mixed):
    """All ranks see the same batches, so that any number of ranks trains alike."""

    steps = 3

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())  # in this order, since Lightning's own strategy takes numbers for positions
        groups = [{"params": params[:6], "lr": 0.02}, {"params": params[6:], "lr": 0.01, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def _loader(self) -> DataLoader:
        return DataLoader(Batches(7, self.steps), batch_size=None)

    train_dataloader = val_dataloader = _loader


class Parallel(Resumable):
    """For Lightning's own strategy, which wants everything sharded by hand."""

    def configure_model(self) -> None:
        if not isinstance(self.net.head.weight, torch.distributed.tensor.DTensor):
            torch.manual_seed(0)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def make(kind: str) -> tuple[Any, Resumable]:
    if kind == "parallel":
        return ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=False), Parallel(seed=1000)
    strategy: Any = {"single": "auto", "ddp": "ddp", "replicate": "replicate"}.get(kind)
    if kind == "mixed":
        strategy = ReplicateStrategy(**SHARD)
    if kind == "folder":
        strategy = ReplicateStrategy(**SHARD, save_distributed_checkpoint=True)
    return strategy, Resumable(seed=1000)


def fit(kind: str, epochs: int, path: str | None = None, model: Resumable | None = None, **options: Any) -> Any:
    strategy, made = make(kind)
    model = model or made
    run = trainer(strategy, max_epochs=epochs, **options)
    run.fit(model, ckpt_path=path, weights_only=True if path else None)
    return run, model


def _write(rank: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        run, _ = fit(kind, 1)
        run.save_checkpoint(f"{folder}/{kind}{dist.get_world_size()}.ckpt")


def _read(rank: int, folder: str, kinds: list[str], unbroken: list[Tensor]) -> None:
    for kind in kinds:
        for path in sorted(Path(folder).glob("*.ckpt")):
            if path.is_dir() and kind in ("single", "ddp"):
                continue  # these read files; `consolidate` makes one
            run, model = fit(kind, 2, str(path))
            values = full(model.parameters())
            assert_ranks_equal(values)
            try:
                assert_same(values, unbroken, rtol=1e-5, atol=1e-6)
            except AssertionError as error:
                raise AssertionError(f"{kind} on {dist.get_world_size()} ranks from {path.name}: {error}") from error
            assert run.optimizers[0].param_groups[1]["lr"] == pytest.approx(0.01 * 0.81)


def _unbroken(rank: int) -> list[Tensor]:
    _, model = fit("single", 2)
    return [param.detach() for param in model.parameters()]


def test_r59_r60_the_matrix(ranks: Ranks, tmp_path: Path) -> None:
    several = ["ddp", "replicate", "mixed", "folder", "parallel"]
    unbroken = ranks(1, _unbroken)[0]
    ranks(1, _write, str(tmp_path), ["single", "replicate", "mixed"])
    for world in (2, 4):
        ranks(world, _write, str(tmp_path), several)
    for path in tmp_path.glob("*.ckpt"):
        if path.is_file():  # ordinary files with the names of the plain module, and numbers for its parameters
            content = torch.load(path, weights_only=True)
            assert list(content["state_dict"]) == list(Resumable(seed=0).state_dict())
            assert all(type(value) is Tensor for value in content["state_dict"].values())
            assert [len(group["params"]) for group in content["optimizer_states"][0]["param_groups"]] == [6, 11]
    ranks(1, _read, str(tmp_path), ["single", "replicate", "mixed"], unbroken)
    for world in (2, 4):
        ranks(
            world,
            _read,
            str(tmp_path),
            ["ddp", "replicate", "mixed", "parallel"] if world == 2 else ["mixed"],
            unbroken,
        )


def _exactly(rank: int, folder: str) -> None:
    for kind in ("mixed", "folder"):
        _, unbroken = fit(kind, 3)
        run, _ = fit(kind, 2)
        path = f"{folder}/{kind}.ckpt"
        run.save_checkpoint(path)
        _, resumed = fit(kind, 3, path)
        assert_same(full(resumed.parameters()), full(unbroken.parameters()), rtol=0, atol=0)
    assert Path(f"{folder}/folder.ckpt").is_dir()


def _loads_alone(rank: int, folder: str) -> None:
    consolidate(f"{folder}/folder.ckpt", f"{folder}/whole.ckpt")
    with pytest.raises(FileExistsError, match="Choose another name"):
        consolidate(f"{folder}/folder.ckpt", f"{folder}/whole.ckpt")
    with pytest.raises(FileNotFoundError, match="not a folder"):
        consolidate(f"{folder}/nothing", f"{folder}/other.ckpt")
    contents = [torch.load(f"{folder}/{name}.ckpt", weights_only=True) for name in ("mixed", "whole")]
    assert contents[0].keys() == contents[1].keys()
    for name in ("mixed", "whole"):
        model = Resumable.load_from_checkpoint(f"{folder}/{name}.ckpt", weights_only=True, seed=3)
        assert_same(list(model.state_dict().values()), list(contents[0]["state_dict"].values()), rtol=0, atol=0)
        run, _ = fit("single", 3, f"{folder}/{name}.ckpt")
        assert run.current_epoch == 3


def test_r59_one_file_or_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _exactly, str(tmp_path))
    ranks(1, _loads_alone, str(tmp_path))


def _by_hand(model: Mixed) -> None:
    """Lightning calls `configure_model` for every entry point, and this would shard and mark again each time."""
    fully_shard(model.net.trunk[0], mesh=model.device_mesh)
    replicate(model.net.head)
    replicate(model.net)


def _root_by_hand(model: Mixed) -> None:
    replicate(model.net.head)
    fully_shard(model, mesh=model.device_mesh)


def _again(rank: int, folder: str) -> None:
    for mark, arguments in ((_by_hand, {}), (_root_by_hand, {}), (None, SHARD)):
        model = Resumable(mark, seed=1000)
        run = trainer(ReplicateStrategy(**arguments), max_epochs=1, limit_val_batches=1.0)
        run.fit(model)
        run.save_checkpoint(f"{folder}/again.ckpt")
        before = [value.clone() for value in full(model.parameters())]
        run.validate(model, verbose=False)
        run.validate(model, ckpt_path=f"{folder}/again.ckpt", weights_only=True, verbose=False)
        assert_same(full(model.parameters()), before, rtol=0, atol=0)
        assert "configure_model" not in vars(model)
        fresh = Resumable(mark, seed=1000)
        trainer(ReplicateStrategy(**arguments), limit_val_batches=1.0).validate(
            fresh, ckpt_path=f"{folder}/again.ckpt", weights_only=True, verbose=False
        )
        assert_same(full(fresh.parameters()), before, rtol=0, atol=0)
        run.fit_loop.max_epochs = 2
        run.fit(model)  # trains on where it was
        assert_ranks_equal(full(model.parameters()))
        assert not torch.equal(full(model.parameters())[0], before[0])


class Validated(Resumable):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert not torch.is_inference_mode_enabled()
        super().validation_step(batch, batch_idx)


def test_r47_fit_validate_and_load_one_after_the_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _again, str(tmp_path))


def _messages(rank: int, folder: str) -> None:
    run, _ = fit("mixed", 1)
    path = f"{folder}/messages.ckpt"
    run.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    del content["state_dict"]["net.trunk.0.0.weight"]
    content["state_dict"]["net.surplus"] = torch.ones(2)
    if rank == 0:
        torch.save(content, f"{folder}/wrong.ckpt")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*net.trunk.0.0.weight.*Unexpected key.*net.surplus"):
        fit("mixed", 2, f"{folder}/wrong.ckpt")
    lenient = Resumable(seed=1000)
    lenient.strict_loading = False
    fit("mixed", 2, f"{folder}/wrong.ckpt", lenient)
    assert_ranks_equal(full(lenient.parameters()))
    mine = f"{folder}/rank{rank}.ckpt" if rank else path
    with pytest.raises(ReplicateError, match="Rank 1 cannot see the checkpoint"):
        fit("mixed", 2, mine)


def test_what_is_wrong_with_a_checkpoint_is_said_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _messages, str(tmp_path))


def _killed(rank: int, folder: str) -> None:
    for kind, writes in (("mixed", "torch.save"), ("folder", "torch.distributed.checkpoint.save")):
        path = f"{folder}/{kind}-last.ckpt"
        run, _ = fit(kind, 1)
        run.save_checkpoint(path)
        run, _ = fit(kind, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writes, _die)
            if kind == "mixed" and rank > 0:  # only rank 0 writes
                patch.setattr(run.strategy, "barrier", _die)
            with pytest.raises(SystemExit):
                run.save_checkpoint(path)
        assert fit(kind, 2, path)[0].current_epoch == 2


def _die(*args: Any, **kwargs: Any) -> None:
    raise SystemExit


def test_a_save_that_is_killed_leaves_the_earlier_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _killed, str(tmp_path))


def _compiled(rank: int, folder: str) -> None:
    class Compiled(Resumable):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.net.trunk[1] = torch.compile(self.net.trunk[1], backend="eager")

    path = f"{folder}/compiled.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)  # Dynamo's
        run, _ = fit("mixed", 1, model=Compiled(seed=1000))
        run.save_checkpoint(path)
        assert list(torch.load(path, weights_only=True)["state_dict"]) == list(Resumable(seed=0).state_dict())
        _, resumed = fit("mixed", 2, path, Compiled(seed=1000))
    _, plain = fit("mixed", 2, path)
    assert_same(full(resumed.parameters()), full(plain.parameters()), rtol=1e-5, atol=1e-6)


def test_t33_compiled_submodules_are_saved_under_their_plain_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _compiled, str(tmp_path))
