"""Optimizers over plain and sharded parameters in one parameter group.

torch's multi-tensor and fused steps take one kind at a time. So for the time of a step each group is seen as several,
one for each kind; the user's groups, schedules, names and checkpoints never know.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_replicate.core.dtensor import by_mesh, local_part


def step_by_kind(optimizers: Iterable[Any]) -> Callable[[], None]:
    """Lets optimizers step plain and sharded parameters one kind after the other.

    Args:
        optimizers: The optimizers. Whether their groups hold both kinds is seen at each step; groups may be added.

    Returns:
        A function that undoes it.

    Raises:
        ValueError: If an optimizer joins all parameters into one vector, which cannot be done with shards.
    """
    undone: list[Callable[[], None]] = []
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            if not _holds_both_kinds(_by_kind(optimizer)):
                continue
            raise ValueError(
                "LBFGS joins all parameters into one vector, which is not possible where some are sharded. Use an"
                " optimizer that treats each parameter by itself."
            )
        undone.append(_wrap_step(optimizer))

    def undo() -> None:
        for each in undone:
            each()

    return undo


def _by_kind(optimizer: Any) -> list[list[list[torch.Tensor]]]:
    """The parameters of each group, kind by kind."""
    return [by_mesh(group["params"]) for group in optimizer.param_groups]


def _holds_both_kinds(kinds: list[list[list[torch.Tensor]]]) -> bool:
    return any(len(parts) > 1 for parts in kinds)


def _wrap_step(optimizer: Any) -> Callable[[], None]:
    original = optimizer.step
    had_own = "step" in vars(optimizer)  # a scheduler puts its own there

    @functools.wraps(original)
    def step(_: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        kinds = _by_kind(optimizer)
        if not _holds_both_kinds(kinds):
            return original(closure, **kwargs)
        loss = None
        if closure is not None:  # sees the user's groups
            with torch.enable_grad():
                loss = closure()
            kinds = _by_kind(optimizer)  # it may have added a group
        if _overflowed(optimizer):
            return loss
        with _split_groups(optimizer, kinds):
            original(**kwargs)
        return loss

    optimizer.step = types.MethodType(step, optimizer)  # schedulers that are made later expect a method

    def undo() -> None:
        if had_own:
            optimizer.step = original
        else:
            vars(optimizer).pop("step", None)

    return undo


@contextmanager
def _split_groups(optimizer: Any, kinds: list[list[list[torch.Tensor]]]) -> Iterator[None]:
    groups = optimizer.param_groups
    split = [
        [{**group, "params": params} for params in parts] or [group] for group, parts in zip(groups, kinds, strict=True)
    ]
    optimizer.param_groups = [part for parts in split for part in parts]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, parts in zip(groups, split, strict=True):  # what a step keeps in its groups: counters, say
            group.update({key: value for key, value in parts[0].items() if key != "params"})


def _overflowed(optimizer: Any) -> bool:
    """Does what a fused optimizer does with a loss scaler's findings, which cannot be given to it beside shards."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is None:
        return False
    optimizer.found_inf = optimizer.grad_scale = None  # the scaler deletes them after the step
    if found.item():
        return True
    if scale is not None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local_part(param.grad).div_(scale)
    return False
