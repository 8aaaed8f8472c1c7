"""Values that are logged on each rank by itself, and what follows them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_replicate import ReplicateError
from lightning_replicate.strategy.monitors import Monitors
from tests.core.helpers import assert_ranks_equal, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Small, assert_trained_like, by_hand, trainer
from tests.strategy.test_trainer import _loss

WORLD = 2


class _Plateau(Small):
    """A value that falls on rank 1 and rises on rank 0, from the third epoch on on both; halves the rate at once."""

    values = ((1.0, 2.0, 3.0, 4.0), (9.0, 7.0, 5.0, 5.0))

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("own", self.values[self.global_rank][self.current_epoch])
        if not self.automatic_optimization:
            self.lr_schedulers().step(self.trainer.callback_metrics["own"])  # type: ignore[union-attr]
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]


def _schedules(rank: int) -> None:
    for manual in (False, True):
        model = _Plateau(manual)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(max_epochs=4).fit(model)
        told = [str(warning.message) for warning in caught if "monitored value" in str(warning.message)]
        assert len(told) == (rank == 0)  # once, on rank 0
        name = "the argument of ReduceLROnPlateau.step" if manual else "own"
        expected = f"The monitored value {name!r} is not the same on all ranks (1 on rank 0, 9 on rank 1)"
        assert not told or told[0].startswith(expected), told[0]
        # the mean falls, 5, 4.5, 4, and then rises, 4.5: rank 0 alone would have halved the rate twice by then
        rates = [*[0.1] * 3, 0.05] if manual else [0.1] * 4
        assert model.rates == rates
        assert model.trainer.optimizers[0].param_groups[0]["lr"] == 0.05
        reference = by_hand(mlp(4, 5, 2), lambda m, r, step: _loss(m, r, step % 4), 16, world=WORLD)
        assert_trained_like(model, reference)
        schedule: Any = model.trainer.lr_scheduler_configs[0].scheduler
        assert type(schedule) is torch.optim.lr_scheduler.ReduceLROnPlateau  # as it was


class _SavesEarly(Callback):
    def on_train_epoch_start(self, run: Any, module: Any) -> None:
        if run.current_epoch == 2:
            run.save_checkpoint(self.path)

    def __init__(self, path: str) -> None:
        self.path = path


def _resumed(rank: int, path: str) -> None:
    """The schedule's state in a checkpoint is what torch makes it."""
    warnings.simplefilter("ignore")
    trainer(max_epochs=3, callbacks=[_SavesEarly(path)]).fit(_Plateau())
    dist.barrier()
    state = torch.load(path, weights_only=True)["lr_schedulers"][0]
    assert state["best"] == 4.5 and "step" not in state
    model = _Plateau()
    trainer(max_epochs=4).fit(model, ckpt_path=path, weights_only=True)
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == 0.05
    assert_ranks_equal(list(model.parameters()))


def test_a_schedule_in_a_checkpoint(ranks: Ranks, tmp_path: Any) -> None:
    ranks(2, _resumed, f"{tmp_path}/early.ckpt")


def test_a_schedule_that_follows_a_local_value_follows_its_mean(ranks: Ranks) -> None:
    ranks(2, _schedules)


class _Monitored(Small):
    synchronized = False

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch) + self.global_rank, sync_dist=self.synchronized)


def _callbacks(rank: int, folder: str) -> None:
    for synchronized in (True, False):
        for callback in (EarlyStopping("loss", patience=5), ModelCheckpoint(folder, monitor="loss")):
            model = _Monitored()
            model.synchronized = synchronized
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                checkpoints = isinstance(callback, ModelCheckpoint)
                run = trainer(
                    max_epochs=3, limit_val_batches=1.0, callbacks=[callback], enable_checkpointing=checkpoints
                )
                run.fit(model)
            told = [str(warning.message) for warning in caught if "monitored value 'loss'" in str(warning.message)]
            assert len(told) == (rank == 0 and not synchronized)
            assert_ranks_equal(list(model.parameters()))


def test_callbacks_that_follow_a_local_value_are_told_of_once(ranks: Ranks, tmp_path: Any) -> None:
    ranks(2, _callbacks, str(tmp_path))


class _OnRank0(Small):
    """A value that rank 0 alone has; ``strict=False`` lets rank 1 skip the schedule without a call."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own", "strict": False}}

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("own", float(self.current_epoch), rank_zero_only=True)


def _on_one_rank(rank: int) -> None:
    warnings.simplefilter("ignore")
    message = r"ReduceLROnPlateau on 'own' gave rank 0 a learning rate of 0.05 and rank 1 one of 0.1"
    with pytest.raises(ReplicateError, match=message):
        trainer(max_epochs=4).fit(_OnRank0())
    model = _Monitored()
    model.synchronized = True
    # a callback that only one rank has, and that stops nobody
    follows = [_Follows()] if rank == 0 else []
    trainer(max_epochs=2, limit_val_batches=1, callbacks=follows).fit(model)
    assert_ranks_equal(list(model.parameters()))


class _Follows(Callback):
    monitor = "loss"


def test_values_and_callbacks_that_one_rank_alone_has(ranks: Ranks) -> None:
    ranks(2, _on_one_rank)


class _Trainer:
    callbacks = (EarlyStopping("a"), EarlyStopping("b"), object())
    callback_metrics = {"a": torch.tensor(math.nan)}


@pytest.mark.parametrize("other", [math.nan, 1.0])
def test_not_a_number_and_missing_values(other: float) -> None:
    monitors = Monitors(_Trainer(), lambda mine: [mine, ({"a": other, "b": math.nan}, [])])
    if math.isnan(other):
        monitors.compare()  # the same everywhere
        return
    with pytest.warns(UserWarning, match="'a' is not the same on all ranks"):
        monitors.compare()
