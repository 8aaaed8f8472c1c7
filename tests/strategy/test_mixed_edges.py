"""Around the edges of mixed models: exceptions, local parameters, what other callbacks do, what is left afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_replicate import ReplicateError, ReplicateStrategy
from tests.core.helpers import assert_ranks_equal, assert_same, data
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, trainer
from tests.strategy.test_mixed import Mixed, assert_like, full, one_process
from tests.strategy.test_mixed_training import Skips

WORLD = 2


# ---- exceptions -----------------------------------------------------------------------------------------------------


class _Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise LookupError("in backward")


class _Fails(Mixed):
    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.net.trunk[1].register_forward_hook(self.fail)

    def fail(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        if self.where == "forward":
            raise LookupError("in forward")
        return _Boom.apply(output) if self.where == "backward" else None


def _recovers(rank: int) -> None:
    for shard in (["net.trunk.*"], ["net", "net.trunk.*"]):
        for where in ("forward", "backward"):
            model = _Fails()
            first = Mixed(seed=1000).net.state_dict()
            model.where = where
            with pytest.raises(LookupError, match=where):  # and not what tidying up would raise
                trainer(ReplicateStrategy(shard=shard)).fit(model)
            model.where = ""
            assert_same(full(model.net.parameters()), [first[name] for name, _ in model.net.named_parameters()])
            trainer(ReplicateStrategy(shard=shard)).fit(model)
            assert_like(model, one_process(5, WORLD))


def test_r37_an_exception_within_a_sharded_step_and_then_a_second_fit(ranks: Ranks) -> None:
    ranks(2, _recovers)


# ---- local parameters -----------------------------------------------------------------------------------------------


class _WithLocal(Mixed):
    """Rank 1's own layer gets large gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mine = nn.Linear(4, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (1 + 50 * dist.get_rank()) * self.mine(batch).mean()


def _clipped(rank: int) -> None:
    def sgd(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1)

    reference = one_process(5, WORLD, sgd, before_step=lambda params: nn.utils.clip_grad_norm_(params, 0.05))
    for arguments in ({}, {"shard": "net.trunk.*"}):
        model = _WithLocal(optimizer=sgd)
        trainer(ReplicateStrategy(local="mine", **arguments), gradient_clip_val=0.05).fit(model)
        shared = full(model.net.parameters())
        assert_ranks_equal(shared)
        assert_same(shared, [param.detach() for param in reference.net.parameters()])


def test_r53_a_local_gradient_does_not_scale_what_ranks_share(ranks: Ranks) -> None:
    ranks(2, _clipped)


class _OnlyLocal(Mixed):
    steps = 3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mine = nn.Linear(4, 1)
        self.net.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 and self.trainer.global_rank else self.mine(batch).mean()


def _scaled(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    trainer(ReplicateStrategy(local="mine"), plugins=plugins).fit(_OnlyLocal())
    assert scaler.get_scale() == 64.0


def test_r54_a_rank_whose_only_gradients_are_local_skips(ranks: Ranks) -> None:
    ranks(2, _scaled)


class _SkipsWithLocal(Skips):
    def __init__(self) -> None:
        super().__init__(before=False)
        self.mine = nn.Linear(4, 1)
        self.make_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
        self.grads: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.mine(batch).sum()

    def on_after_backward(self) -> None:
        if self.mine.weight.grad is not None:
            self.grads.append(self.mine.weight.grad.clone())


def _not_scaled(rank: int) -> None:
    model = _SkipsWithLocal()
    trainer(ReplicateStrategy(local="mine", shard="net.trunk.*")).fit(model)
    own = [data(rank, step, 3, 4).sum(0, keepdim=True) for step in range(5) if rank == 0 or step != 2]
    assert_same(model.grads, own)


def test_r28_local_gradients_are_each_ranks_own_where_another_skips(ranks: Ranks) -> None:
    ranks(2, _not_scaled)


def _whole_model_sharded(rank: int) -> None:
    class Root(Skips):
        def configure_model(self) -> None:
            fully_shard(self, mesh=self.device_mesh)

    def one_skips(m: Any, r: int, step: int) -> Tensor | None:
        return None if step == 2 and r == 1 else m.loss(data(r, step, 3, 4))

    model = Root(before=False)
    model.make_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    trainer().fit(model)
    sgd = one_process(5, WORLD, lambda params: torch.optim.SGD(params, lr=0.1), losses=one_skips)
    assert_like(model, sgd)


def test_r28_a_skipped_step_where_nothing_is_replicated(ranks: Ranks) -> None:
    ranks(2, _whole_model_sharded)


# ---- what users and callbacks do within a fit -----------------------------------------------------------------------


class _Adversarial(Mixed):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.attacked(batch)

    def attacked(self, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.loss(batch), batch)
        return self.loss((batch + 0.1 * grad.sign()).detach())


def _adversarial(rank: int) -> None:
    reference = _Adversarial(seed=1000)
    optimizer = reference.configure_optimizers()
    for step in range(5):
        optimizer.zero_grad()
        sum(reference.attacked(data(r, step, 3, 4)) / WORLD for r in range(WORLD)).backward()
        optimizer.step()
    model = _Adversarial()
    trainer(ReplicateStrategy(shard="net.trunk.*")).fit(model)
    assert_like(model, reference)


def test_r21_a_step_that_differentiates_within(ranks: Ranks) -> None:
    ranks(2, _adversarial)


class _Late(Mixed):
    """The optimizer begins with the head, and gets the rest in the middle."""

    steps = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.1, foreach=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            rest = [*self.net.stem.parameters(), *self.net.trunk.parameters()]
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": rest})


def _schedulers(rank: int) -> None:
    model = _Late()
    trainer(ReplicateStrategy(shard="net.trunk.*")).fit(model)
    assert_ranks_equal(full(model.parameters()))
    assert not torch.equal(full([model.net.trunk[0][0].weight])[0], Mixed(seed=1000).net.trunk[0][0].weight)
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    with pytest.raises(ValueError, match="StochasticWeightAveraging copies the whole model"):
        trainer(ReplicateStrategy(shard="net.trunk.*"), max_epochs=3, callbacks=[averaging]).fit(Mixed())

    class MakesScheduler(Mixed):
        def on_train_start(self) -> None:
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers(use_pl_optimizer=False), 1, 0.5)

        def on_train_batch_end(self, *args: Any) -> None:
            self.schedule.step()

    run = trainer(ReplicateStrategy(shard="net.trunk.*"))
    run.fit(MakesScheduler())
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**5)


def test_optimizers_that_change_within_a_fit(ranks: Ranks) -> None:
    ranks(2, _schedulers)


class _Freezes(Mixed):
    """A sharded block and a replicated layer, frozen and unfrozen in the middle."""

    steps = 6

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.freeze_for(batch_idx)

    def freeze_for(self, step: int) -> None:
        for module in (self.net.trunk[0], self.net.head):
            module.requires_grad_(step >= 2 and step != 4)


def _freezing(rank: int, folder: str) -> None:
    reference = _Freezes(seed=1000)
    optimizer = reference.configure_optimizers()
    for step in range(6):
        reference.freeze_for(step)
        optimizer.zero_grad()
        sum(reference.loss(data(r, step, 3, 4)) / WORLD for r in range(WORLD)).backward()
        optimizer.step()
    for keep in (True, False):
        strategy = ReplicateStrategy(shard="net.trunk.*", reshard_after_forward=keep)
        model = _Freezes()
        trainer(strategy).fit(model)
        assert_like(model, reference)

    class Later(Mixed):
        """Frozen in the first epoch; saved, and resumed in the second."""

        def on_train_epoch_start(self) -> None:
            self.net.trunk[0].requires_grad_(self.trainer.current_epoch > 0)

    def fit(epochs: int, path: str | None = None) -> Any:
        run = trainer(ReplicateStrategy(shard="net.trunk.*"), max_epochs=epochs)
        model = Later()
        run.fit(model, ckpt_path=path, weights_only=True if path else None)
        return run, full(model.parameters())

    fit(1)[0].save_checkpoint(f"{folder}/frozen.ckpt")
    assert_same(fit(2, f"{folder}/frozen.ckpt")[1], fit(2)[1], rtol=0, atol=0)


def test_r23_r60_freezing_and_unfreezing_both_kinds(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _freezing, str(tmp_path))


# ---- evaluation and what is left ------------------------------------------------------------------------------------


class _Predicts(Mixed):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Batches(0, 2 + self.trainer.global_rank), batch_size=None)


def _evaluates(rank: int) -> None:
    for arguments in ({"shard": "net.trunk.*", "reshard_after_forward": True},):
        model = _Predicts()
        with pytest.raises(ReplicateError, match="not equally long: rank 0 has 2 batches, rank 1 has 3"):
            trainer(ReplicateStrategy(**arguments)).predict(model)
        run = trainer(ReplicateStrategy(**arguments), limit_val_batches=1.0)
        run.fit(model)
        assert run.validate_loop.inference_mode
        with pytest.raises(ReplicateError, match="not equally long"):
            run.predict(model)


def test_r30_evaluation_of_sharded_modules_needs_equally_many_batches(ranks: Ranks) -> None:
    ranks(2, _evaluates)


def _random_numbers(rank: int) -> None:
    class Built(Mixed):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.early = nn.Linear(4, 4)

        def configure_model(self) -> None:
            self.late = nn.Linear(4, 4)
            fully_shard(self.late, mesh=self.device_mesh)
            self.equal = torch.equal(full([self.late.weight])[0], self.early.weight)

    model = Built()
    trainer(max_steps=1).fit(model)
    assert not model.equal


def test_r47_configure_model_does_not_draw_the_same_numbers_again(ranks: Ranks) -> None:
    ranks(2, _random_numbers)


class _MultiProcessingLauncher:
    """Stands in for Lightning's, in a process that is a rank already."""

    def launch(self, function: Any, *args: Any, trainer: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def _launchers(rank: int) -> None:
    run = trainer(ReplicateStrategy(shard="net.trunk.*"))
    run.strategy._launcher = _MultiProcessingLauncher()
    with pytest.raises(ValueError, match="Run the program as a script"):
        run.fit(Mixed())


def test_launchers_that_send_the_model_back_are_refused(ranks: Ranks) -> None:
    ranks(2, _launchers)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class _Setting:
    """A hyper-parameter of a class that only its program knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Setting)

    __hash__ = object.__hash__


class _Idle(Mixed):
    """With a layer that never gets a gradient."""

    def __init__(self, setting: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters("setting")
        self.unused = nn.Linear(4, 4)


def _folders(rank: int, folder: str) -> None:
    def strategy() -> ReplicateStrategy:
        return ReplicateStrategy(shard="net.trunk.*", save_distributed_checkpoint=True)

    path = f"{folder}/idle"
    run = trainer(strategy(), max_epochs=1)
    run.fit(_Idle(_Setting()))
    run.save_checkpoint(path)
    run.save_checkpoint(f"{folder}/weights", weights_only=True)
    unbroken = _Idle(_Setting())
    trainer(strategy(), max_epochs=2).fit(unbroken)
    resumed = _Idle(_Setting())
    again = trainer(strategy(), max_epochs=2)
    again.fit(resumed, ckpt_path=path, weights_only=False)
    assert_same(full(resumed.parameters()), full(unbroken.parameters()), rtol=0, atol=0)
    again.test(resumed, ckpt_path=f"{folder}/weights", weights_only=False, verbose=False)  # no optimizers in there
    missing = Mixed()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*unused.weight"):
        trainer(strategy(), max_epochs=2).fit(missing, ckpt_path=path, weights_only=False)
    with pytest.raises(ValueError, match="needs a folder on a file system"):
        again.save_checkpoint("memory://somewhere")


def test_r59_folders_with_idle_layers_settings_and_weights_only(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _folders, str(tmp_path))


class _Zero(Small):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


class _Counts(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1  # not a parameter's
        return super().step(closure)


class _Odd(Small):
    def configure_optimizers(self) -> Any:
        return _Counts(self.parameters(), lr=0.1)


def _optimizers(rank: int, folder: str) -> None:
    for kind in (_Zero, _Odd):
        path = f"{folder}/{kind.__name__}.ckpt"
        run = trainer(max_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            run.fit(kind())
            run.save_checkpoint(path)
            model, unbroken = kind(), kind()
            trainer(max_epochs=2).fit(model, ckpt_path=path, weights_only=True)
            trainer(max_epochs=2).fit(unbroken)
        assert_same(list(model.parameters()), list(unbroken.parameters()), rtol=0, atol=0)


def test_checkpoints_of_unusual_optimizers(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _optimizers, str(tmp_path))
