"""Uneven data: all ranks end the epoch after the same batch, and nobody waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_replicate import ReplicateError, ReplicateStrategy
from lightning_replicate.strategy.inputs import NoBatch, agree_on_end, holds_no_batch
from tests.core.helpers import assert_ranks_equal, data, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, assert_trained_like, by_hand, trainer
from tests.strategy.test_trainer import _loss

WORLD = 2


class _Stream(IterableDataset):
    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.length):
            yield data(self.rank, step, 3, 4)


class _Uneven(Small):
    def __init__(self, lengths: list[int], sized: bool = False, workers: int = 0) -> None:
        super().__init__()
        self.lengths, self.sized, self.workers = lengths, sized, workers
        self.seen: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.seen:  # resumed within an epoch
            self.seen.append([])
        self.seen[-1].append(batch_idx)
        loss = self.loss(batch)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        dataset = (Batches if self.sized else _Stream)(rank, self.lengths[rank])
        options = {"num_workers": self.workers, "multiprocessing_context": "fork"} if self.workers else {}
        return DataLoader(dataset, batch_size=None, **options)

    def val_dataloader(self) -> Any:
        return DataLoader(_Stream(self.trainer.global_rank, self.lengths[self.trainer.global_rank]), batch_size=None)


def _stop(rank: int, world: int) -> None:
    for lengths in ([4, 6], [6, 4], [0, 3], [5, 5]) if world == 2 else ([4, 6, 5], [3, 3, 2]):
        for sized in (False, True):
            if sized and 0 in lengths:
                continue  # Lightning itself refuses to fit without any batch
            shortest = min(lengths)
            model = _Uneven(lengths, sized)
            run = trainer(max_epochs=2, limit_val_batches=1.0 if shortest else 0)
            run.fit(model)
            assert model.seen == [list(range(shortest))] * 2
            reference = by_hand(
                mlp(4, 5, 2), lambda m, r, step, n=shortest: _loss(m, r, step % n), 2 * shortest, world=world
            )
            assert_trained_like(model, reference)
            logged: list[Any] = [None] * world
            dist.all_gather_object(logged, run.callback_metrics.get("epoch_loss"))
            assert all(value == logged[0] for value in logged)


@pytest.mark.parametrize("world", [2, 3])
def test_r30_r31_all_ranks_stop_after_the_same_batch(ranks: Ranks, world: int) -> None:
    ranks(world, _stop, world)


def _variants(rank: int) -> None:
    model = _Uneven([5, 7])
    trainer(accumulate_grad_batches=3).fit(model)  # the last window is short: two batches

    def windows(m: Any, r: int, step: int) -> list[Tensor]:
        return [_loss(m, r, i) / 3 for i in range(step * 3, min(step * 3 + 3, 5))]

    assert_trained_like(model, by_hand(mlp(4, 5, 2), windows, 2, world=WORLD))

    for options, steps in (({"max_steps": 3}, 3), ({"limit_train_batches": 2}, 2), ({"val_check_interval": 2}, 5)):
        model = _Uneven([5, 7])
        trainer(limit_val_batches=1.0, **options).fit(model)
        assert model.seen == [list(range(steps))]
        assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, steps, world=WORLD))

    model = _Uneven([3, 5], workers=1)
    trainer().fit(model)
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 3, world=WORLD))


def test_r30_with_accumulation_limits_and_workers(ranks: Ranks) -> None:
    ranks(2, _variants)


class _TwoStreams(_Uneven):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"] + batch["b"], batch_idx)

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        streams = {
            name: DataLoader(_Stream(rank, self.lengths[rank] + more), batch_size=None)
            for name, more in (("a", 0), ("b", 1))
        }
        return CombinedLoader(streams, "min_size")


def _combined(rank: int) -> None:
    model = _TwoStreams([3, 4])
    trainer().fit(model)
    reference = by_hand(mlp(4, 5, 2), lambda m, r, step: m(2 * data(r, step, 3, 4)).pow(2).mean(), 3, world=WORLD)
    assert_trained_like(model, reference)


def test_r30_combined_loaders(ranks: Ranks) -> None:
    ranks(2, _combined)


def _join(rank: int, world: int) -> None:
    for lengths in ([4, 6], [6, 3], [1, 4]) if world == 2 else ([4, 2, 5],):
        for sized in (False, True):
            model = _Uneven(lengths, sized)
            trainer(ReplicateStrategy(uneven_inputs="join"), max_epochs=2).fit(model)
            assert model.seen == [list(range(lengths[rank]))] * 2
            longest = max(lengths)
            reference = by_hand(  # the average is over those who had data
                mlp(4, 5, 2),
                lambda m, r, step, n=longest, own=lengths: _loss(m, r, step % n) if step % n < own[r] else None,
                2 * longest,
                world=world,
            )
            assert_trained_like(model, reference)
    with pytest.raises(ValueError, match="needs automatic optimization"):
        model = _Uneven([1, 2, 3])
        model.automatic_optimization = False
        trainer(ReplicateStrategy(uneven_inputs="join")).fit(model)


@pytest.mark.parametrize("world", [2, 3])
def test_r30_ranks_without_data_take_part_with_nothing(ranks: Ranks, world: int) -> None:
    ranks(world, _join, world)


class _Measured(_Uneven):
    """With a metric of torchmetrics that is computed over the epoch."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mean(batch.mean())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def _metrics(rank: int) -> None:
    lengths = [2, 5, 3]
    for mode, seen in (("stop", [2, 2, 2]), ("join", lengths)):
        run = trainer(ReplicateStrategy(uneven_inputs=mode))
        run.fit(_Measured(lengths))
        values = [data(r, step, 3, 4).mean().item() for r, count in enumerate(seen) for step in range(count)]
        assert run.callback_metrics["mean"].item() == pytest.approx(sum(values) / len(values))


def test_r30_metrics_over_exactly_the_batches_that_were_trained_on(ranks: Ranks) -> None:
    ranks(3, _metrics)


class _SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        if run.global_step == self.step:
            run.save_checkpoint(self.path)


def _mid_epoch(rank: int, folder: str) -> None:
    for mode, (short, long) in (("stop", (5, 5)), ("join", (5, 7))):
        path = f"{folder}/{mode}.ckpt"
        trainer(ReplicateStrategy(uneven_inputs=mode), callbacks=[_SaveAt(3, path)]).fit(_Uneven([5, 7]))
        model = _Uneven([5, 7])
        run = trainer(ReplicateStrategy(uneven_inputs=mode), max_epochs=2)
        run.fit(model, ckpt_path=path, weights_only=True)
        # Lightning gives a loader that cannot be fast-forwarded its batches from the start, and counts on
        length = short if rank == 0 else long
        assert model.seen == [list(range(3, 3 + length)), list(range(length))]
        assert_ranks_equal(list(model.parameters()))


def test_r30_resumed_within_an_epoch(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _mid_epoch, str(tmp_path))


def _join_with_nothing(rank: int) -> None:
    with pytest.raises(ReplicateError, match=r"Rank 1 logged no 'training_step.epoch_loss' in epoch 0.*needs a batch"):
        trainer(ReplicateStrategy(uneven_inputs="join")).fit(_Uneven([3, 0]))

    class Quiet(_Uneven):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch)

    model = Quiet([3, 0])
    trainer(ReplicateStrategy(uneven_inputs="join")).fit(model)
    reference = by_hand(mlp(4, 5, 2), lambda m, r, step: _loss(m, r, step) if r == 0 else None, 3, world=WORLD)
    assert_trained_like(model, reference)


def test_r30_join_with_a_rank_that_has_no_batch_at_all(ranks: Ranks) -> None:
    ranks(2, _join_with_nothing)


def _error(rank: int) -> None:
    with pytest.raises(ReplicateError, match=r"rank 0 has 2 batches, rank 1 has at least 3 batches"):
        trainer(ReplicateStrategy(uneven_inputs="error")).fit(_Uneven([2, 5]))
    with pytest.raises(ReplicateError, match=r"not equally long: rank 0 has 2 batches, rank 1 has 5 batches"):
        trainer(ReplicateStrategy(uneven_inputs="error")).fit(_Uneven([2, 5], sized=True))
    with pytest.raises(ValueError, match="`uneven_inputs` must be one of"):
        ReplicateStrategy(uneven_inputs="pad")  # type: ignore[arg-type]


def test_r30_an_error_on_all_ranks(ranks: Ranks) -> None:
    ranks(2, _error)


def _evaluation(rank: int) -> None:
    model = _Uneven([2, 5])
    (result,) = trainer(limit_val_batches=1.0).validate(model, verbose=False)
    losses = [_loss(model.net, r, step).item() for r, length in enumerate([2, 5]) for step in range(length)]
    assert result["val_loss"] == pytest.approx(sum(losses) / 7)  # over exactly the samples that exist


def test_r30_validation_loaders_of_unequal_length(ranks: Ranks) -> None:
    ranks(2, _evaluation)


# ---- the loaders themselves: no ranks needed ------------------------------------------------------------------------


class _Ranks:
    """Plays the other rank."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    def __call__(self, number: int) -> list[int]:
        self.asked.append(number)
        return [number, self.answers.pop(0)]


def test_loaders_of_equal_known_length_pay_nothing() -> None:
    loader = DataLoader(Batches(0, 4), batch_size=None)
    ranks = _Ranks(4)
    assert agree_on_end(loader, "stop", ranks) is loader
    assert ranks.asked == [4]


def test_what_was_left_unused_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(_Stream(0, 4), batch_size=None)
    with caplog.at_level(logging.INFO):
        assert len(list(agree_on_end(loader, "stop", _Ranks(-1, 1, 1, 0)))) == 2
        assert len(list(agree_on_end([1, 2, 3, 4, 5], "stop", _Ranks(2)))) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "The epoch ended after 2 batches, when a rank had no more. Unused: rank 0 at least 1.",
        "The epoch ended after 2 batches, when a rank had no more. Unused: rank 0 3.",
    ]


def test_a_wrapped_loader_shows_what_it_wraps() -> None:
    loader = DataLoader(_Stream(0, 1), batch_size=None)
    agreed = agree_on_end(loader, "stop", _Ranks(-1))
    assert agreed.dataset is loader.dataset
    with pytest.raises(TypeError):
        len(agreed)


def test_no_batch_is_found_within_batches_of_several_loaders() -> None:
    assert holds_no_batch(NoBatch())
    assert holds_no_batch({"a": torch.ones(1), "b": NoBatch()})
    assert holds_no_batch([1, (NoBatch(), 2)])
    assert not holds_no_batch({"a": [torch.ones(1)], "b": "text"})
