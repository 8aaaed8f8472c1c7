"""Stopping: a rank that wants to stop, or was told to by SIGTERM, takes all others with it after the same step.

Lightning asks each rank's own ``trainer.should_stop`` whether a loop is done, and lets rank 0 alone announce SIGTERM,
at the start of each batch. Here all ranks agree on both with one tiny message on the control group, wherever Lightning
is about to ask; it takes the place of Lightning's broadcast, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_replicate import _private

Union = Callable[[Sequence[bool]], "list[bool]"]
"""Gives which of the flags is set on any rank. Collective."""


class StopTogether:
    """Watches one fit.

    Args:
        trainer: The Trainer.
        union: Gives which of the flags is set on any rank. Collective.

    Attributes:
        before_epoch_end: Called on every rank when a training epoch's batches are through.
    """

    def __init__(self, trainer: Any, union: Union) -> None:
        self._trainer = trainer
        self._union = union
        self._told_to_end = False
        self._validated = False
        self.before_epoch_end: Callable[[], None] = lambda: None
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

    def _agree(self) -> None:
        stop, end = self._union([bool(self._trainer.should_stop), self._told_to_end])
        if stop:
            self._trainer.should_stop = True
        if end:
            _private.announce_sigterm(self._trainer)

    def _and_then_agree(
        self, hook: Callable[..., None], before: Callable[[], None] = lambda: None
    ) -> Callable[..., None]:
        def hook_and_agreement(*args: Any) -> None:
            before()
            hook(*args)
            self._agree()

        return hook_and_agreement

    def _agree_around(self, hook: Callable[..., None]) -> Callable[..., None]:
        def agreement_around_hook(*args: Any) -> None:
            self._validated = False
            self._agree()  # decides whether validation starts
            hook(*args)
            if self._validated:
                self._agree()

        return agreement_around_hook
