"""What runs in autograd once for each parameter: the hooks, and what they note down. They do next to nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.bucket import Slot

if TYPE_CHECKING:
    from lightning_replicate.core.channel import Channel


class Tally:
    """What the gradient hooks of one group note down and need to know.

    Hooks sit on tensors, where Python's garbage collector does not see them, so they may hold this and nothing that
    leads back to their parameter.
    """

    __slots__ = ("arrivals", "dirty", "keeps_apart", "scale", "task", "times")

    def __init__(self) -> None:
        self.dirty = False
        self.task = -1  # the graph task that was noticed last; their numbers never come again
        self.arrivals: list[int] | None = []  # numbers of slots; None once the order of arrival is agreed
        self.times: list[float] | None = None  # when they arrived, where that is wanted
        self.scale = 1.0  # for gradients as they arrive
        self.keeps_apart = False  # whether earlier rounds' gradients are set aside


def gradient_hook(slot: Slot, tally: Tally, channel: Channel) -> Callable[[torch.Tensor], None]:
    """The hook on one parameter. It runs once a parameter and backward, so it does next to nothing."""
    number = slot.number
    slot_of_hook = weakref.ref(slot)
    task_id = _private.current_graph_task_id
    del slot

    def hook(_: torch.Tensor) -> None:
        slot = slot_of_hook()
        if slot is None:
            return
        slot.used = True
        if tally.task != task_id():
            slot.reducer.enter(task_id())
        if tally.arrivals is not None:
            tally.arrivals.append(number)
            if tally.times is not None:
                tally.times.append(perf_counter())
        bucket = slot.bucket
        if bucket is None or slot.stale:
            slot.reducer.note_outside()
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            channel.advance()
        elif bucket.missing < 0:
            raise ReplicateError(
                f"Parameter {slot.name!r} received a gradient on rank {channel.rank} after its bucket had been sent:"
                f" it is used both inside and outside of a nested backward (reentrant checkpointing) and that began"
                f" after the first step. Use `use_reentrant=False`."
            )

    return hook


def keep_apart_hook(slot: Slot, tally: Tally) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Runs before a gradient is accumulated: sets earlier rounds' gradients aside, and weighs what arrives."""
    slot_of_hook = weakref.ref(slot)
    del slot

    def hook(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        slot = slot_of_hook()
        if tally.keeps_apart and slot is not None and not slot.used and slot.param.grad is not None:
            earlier = slot.param.grad
            slot.base = earlier.clone() if earlier is slot.view else earlier
            slot.param.grad = None
        scale = tally.scale
        return grads if scale == 1.0 else tuple(None if grad is None else grad * scale for grad in grads)

    return hook
