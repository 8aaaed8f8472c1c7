"""Stopping: a rank that wants to stop, or was told to by SIGTERM, takes all others with it after the same step.

Lightning asks each rank's own ``trainer.should_stop`` whether a loop is done, and lets rank 0 alone announce SIGTERM,
at the start of each batch. Here all ranks agree on both with tiny messages on the control group, which take the place
of Lightning's broadcast.

At the end of a batch nobody waits for the others, which would make every rank as slow as the slowest at one more point
of the step: the message of one batch's end is read at the end of the next. A rank that asks for a stop does wait, since
there is nothing to hurry for. If it finds that all ranks ask, they all stop at once, as on one process; if not, the
others have gone on, and all stop after the next batch. Until then the wish is kept from Lightning. At the ends of
validations and epochs ranks do wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_replicate import _private

Read = Callable[[], "list[int]"]
"""Waits for a message and gives its numbers, summed over ranks."""

SumLater = Callable[[Sequence[int]], Read]
"""Starts to sum numbers over ranks. Collective."""


class StopTogether:
    """Watches one fit.

    Args:
        trainer: The Trainer.
        sum_later: Starts to sum numbers over ranks. Collective.
        world_size: How many ranks agree.

    Attributes:
        before_epoch_end: Called on every rank when a training epoch's batches are through.
        after_metrics: Called on every rank when values that are monitored may be new: after validations and epochs.
    """

    def __init__(self, trainer: Any, sum_later: SumLater, world_size: int) -> None:
        self._trainer = trainer
        self._sum_later = sum_later
        self._world_size = world_size
        self._under_way: Read | None = None  # what ranks said at the end of the last batch
        self._wants_stop = False  # asked for on this rank, and not agreed on yet
        self._told_to_end = False
        self._validated = False
        self.before_epoch_end: Callable[[], None] = lambda: None
        self.after_metrics: Callable[[], None] = lambda: None
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._wrapped = [(fit, "on_run_start"), (fit, "on_advance_end"), (epoch, "on_advance_end")]
        fit.on_run_start = self._and_then_agree(fit.on_run_start)
        fit.on_advance_end = self._and_then_agree(fit.on_advance_end, lambda: self.before_epoch_end())
        epoch.on_advance_end = self._agree_around(epoch.on_advance_end)
        self._give_back = _private.take_over_sigterm(trainer, self._on_sigterm)

    def remove(self) -> None:
        """Leaves the Trainer as it was."""
        for loop, name in self._wrapped:
            delattr(loop, name)  # the class's own shows again
        self._wrapped = []
        self._give_back()

    def validated(self) -> None:
        """Notes that hooks of a validation ran, which may have set ``should_stop``."""
        self._validated = True

    def _on_sigterm(self) -> None:
        self._told_to_end = True

    def _say(self) -> tuple[list[int], Read]:
        """Tells the others what this rank wants."""
        self._wants_stop = self._wants_stop or bool(self._trainer.should_stop)
        mine = [int(self._wants_stop), int(self._told_to_end)]
        return mine, self._sum_later(mine)

    def _act(self, stop: bool, end: bool) -> None:
        """Does what was agreed on, and hides what was not."""
        self._wants_stop = self._wants_stop or bool(self._trainer.should_stop)  # a signal handler may just have set it
        self._trainer.should_stop = stop
        if stop:
            self._wants_stop = False
        if end:
            _private.announce_sigterm(self._trainer)

    def _agree(self) -> None:
        """Waits for all ranks: one that wants to stop is enough."""
        if self._under_way is not None:
            self._under_way()  # no message is left behind; who wanted to stop then says so again
            self._under_way = None
        stop, end = self._say()[1]()
        self._act(stop > 0, end > 0)

    def _agree_at_batch_end(self) -> None:
        """Hears what ranks said one batch ago, and waits only where this rank wants to stop: all may want it."""
        stop, end = (0, 0) if self._under_way is None else self._under_way()
        mine, self._under_way = self._say()
        wanted_by = self._under_way() if any(mine) else (0, 0)
        at_once = [number == self._world_size for number in wanted_by]
        self._act(stop > 0 or at_once[0], end > 0 or at_once[1])

    def _and_then_agree(
        self, hook: Callable[..., None], before: Callable[[], None] = lambda: None
    ) -> Callable[..., None]:
        def hook_and_agreement(*args: Any) -> None:
            before()
            hook(*args)
            self._agree()
            self.after_metrics()

        return hook_and_agreement

    def _agree_around(self, hook: Callable[..., None]) -> Callable[..., None]:
        def agreement_around_hook(*args: Any) -> None:
            self._validated = False
            self._agree_at_batch_end()  # decides whether validation starts
            hook(*args)
            if self._validated:
                self._agree()
                self.after_metrics()

        return agreement_around_hook
