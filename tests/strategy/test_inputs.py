"""Uneven data: all ranks end the epoch after the same batch, and nobody waits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics import MeanMetric

from lightning_replicate import ReplicateError, ReplicateStrategy
from lightning_replicate.strategy.inputs import EndTogether
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


def _without_warning(rank: int, message: str, case: Any, *args: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        case(rank, *args)


def _stop(rank: int, world: int) -> None:
    for lengths in ([4, 6], [6, 4], [0, 3], [5, 5]) if world == 2 else ([4, 6, 5], [3, 3, 2]):
        for sized in (False, True):
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

    class Fetches(_Uneven):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    with warnings.catch_warnings(), pytest.raises(ValueError, match="takes `dataloader_iter`"):
        warnings.simplefilter("ignore")  # Lightning's, about this flavor
        trainer(ReplicateStrategy(uneven_inputs="join")).fit(Fetches([1, 2, 3]))


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
    assert model.trainer.callback_metrics["val_loss"].dtype == torch.float32  # as with `ddp` and one process


def test_r30_validation_loaders_of_unequal_length(ranks: Ranks) -> None:
    ranks(2, _evaluation)


class _Schedule(_Uneven):
    """Asks for the number of steps before the fit, as warm-up schedules do."""

    def __init__(self, lengths: list[int], sized: bool, total: int) -> None:
        super().__init__(lengths, sized)
        self.total = total

    def configure_optimizers(self) -> Any:
        asked = self.trainer.estimated_stepping_batches
        assert asked == (self.total if self.sized else self.trainer.max_steps)
        optimizer = super().configure_optimizers()
        steps = int(asked) if asked > 0 else self.total
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def val_dataloader(self) -> Any:
        return DataLoader(Batches(self.trainer.global_rank, 4), batch_size=None)


def _by_hand_with_schedule(steps_an_epoch: int, total: int, world: int) -> list[Any]:
    model = mlp(4, 5, 2)
    for step in range(total):
        lr = 0.1 * (1 - step / total)
        by_hand(model, lambda m, r, _, i=step: _loss(m, r, i % steps_an_epoch), 1, world=world, lr=lr)
    return list(model.parameters())


def _early(rank: int) -> None:
    for lengths in ([4, 6], [6, 4]):
        for sized in (True, False):
            model = _Schedule(lengths, sized, total=8)
            run = trainer(max_epochs=2)
            run.fit(model)
            assert model.seen == [list(range(4))] * 2
            assert run.num_training_batches == (4 if sized else float("inf"))
            assert_trained_like(model, _by_hand_with_schedule(4, 8, WORLD))


def test_a_schedule_that_asks_for_the_number_of_steps_gets_the_agreed_one(ranks: Ranks) -> None:
    ranks(2, _early)


class _AsksInSetup(Callback):
    def setup(self, run: Any, module: Any, stage: str) -> None:
        self.total = run.estimated_stepping_batches


def _orders(rank: int, folder: str) -> None:
    # whoever asks first; loaders that are made anew in every epoch; twice with the same Trainer
    asks = _AsksInSetup()
    run = trainer(max_epochs=2, callbacks=[asks], reload_dataloaders_every_n_epochs=1)
    run.fit(model := _Schedule([4, 6], True, total=8))
    assert asks.total == 8 and model.seen == [list(range(4))] * 2
    assert_trained_like(model, _by_hand_with_schedule(4, 8, WORLD))
    run.fit_loop.max_epochs = 4
    run.fit(again := _Schedule([3, 2], True, total=8))
    assert asks.total == 8 and again.seen == [list(range(2))] * 2
    assert_ranks_equal(list(again.parameters()))

    for lengths, options, steps, evaluations in (
        ([8, 6], {"limit_train_batches": 0.5}, 3, 0),  # half of each rank's own, then the shorter
        ([8, 6], {"limit_train_batches": 5}, 5, 0),
        ([8, 6], {"overfit_batches": 2}, 2, 1),
        ([8, 6], {"overfit_batches": 0.5}, 3, 1),
        ([8, 6], {"val_check_interval": 0.5, "limit_val_batches": 1}, 6, 2),  # in the middle of what is trained on
        ([8, 6], {"val_check_interval": 6, "limit_val_batches": 1}, 6, 1),
    ):
        model = _Schedule(lengths, True, total=steps)
        counts = _CountValidations()
        run = trainer(callbacks=[counts], num_sanity_val_steps=0, **options)
        run.fit(model)
        assert (model.seen, counts.number) == ([list(range(steps))], evaluations), options
        assert_trained_like(model, _by_hand_with_schedule(steps, steps, WORLD))

    path = f"{folder}/middle.ckpt"
    trainer(callbacks=[_SaveAt(3, path)]).fit(_Schedule([5, 7], True, total=5))
    model = _Schedule([5, 7], True, total=10)
    trainer(max_epochs=2).fit(model, ckpt_path=path, weights_only=True)
    assert model.seen == [[3, 4], list(range(5))]
    assert_ranks_equal(list(model.parameters()))


class _CountValidations(Callback):
    number = 0

    def on_validation_start(self, run: Any, module: Any) -> None:
        self.number += 1


def test_the_agreed_number_of_steps_at_every_entry_and_with_every_limit(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _without_warning, "You're resuming from a checkpoint that ended before", _orders, str(tmp_path))


def _tune(rank: int) -> None:
    from lightning.pytorch.tuner import Tuner

    model = _Uneven([4, 6], sized=True)
    model.lr = 0.1
    found = Tuner(trainer(max_epochs=1)).lr_find(model, num_training=7, early_stop_threshold=None)
    assert found is not None and len(found.results["lr"]) == len(found.results["loss"]) > 0
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, found.results["lr"])
    assert everybody[0] == everybody[1]
    assert_ranks_equal(list(model.parameters()))


def test_the_learning_rate_finder_runs_over_uneven_loaders(ranks: Ranks) -> None:
    ranks(2, _tune)


# ---- several loaders, which end as one --------------------------------------------------------------------------


class _TwoLoaders(Small):
    """``a`` and ``b``, each as long as it is on this rank; what is missing or begins again is Lightning's business."""

    def __init__(self, lengths: list[tuple[int, int]], mode: str, streams: str) -> None:
        super().__init__()
        self.lengths, self.mode, self.streams = lengths, mode, streams
        self.steps_done = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps_done += 1
        return _combined_loss(self.net, batch)

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        parts = {
            name: DataLoader((_Stream if name in self.streams else Batches)(rank, length), batch_size=None)
            for name, length in zip("ab", self.lengths[rank], strict=True)
        }
        return CombinedLoader(parts, self.mode)


def _combined_loss(model: Any, batch: Any) -> Tensor:
    parts = [part for part in batch.values() if part is not None]
    return torch.stack([(scale + 1) * model(part).pow(2).mean() for scale, part in enumerate(parts)]).sum()


def _modes(rank: int) -> None:
    lengths = [(6, 10), (10, 4)]
    for mode, expected in (("max_size", 10), ("max_size_cycle", 10), ("min_size", 4)):
        for streams in ("", "ab", "a"):
            for uneven, steps in (("stop", expected), ("join", 6 if mode == "min_size" else 10)):
                model = _TwoLoaders(lengths, mode, streams)
                trainer(ReplicateStrategy(uneven_inputs=uneven)).fit(model)

                def batches(r: int, mode: str = mode) -> list[Any]:
                    parts = {n: DataLoader(Batches(r, c), None) for n, c in zip("ab", lengths[r], strict=True)}
                    return [batch for batch, *_ in CombinedLoader(parts, mode)]

                own = [batches(r) for r in range(WORLD)]
                assert model.steps_done == min(len(own[rank]), steps), (mode, streams, uneven)

                def loss(m: Any, r: int, step: int, own: Any = own) -> Any:
                    return _combined_loss(m, own[r][step]) if step < len(own[r]) else None

                assert_trained_like(model, by_hand(mlp(4, 5, 2), loss, steps, world=WORLD))
    with pytest.raises(ReplicateError, match=r"rank 0 has 6 batches, rank 1 has 4 batches"):
        trainer(ReplicateStrategy(uneven_inputs="error")).fit(_TwoLoaders(lengths, "min_size", ""))
    # what is as long on all ranks as a whole is no error
    trainer(ReplicateStrategy(uneven_inputs="error")).fit(_TwoLoaders(lengths, "max_size", ""))
    with pytest.raises(ValueError, match="does not support"):  # Lightning's own, on all ranks
        trainer().fit(_TwoLoaders(lengths, "sequential", ""))


def test_several_loaders_end_as_one_in_every_mode(ranks: Ranks) -> None:
    ranks(2, _modes)


class _Guessing(Sampler):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index] for index in range(self.batches)])

    def __len__(self) -> int:
        return 6


class _LyingStream(_Stream):
    def __len__(self) -> int:
        return 5


def _lengths_that_data_does_not_keep(rank: int) -> None:
    class Lying(_Uneven):
        def train_dataloader(self) -> Any:
            dataset: Any = _LyingStream if self.trainer.global_rank == 0 else _Stream
            return DataLoader(dataset(self.trainer.global_rank, 3 + rank), batch_size=None)

    model = Lying([0, 0])  # a length on one rank only, and a wrong one
    trainer(max_epochs=2).fit(model)
    assert model.seen == [[0, 1, 2], [0, 1, 2]]
    assert_trained_like(model, by_hand(mlp(4, 5, 2), lambda m, r, s: _loss(m, r, s % 3), 6, world=WORLD))

    class Buckets(_Uneven):
        def train_dataloader(self) -> Any:  # batches of samples that are alike, whose number is a guess
            return DataLoader(Batches(rank, 8), batch_sampler=_Guessing(3 + rank), collate_fn=lambda parts: parts[0])

    model = Buckets([0, 0])
    trainer().fit(model)
    assert model.seen == [[0, 1, 2]]
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 3, world=WORLD))

    class Different(_Uneven):
        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            return [loader, loader] if rank == 0 else loader

    with pytest.raises(ReplicateError, match=r"different numbers of loaders: rank 0 has 2, rank 1 has 1"):
        trainer().fit(Different([3, 3]))


def test_data_that_does_not_keep_to_its_length(ranks: Ranks) -> None:
    with_length = r"Your `IterableDataset` has `__len__` defined"
    ranks(2, _without_warning, with_length, _lengths_that_data_does_not_keep)


# ---- the loaders themselves: no ranks needed ------------------------------------------------------------------------


class _Ranks:
    """Plays the other rank."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)
        self.asked: list[list[int]] = []

    def __call__(self, numbers: Any) -> list[list[int]]:
        self.asked.append([int(number) for number in numbers])
        return [self.asked[-1], self.answers.pop(0)]


def test_loaders_of_equal_known_length_agree_once_an_epoch() -> None:
    ranks = _Ranks([1], [4, 0], [4, 0])
    agreed = EndTogether("stop", ranks).agree(CombinedLoader(DataLoader(Batches(0, 4), batch_size=None), "min_size"))
    for _ in range(2):
        assert len(list(agreed)) == len(agreed) == 4
    assert ranks.asked == [[1], [4, 0], [4, 0]]


def test_what_is_left_unused_is_said_once_and_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    stream = CombinedLoader(DataLoader(_Stream(0, 4), batch_size=None), "min_size")
    each = [[-1, 1], [1], [1], [0]]
    together = EndTogether("stop", _Ranks([1], *each, *each, [-1, 1], [1], [0], [1], [2, 0]))
    agreed = together.agree(stream)
    with caplog.at_level(logging.INFO):
        assert [len(list(agreed)) for _ in range(3)] == [2, 2, 1]
        assert len(list(together.agree(CombinedLoader([[1, 2, 3, 4, 5]], "min_size")))) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "The epoch ended after 2 batches, when a rank has no more. Unused: rank 0 at least 1.",
        "The epoch ended after 1 batch, when a rank has no more. Unused: rank 0 at least 1.",
        "Each epoch ends after 2 batches, when a rank has no more. Unused: rank 0 3.",
    ]


def test_an_agreed_loader_is_one_of_its_class_and_leaves_the_original_alone() -> None:
    class Mine(CombinedLoader):
        def __next__(self) -> Any:
            batch, *rest = super().__next__()
            return (batch, "mine", *rest)

    loader = Mine([[1, 2], [3, 4]], "max_size")
    agreed = EndTogether("stop", _Ranks([2], [1, 0])).agree(loader)
    assert isinstance(agreed, Mine)
    agreed.limits = [1, 1]
    assert [batch[:2] for batch in agreed] == [([1, 3], "mine")]
    assert loader.limits is None and type(loader) is Mine and len(list(loader)) == 2


def test_a_loader_that_has_no_length_elsewhere_shows_all_else() -> None:
    loader = DataLoader(Batches(0, 3), batch_size=None)
    part: Any = EndTogether("stop", _Ranks([-1])).part(loader)
    assert part.dataset is loader.dataset
    part.worker_init_fn = print  # as Lightning seeds workers
    assert loader.worker_init_fn is print
    with pytest.raises(TypeError):
        len(part)
    assert len(list(part)) == 3
    assert EndTogether("stop", _Ranks([5])).part(loader) is loader
    assert EndTogether("stop", _Ranks([0])).part(loader) is not loader  # Lightning refuses an empty one, on its rank
    # a length that nobody vouches for is not trusted
    assert (
        len(list(EndTogether("stop", _Ranks([1], [2, 1], [1], [0])).agree(CombinedLoader([_Short()], "min_size")))) == 1
    )


class _Short:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter([1])
