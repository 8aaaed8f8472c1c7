"""Values that decide something on each rank, and differ between ranks.

Lightning takes a value that was logged without ``sync_dist`` as it is on each rank. A schedule that follows it
(``ReduceLROnPlateau``) gives ranks different learning rates, and lets their weights drift apart without a word: here it
follows the mean over ranks. Callbacks (``EarlyStopping``, ``ModelCheckpoint``) agree on what they do, each by its own
value, so what is best is not the same for all ranks: here the user is told, once for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, nan
from typing import Any

import torch

from lightning_replicate import _private

Gather = Callable[[Sequence[float]], "list[list[float]]"]
"""Gives every rank all ranks' numbers. Collective."""


class Monitors:
    """Watches the values that schedules and callbacks of one Trainer follow.

    Args:
        trainer: The Trainer.
        gather: Gives every rank all ranks' numbers. Collective.
    """

    def __init__(self, trainer: Any, gather: Gather) -> None:
        self._trainer = trainer
        self._gather = gather
        self._told: set[str] = set()

    def follow_mean(self, schedules: Sequence[Any]) -> Callable[[], None]:
        """Makes schedules that follow a value follow its mean over ranks.

        Args:
            schedules: Lightning's configurations of schedules.

        Returns:
            A function that undoes it.
        """
        followed = []
        for schedule in schedules:
            if isinstance(schedule.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                # in manual optimization the user hands it over, and Lightning keeps no name
                name = schedule.monitor or "the argument of ReduceLROnPlateau.step"
                followed.append((schedule.scheduler, type(schedule.scheduler)))
                # an attribute of the schedule itself would get into its state, and into checkpoints
                schedule.scheduler.__class__ = self._following_mean(type(schedule.scheduler), name)

        def undo() -> None:
            for scheduler, kind in followed:
                scheduler.__class__ = kind

        return undo

    def _following_mean(self, kind: Any, monitor: str) -> Any:
        def step(scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            values = [value for (value,) in self._gather([float(metrics)])]
            if _differ(values):
                self._tell(monitor, values, "the schedule of the learning rate follows their mean")
                metrics = sum(values) / len(values)
            return kind.step(scheduler, metrics, *args, **kwargs)

        return type(kind.__name__, (kind,), {"step": step})

    def compare(self) -> None:
        """Tells the user of values that callbacks follow and that are not the same on all ranks. Collective."""
        names = {str(getattr(callback, "monitor", None) or "") for callback in self._trainer.callbacks}
        asked = sorted(names - self._told - {""})
        if not asked:
            return
        metrics = self._trainer.callback_metrics
        table = self._gather([float(metrics[name]) if name in metrics else nan for name in asked])
        for name, values in zip(asked, map(list, zip(*table, strict=True)), strict=True):
            if _differ(values):
                self._tell(name, values, "callbacks that monitor it decide by what is best on their own rank")

    def _tell(self, name: str, values: Sequence[float], what: str) -> None:
        if name not in self._told:
            listed = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values[:8]))
            _private.rank_zero_warn(
                f"The monitored value {name!r} is not the same on all ranks ({listed}); {what}. Log it with"
                f" `sync_dist=True`."
            )
        self._told.add(name)


def _differ(values: Sequence[float]) -> bool:
    return any(value != values[0] and not (isnan(value) and isnan(values[0])) for value in values)
