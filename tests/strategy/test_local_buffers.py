"""Buffers that are each rank's own, under the Trainer: ``local=`` by name and glob, by hand, and beside shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_replicate import ReplicateError, ReplicateStrategy, replicate
from tests.core.helpers import assert_ranks_equal, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, trainer

STEPS = 4


class _Net(nn.Module):
    """A layer, running statistics, an average that follows rank 0, and a queue that each rank fills by itself."""

    def __init__(self, rank: int, extra: int) -> None:
        super().__init__()
        self.layers, self.norm = mlp(4, 5, 2, seed=rank), nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.full((2 + extra,), 100.0 * (rank + 1)))
        self.register_buffer("average", torch.full((4,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue = torch.cat([self.queue[1:], x.detach().sum().view(1)])
            self.average = self.average + x.mean(0).detach()
        return self.layers(self.norm(x))


class _Queued(Small):
    def __init__(self, rank: int, mark: Callable[[_Queued], Any] | None = None, extra: int | None = None) -> None:
        super().__init__()
        self.mark = mark
        self.net = _Net(rank, rank if extra is None else extra)  # another shape on each rank
        self.seen: list[Tensor] = []

    def configure_model(self) -> None:
        if self.mark is not None and self.device_mesh is not None:
            self.mark(self)

    def on_train_start(self) -> None:
        self.began_with = self.net.queue.clone()

    def on_validation_start(self) -> None:
        self.seen.append(self.net.queue.clone())


def _filled(rank: int, extra: int | None = None) -> Tensor:
    """The queue after an epoch, by hand."""
    first = torch.full((2 + (rank if extra is None else extra),), 100.0 * (rank + 1))
    return torch.cat([first, *[Batches(rank, STEPS)[step].sum().view(1) for step in range(STEPS)]])[STEPS:]


def _assert_own_queue(rank: int, model: _Queued, extra: int | None = None) -> None:
    assert torch.equal(model.began_with, torch.full_like(model.began_with, 100.0 * (rank + 1)))
    assert torch.equal(model.net.queue, _filled(rank, extra))
    assert_ranks_equal([*model.parameters(), model.net.average, model.net.norm.running_mean])
    rank_0 = sum((Batches(0, STEPS)[step].mean(0) for step in range(STEPS)), torch.zeros(4))
    torch.testing.assert_close(model.net.average, rank_0)  # beside it, a buffer follows rank 0


def _patterns(rank: int) -> None:
    for local in ("net.queue", ["net.queue"], "*.queue", ["*.que*"]):
        model = _Queued(rank)
        run = trainer(ReplicateStrategy(local=local), limit_val_batches=1.0)
        run.fit(model)
        _assert_own_queue(rank, model)
        assert torch.equal(model.seen[-1], _filled(rank))  # what validation saw
        run.validate(model, verbose=False)
        assert torch.equal(model.seen[-1], _filled(rank))
    model = _Queued(rank)
    trainer(ReplicateStrategy(replicate="net", local="net.queue")).fit(model)
    _assert_own_queue(rank, model)
    model = _Queued(rank)
    trainer(ReplicateStrategy(replicate=["net.layers", "net.norm.*"], local="net.queue")).fit(model)
    assert torch.equal(model.net.queue, _filled(rank))


def test_names_and_globs(ranks: Ranks) -> None:
    ranks(2, _patterns)


def _evaluated_first(rank: int) -> None:
    model = _Queued(rank)
    own = model.net.queue.clone()
    trainer(ReplicateStrategy(local="net.queue"), limit_val_batches=1.0).validate(model, verbose=False)
    assert torch.equal(model.seen[-1], own)  # Lightning makes all equal before it evaluates, but for what is local
    assert_ranks_equal([*model.parameters(), model.net.average])
    assert not model.net.average.any()


def test_evaluation_without_a_fit(ranks: Ranks) -> None:
    ranks(2, _evaluated_first)


def _late(rank: int) -> None:
    class Late(_Queued):
        def on_train_start(self) -> None:
            self.net.register_buffer("queue_of_labels", torch.full((1 + rank,), float(rank)))
            self.net.register_buffer("late", torch.full((1,), float(rank)))
            self.trainer.strategy.states[0].refresh()

    model = Late(rank)
    trainer(ReplicateStrategy(local="net.queue*")).fit(model)
    assert torch.equal(model.net.queue_of_labels, torch.full((1 + rank,), float(rank)))
    assert torch.equal(model.net.late, torch.zeros(1))


def test_buffers_that_come_later(ranks: Ranks) -> None:
    ranks(2, _late)


def _errors(rank: int) -> None:
    with pytest.raises(ValueError, match=r"`local`: 'net.quue' matches no submodule, parameter or buffer.*'net.queue'"):
        trainer(ReplicateStrategy(local="net.quue")).fit(_Queued(rank))
    with pytest.raises(ValueError, match=r"`replicate`: 'net.queue' matches no submodule or parameter of the model"):
        trainer(ReplicateStrategy(replicate="net.queue")).fit(_Queued(rank))
    with pytest.raises(ReplicateError, match=r"'net.queue' differs.*`ReplicateStrategy\(local=\.\.\.\)`"):
        trainer().fit(_Queued(rank))
    with pytest.raises(ValueError, match=r"'net.queue' is to follow rank 0 \(`buffers`\) and to be ignored"):
        trainer(ReplicateStrategy(local="net.queue", buffers=["net.queue"])).fit(_Queued(rank))
    with pytest.raises(
        ValueError, match=r"`local`: buffer 'net.queue' lies in a module that was given to replicate\(\)"
    ):
        trainer(ReplicateStrategy(local="net.queue")).fit(_Queued(rank, lambda model: replicate(model.net), extra=0))


def test_errors(ranks: Ranks) -> None:
    ranks(2, _errors)


def _mark(model: _Queued) -> None:
    replicate(model.net, ignored_buffers=["queue"], buffers="step")


def _by_hand(rank: int) -> None:
    for extra in (None, 0):  # an equal shape would be overwritten without a word
        for arguments in ({}, {"local": "net.queue"}):
            model = _Queued(rank, _mark, extra)
            run = trainer(ReplicateStrategy(**arguments), limit_val_batches=1.0)
            run.fit(model)
            _assert_own_queue(rank, model, extra)
            run.validate(model, verbose=False)
            assert torch.equal(model.seen[-1], _filled(rank, extra))


def test_marked_by_hand(ranks: Ranks) -> None:
    ranks(2, _by_hand)


def _beside_shards(rank: int) -> None:
    def mark(model: _Queued) -> None:
        if not isinstance(model.net.layers, FSDPModule):
            fully_shard(model.net.layers, mesh=model.device_mesh)
            replicate(model.net, ignored_buffers=["queue"], buffers=["average"])

    def shard_all(model: _Queued) -> None:
        if not isinstance(model.net, FSDPModule):
            fully_shard(model.net, mesh=model.device_mesh)

    cases: list[tuple[Any, dict[str, Any]]] = [
        (None, {"shard": "net", "local": "*.queue"}),
        (None, {"shard": "net.layers", "local": "net.queue"}),
        (shard_all, {"local": "net.queue"}),
        (mark, {}),
    ]
    for make, arguments in cases:
        model = _Queued(rank, make)
        run = trainer(ReplicateStrategy(**arguments), limit_val_batches=1.0)
        run.fit(model)
        assert torch.equal(model.net.queue, _filled(rank))
        assert_ranks_equal([model.net.average])
        run.validate(model, verbose=False)
        assert torch.equal(model.seen[-1], _filled(rank))
        run.fit_loop.max_epochs = 2
        run.fit(model)  # the calls by hand are made again, with the names that they had
        assert model.net.queue.shape == (2 + rank,) and model.net.queue.max() < 100
        assert_ranks_equal([model.net.average])


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_beside_sharded_modules(ranks: Ranks) -> None:
    ranks(2, _beside_shards)


def _checkpoint(rank: int, folder: str) -> None:
    path = f"{folder}/own.ckpt"
    for extra in (0, None):
        model = _Queued(rank, extra=extra)
        run = trainer(ReplicateStrategy(local="net.queue"))
        run.fit(model)
        run.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["state_dict"]["net.queue"]
        assert torch.equal(saved, _filled(0))  # the file holds rank 0's
        again = _Queued(rank, extra=extra)
        resumed = trainer(ReplicateStrategy(local="net.queue"), limit_val_batches=1.0)
        if extra == 0:
            resumed.validate(again, ckpt_path=path, verbose=False, weights_only=True)
            assert torch.equal(again.seen[-1], _filled(0))  # and so every rank gets it
            continue
        with pytest.raises(ReplicateError, match=r"(?s)fits some ranks, and not rank 1: .*net.queue.*persistent=False"):
            resumed.validate(again, ckpt_path=path, verbose=False, weights_only=True)


class _PutsItsOwn(_Queued):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.queue"] = self.net.queue


def _way_out(rank: int, folder: str) -> None:
    model = _PutsItsOwn(rank)
    run = trainer(ReplicateStrategy(local="net.queue"), max_epochs=1)
    run.fit(model, ckpt_path=f"{folder}/own.ckpt", weights_only=True)
    assert torch.equal(model.net.queue, torch.full((2 + rank,), 100.0 * (rank + 1)))  # was trained to the end already


def test_checkpoints_hold_rank_0s(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _checkpoint, str(tmp_path))
    ranks(2, _way_out, str(tmp_path))
