"""Loss scaling and clipping: over plain and sharded parameters, and in steps that ranks skip."""

from __future__ import annotations

from collections.abc import Callable, Set
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightning_replicate import _private
from lightning_replicate.core.clipping import clip_grad_norm_, clip_grad_value_
from lightning_replicate.core.dtensor import local_part
from lightning_replicate.strategy.marking import parameters_of_optimizers


def closure_for_scaler(
    optimizer: Any, closure: Callable[[], Any], on_any_rank: Callable[[bool], bool]
) -> Callable[[], Any]:
    """A closure that returns ``None`` where no parameter has a gradient, which tells Lightning not to unscale and step.

    A loss scaler raises in such a step, and there is one whenever all ranks skip.

    Args:
        optimizer: The optimizer that is about to step.
        closure: Runs the training step and backward, and returns the loss.
        on_any_rank: Tells whether this is so on any rank. Averages are the same on all; local gradients are not.
    """

    def closure_that_says_if_there_is_nothing_to_step() -> Any:
        result = closure()
        has_grad = any(param.grad is not None for param in parameters_of_optimizers([optimizer]))
        return result if on_any_rank(has_grad) else None

    return closure_that_says_if_there_is_nothing_to_step


def clip_over_both_kinds(plugin: Any, local: Set[torch.Tensor]) -> Callable[[], None]:
    """Makes a precision plugin clip replicated and sharded gradients together, and local ones by themselves.

    The Trainer's flag, ``configure_gradient_clipping`` and ``self.clip_gradients`` all come to these two methods. A
    norm that a rank's local gradients took part in would scale what ranks share by another factor on each.

    Args:
        plugin: Lightning's precision plugin.
        local: The local parameters.

    Returns:
        A function that undoes it.
    """

    def by_norm(optimizer: Any, clip_val: float) -> None:
        params = list(plugin.main_params(optimizer))
        for own in (False, True):
            clip_grad_norm_([param for param in params if (param in local) is own], clip_val)

    def by_value(optimizer: Any, clip_val: float) -> None:
        clip_grad_value_(plugin.main_params(optimizer), clip_val)

    plugin.clip_grad_by_norm, plugin.clip_grad_by_value = by_norm, by_value

    def undo() -> None:
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(plugin).pop(name, None)

    return undo


def scale_together(scaler: Any) -> Callable[[], None]:
    """Makes a loss scaler accept sharded gradients, and skip a step on all ranks if any rank found an overflow.

    Needed where ranks hold different gradients: shards, and parameters that are local. Otherwise scales would drift
    apart, and weights with them.

    Args:
        scaler: A ``torch.amp.GradScaler``.

    Returns:
        A function that undoes it.
    """

    def unscale(
        original: Callable[..., Any], optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, *args: Any
    ) -> Any:
        groups = [{"params": list(map(_with_local_gradient, group["params"]))} for group in optimizer.param_groups]
        found = original(SimpleNamespace(param_groups=groups), inv_scale, found_inf, *args)
        overflow = torch.zeros_like(found_inf)  # one message in any case: a rank may have no gradient
        for on_device in found.values():
            overflow += on_device.to(overflow.device)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return {overflow.device: overflow}

    return _private.wrap_unscaling(scaler, unscale)


def _with_local_gradient(param: torch.Tensor) -> torch.Tensor:
    local = None if param.grad is None else local_part(param.grad)
    if local is None or local is param.grad:
        return param
    stand_in = local.detach()
    stand_in.grad = local
    return stand_in
