"""What is looked at when an optimizer steps replicated parameters.

One hook on all optimizers (torch's ``register_optimizer_step_pre_hook``) is there while anything is replicated. It

- notices gradients that nobody averaged: of a backward under ``no_sync`` that no round closed, or assigned by hand.
  Ranks would drift apart, without a word. A parameter costs two comparisons, since an average lies in its bucket;
- makes the loss that a closure returns the average over ranks, in the moment in which the optimizer looks at it. A line
  search (``torch.optim.LBFGS``) decides by that value how often it asks again, and each time is a backward that all
  ranks must run (pytorch#30439). Optimizers that hand the loss through cost no message.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_replicate import _private
from lightning_replicate.core.agreement import sum_of
from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.bucket import Slot
from lightning_replicate.core.collect import ownership, slot_of
from lightning_replicate.core.reducer import Reducer


class _LastStep:
    """How a group was when an optimizer last stepped it.

    Attributes:
        rounds: How many rounds it had closed.
        apart: Gradients that were not in a bucket: replaced on purpose, sparse, or of an earlier layout.
    """

    def __init__(self, rounds: int, apart: dict[Slot, weakref.ref[torch.Tensor]]) -> None:
        self.rounds = rounds
        self.apart = apart


class _Steps:
    """What is known of one optimizer's steps."""

    def __init__(self) -> None:
        self.count = 0
        self.running = False
        self.groups: dict[Reducer, list[Slot]] = {}
        self._key: Any = None
        self._last: dict[Reducer, _LastStep] = {}
        self._warned: set[Reducer] = set()

    def look_up(self, optimizer: Optimizer) -> None:
        """Finds the groups of the optimizer's parameters, if it has got others or ownership has changed."""
        key = (ownership.changes, [len(group["params"]) for group in optimizer.param_groups])
        if key == self._key:
            return
        self._key = key
        self.groups = {}
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            slot = slot_of(param)
            if slot is not None:
                self.groups.setdefault(slot.reducer, []).append(slot)
        self._last = {reducer: last for reducer, last in self._last.items() if reducer in self.groups}

    def check(self, optimizer: Optimizer) -> None:
        """Looks for gradients that are not averages.

        Raises:
            ReplicateError: If there is one, unless the ``unaveraged_gradients`` option says otherwise.
        """
        for reducer, slots in self.groups.items():
            if reducer.options.unaveraged_gradients == "allow":
                continue
            last = self._last.get(reducer, _LastStep(0, {}))
            if reducer.dirty:
                arrived = next((slot for slot in slots if slot.used), None)
                # the round itself refuses optimizers that run in backward
                if arrived is not None and not _private.has_optimizer_in_backward(arrived.param):
                    self._complain(optimizer, reducer, arrived)
            # in the common case this is all that is done for a parameter
            found = [(slot, g) for slot in slots if (g := slot.param.grad) is not slot.view and g is not None]
            for slot, grad in found:
                if slot.param.requires_grad and not _was_averaged(slot, grad, reducer, last):
                    self._complain(optimizer, reducer, slot)
            apart = {slot: weakref.ref(grad) for slot, grad in found}
            self._last[reducer] = _LastStep(reducer.rounds, apart)
            reducer.stepped = True

    def _complain(self, optimizer: Optimizer, reducer: Reducer, slot: Slot) -> None:
        came = "a backward that no round closed (`no_sync`)" if slot.used else "no backward (it was assigned)"
        message = (
            f"{type(optimizer).__name__} is about to step parameter {slot.name!r} on rank {reducer.channel.rank}, in"
            f" its step {self.count}, with a gradient that was not averaged over ranks: it came from {came}, and so"
            f" ranks would drift apart. Call `average_gradients()` before the step, on `trainer.strategy` or on"
            f" `replicate.state(module)`. If each rank shall step by itself, say `unaveraged_gradients='allow'`."
        )
        if reducer.options.unaveraged_gradients == "error":
            raise ReplicateError(message)
        if reducer not in self._warned:  # once, since it may be so in every step
            self._warned.add(reducer)
            warnings.warn(message, stacklevel=2)

    def average(self, loss: float) -> float:
        """The ranks' losses, averaged as gradients were in the last round. Collective."""
        reducer = next(iter(self.groups))
        weight = reducer.last_weight
        total, weights = sum_of([loss * weight if weight > 0 else 0.0, weight], reducer.channel.control)
        if reducer.wire.divide_factor is not None:
            return total / reducer.wire.divide_factor
        if reducer.options.average == "sum":
            return total
        return total / weights if weights > 0 else loss


def _was_averaged(slot: Slot, grad: torch.Tensor, reducer: Reducer, last: _LastStep) -> bool:
    """Whether a gradient outside of its bucket comes from a round, or was there in the optimizer's last step."""
    if slot in last.apart and last.apart[slot]() is grad:
        return True
    if slot.used or (reducer.rounds > last.rounds and slot not in reducer.without_average):
        return True
    # zeros instead of None, zeroed in place: whoever has others is noticed
    return grad.layout is torch.strided and not grad.any()


class _Loss(torch.Tensor):
    """A loss that becomes the average over ranks when somebody looks at it while the optimizer steps."""

    _steps: _Steps
    _step: int
    _value: torch.Tensor | None = None

    @classmethod
    def of(cls, loss: torch.Tensor, steps: _Steps) -> _Loss:
        made = loss.detach().as_subclass(cls)
        made._steps, made._step = steps, steps.count
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _private.map_leaves(_Loss._looked_at, (args, kwargs or {}))
        return func(*args, **kwargs)

    @staticmethod
    def _looked_at(value: Any) -> Any:
        if not isinstance(value, _Loss):
            return value
        plain = _private.as_plain_tensor(value)
        # once its step has ended, well or not, it is this rank's own business
        if value._value is None and value._steps.running and value._steps.count == value._step:
            value._value = plain.new_tensor(value._steps.average(plain.item()))
        return plain if value._value is None else value._value


_steps_of: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
_handles: list[Any] = []


def watch_optimizers(*, on: bool) -> None:
    """Puts the hook on all optimizers, or takes it off, whenever groups came or went."""
    _steps_of.clear()  # it would keep groups that are gone, and their process groups, as long as an optimizer lives
    if on and not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    elif not on:
        for handle in _handles:
            handle.remove()
        _handles.clear()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():  # a compiled step is not looked at
        return None
    steps = _steps_of.setdefault(optimizer, _Steps())
    steps.look_up(optimizer)
    if not steps.groups:
        return None
    steps.count += 1
    steps.running = True
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        steps.check(optimizer)
        return None
    closure = _closure(closure, optimizer, steps)
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def _closure(closure: Callable[[], Any], optimizer: Optimizer, steps: _Steps) -> Callable[[], Any]:
    def closure_for_all_ranks() -> Any:
        loss = closure()
        steps.check(optimizer)
        if isinstance(loss, _Loss):  # of an optimizer around this one
            return loss
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return _Loss.of(loss, steps)
        if isinstance(loss, float) and isinstance(optimizer, torch.optim.LBFGS):  # a number cannot wait
            return steps.average(loss)
        return loss

    return closure_for_all_ranks


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    steps = _steps_of.get(optimizer)
    if steps is not None:
        steps.running = False
