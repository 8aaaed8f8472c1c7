"""Values that decide something on each rank, and differ between ranks.

Lightning takes a value that was logged without ``sync_dist`` as it is on each rank. A schedule that follows it
(``ReduceLROnPlateau``) gives ranks different learning rates, and lets their weights drift apart without a word: here it
follows the mean over ranks. Callbacks (``EarlyStopping``, ``ModelCheckpoint``) agree on what they do, each by its own
value, so what is best is not the same for all ranks: here the user is told, once for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import Any

import torch

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError

Gather = Callable[[Any], "list[Any]"]
"""Gives every rank what all ranks have. Collective."""


class Monitors:
    """Watches the values that schedules and callbacks of one Trainer follow.

    Args:
        trainer: The Trainer.
        gather: Gives every rank what all ranks have. Collective.
    """

    def __init__(self, trainer: Any, gather: Gather) -> None:
        self._trainer = trainer
        self._gather = gather
        self._told: set[str] = set()
        self._skipping: list[Any] = []  # schedules that Lightning skips on ranks which lack their value

    def follow_mean(self, schedules: Sequence[Any]) -> Callable[[], None]:
        """Makes schedules that follow a value follow its mean over ranks.

        Those with ``strict=False`` are left to Lightning, since a rank that lacks the value skips them without a call;
        :meth:`compare` sees to it that ranks keep equal rates.

        Args:
            schedules: Lightning's configurations of schedules.

        Returns:
            A function that undoes it.
        """
        followed = []
        for schedule in schedules:
            if isinstance(schedule.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                if not schedule.strict:
                    self._skipping.append(schedule)
                    continue
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
            values = self._gather(float(metrics))
            if _differ(values):
                self._tell(monitor, dict(enumerate(values)), "the schedule of the learning rate follows their mean")
                metrics = sum(values) / len(values)
            return kind.step(scheduler, metrics, *args, **kwargs)

        return type(kind.__name__, (kind,), {"step": step})

    def compare(self) -> None:
        """Looks at values that callbacks follow, and at rates of schedules that ranks may have skipped. Collective.

        Raises:
            ReplicateError: On all ranks, if such a schedule has given them different learning rates.
        """
        metrics = self._trainer.callback_metrics
        names = {str(getattr(callback, "monitor", None) or "") for callback in self._trainer.callbacks} - {""}
        values = {name: float(metrics[name]) if name in metrics else nan for name in sorted(names)}
        groups = [(s.monitor, group) for s in self._skipping for group in s.scheduler.optimizer.param_groups]
        rates = [(monitor, float(group["lr"])) for monitor, group in groups]
        by_rank = self._gather((values, rates))  # on all ranks, whatever their own callbacks are
        for name in sorted(set().union(*(theirs for theirs, _ in by_rank))):
            # a rank whose callbacks do not follow it has no say
            followed = {rank: theirs[name] for rank, (theirs, _) in enumerate(by_rank) if name in theirs}
            if _differ(list(followed.values())):
                self._tell(name, followed, "callbacks that monitor it decide by what is best on their own rank")
        for rank, (_, others) in enumerate(by_rank):
            for (monitor, first), (_, other) in zip(by_rank[0][1], others, strict=False):
                if first != other:
                    raise ReplicateError(
                        f"ReduceLROnPlateau on {monitor!r} gave rank 0 a learning rate of {first:g} and rank {rank} one"
                        f" of {other:g}: ranks have other values, or none. Log it on all ranks, with `sync_dist=True`."
                    )

    def _tell(self, name: str, values: Mapping[int, float], what: str) -> None:
        if name not in self._told:
            listed = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in list(values.items())[:8])
            _private.rank_zero_warn(
                f"The monitored value {name!r} is not the same on all ranks ({listed}); {what}. Log it with"
                f" `sync_dist=True`."
            )
        self._told.add(name)


def _differ(values: Sequence[float]) -> bool:
    return any(value != values[0] and not (isnan(value) and isnan(values[0])) for value in values)
