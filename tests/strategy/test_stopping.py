"""A rank that wants to stop, or is told to, takes all others with it after the same step."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_replicate import ReplicateStrategy
from tests.core.helpers import mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Small, assert_trained_like, by_hand, trainer
from tests.strategy.test_inputs import _Uneven
from tests.strategy.test_trainer import _loss


class _StopsIn(Small):
    """``should_stop`` is set on one rank alone, in the hook of this name, when ``steps`` were made."""

    steps = 6

    def __init__(self, hook: str, after: int) -> None:
        super().__init__()
        self.hook, self.after = hook, after
        self.validations = 0

    def _maybe_stop(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_rank == 1 and self.trainer.global_step >= self.after:
            self.trainer.should_stop = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == self.after - 1 and self.hook == "training_step" and self.trainer.global_rank == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self._maybe_stop("on_train_start")

    def on_train_batch_end(self, *args: Any) -> None:
        self._maybe_stop("on_train_batch_end")

    def on_validation_end(self) -> None:
        self.validations += not self.trainer.sanity_checking
        self._maybe_stop("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self._maybe_stop("on_train_epoch_end")


def _everywhere(rank: int, world: int) -> None:
    for hook, after, expected in (
        ("training_step", 3, 4),  # the others have gone on with the next batch
        ("on_train_batch_end", 3, 4),
        ("on_validation_end", 2, 2),
        ("on_train_epoch_end", 1, 6),
        ("on_train_start", 0, 0),
    ):
        model = _StopsIn(hook, after)
        run = trainer(max_epochs=3, limit_val_batches=1, val_check_interval=2)
        run.fit(model)
        assert run.global_step == expected, (hook, run.global_step)
        validations: list[Any] = [None] * world
        dist.all_gather_object(validations, model.validations)
        assert len(set(validations)) == 1, (hook, validations)
        assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, expected, world=world))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_r35_should_stop_on_one_rank_alone(ranks: Ranks, world: int) -> None:
    ranks(world, _everywhere, world)


class _AllStop(Small):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.should_stop |= self.trainer.global_step == 3


def _all_at_once(rank: int) -> None:
    model = _AllStop()
    run = trainer(max_epochs=2, limit_val_batches=1)
    run.fit(model)
    assert run.global_step == 3  # as on one process
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 3, world=2))
    last = _StopsIn("on_train_batch_end", _StopsIn.steps)  # rank 1 alone, at the last batch of an epoch
    run = trainer(max_epochs=3, limit_val_batches=1)
    run.fit(last)
    assert run.global_step == _StopsIn.steps


def test_r35_where_all_ranks_ask_they_stop_at_once(ranks: Ranks) -> None:
    ranks(2, _all_at_once)


def _with_limits(rank: int) -> None:
    model = _StopsIn("on_train_batch_end", 1)
    run = trainer(min_steps=8, max_epochs=3)
    run.fit(model)
    assert run.global_step == 8  # all ranks train until Lightning may stop
    assert_trained_like(model, by_hand(mlp(4, 5, 2), lambda m, r, step: _loss(m, r, step % 6), 8, world=2))

    for mode, lengths in (("stop", [6, 9]), ("join", [1, 6])):
        uneven = _Uneven(lengths)

        class StopRank1(Callback):
            def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
                run.should_stop |= run.global_rank == 1 and run.global_step == 3

        run = trainer(ReplicateStrategy(uneven_inputs=mode), callbacks=[StopRank1()])
        run.fit(uneven)
        assert run.global_step == 4


def test_r35_with_a_minimum_of_steps_and_with_uneven_loaders(ranks: Ranks) -> None:
    ranks(2, _with_limits)


class _Unsynced(Small):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        rising = self.trainer.global_rank == 1
        self.log("val_loss", float(self.trainer.current_epoch if rising else -self.trainer.current_epoch))


def _early_stopping(rank: int) -> None:
    run = trainer(max_epochs=5, limit_val_batches=1, callbacks=[EarlyStopping("val_loss", patience=1)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "It is recommended to use", UserWarning)
        warnings.filterwarnings("ignore", "The monitored value 'val_loss' is not the same on all ranks")
        run.fit(_Unsynced())
    assert run.global_step == 2 * Small.steps  # rank 1 sees its loss rise in the second epoch


def test_r35_early_stopping_on_a_value_that_differs_by_rank(ranks: Ranks) -> None:
    ranks(2, _early_stopping)


class _Signalled(Small):
    steps = 8

    def __init__(self, signalled: list[int]) -> None:
        super().__init__()
        self.signalled = signalled

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 3:
            if self.trainer.global_rank in self.signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.trainer.global_rank == 0:
                time.sleep(0.3)
        return super().training_step(batch, batch_idx)


def _sigterm(rank: int, folder: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for signalled in ([0], [1], [0, 1]):
        model = _Signalled(signalled)
        run = trainer()
        with pytest.raises(SIGTERMException):
            run.fit(model)
        steps = 4 if len(signalled) == 2 else 5  # a rank that is told alone lets the others end their next batch
        assert run.global_step == steps
        assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, steps, world=2))
        assert signal.getsignal(signal.SIGTERM) == before
    run = trainer()
    run.fit(_Signalled([]))  # nothing is left over
    assert run.global_step == 8


def test_r40_sigterm_ends_all_ranks_after_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _sigterm, str(tmp_path))


def _nothing_left(rank: int) -> None:
    run = trainer()
    run.fit(Small())
    for owner in (run.fit_loop, run.fit_loop.epoch_loop, run._signal_connector):
        assert not {name for name, value in vars(owner).items() if callable(value) and name.startswith("on_advance")}
        assert not vars(owner).keys() & {"_sigterm_notifier_fn", "_broadcast_sigterm_tensor", "on_run_start"}
    run.validate(Small(), verbose=False)


def test_the_trainer_is_as_it_was_after_fit(ranks: Ranks) -> None:
    ranks(2, _nothing_left)
