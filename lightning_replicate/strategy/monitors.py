"""Values that decide something on each rank, and differ between ranks.

Lightning takes a value that was logged without ``sync_dist`` as it is on each rank. A schedule that follows it
(``ReduceLROnPlateau``) gives ranks different learning rates, and lets their weights drift apart without a word: here it
follows the mean over ranks. Callbacks (``EarlyStopping``, ``ModelCheckpoint``) agree on what they do, each by its own
value, so what is best is not the same for all ranks: here the user is told, once for each value.
"""

from __future__ import annotations

import functools
import types
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
        wrapped = []
        for schedule in schedules:
            if isinstance(schedule.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                # in manual optimization the user hands it over, and Lightning keeps no name
                self._wrap(schedule.scheduler, schedule.monitor or "the argument of ReduceLROnPlateau.step")
                wrapped.append(schedule.scheduler)

        def undo() -> None:
            for scheduler in wrapped:
                vars(scheduler).pop("step", None)

        return undo

    def _wrap(self, scheduler: Any, monitor: str) -> None:
        original = scheduler.step

        @functools.wraps(original)
        def step(_: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            values = [value for (value,) in self._gather([float(metrics)])]
            if _differ(values):
                self._tell(monitor, values, "the schedule of the learning rate follows their mean")
                metrics = sum(values) / len(values)
            return original(metrics, *args, **kwargs)

        scheduler.step = types.MethodType(step, scheduler)

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
