"""Loss scaling in steps that ranks skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_replicate.strategy.marking import parameters_of_optimizers


def closure_for_scaler(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure that returns ``None`` where no parameter has a gradient, which tells Lightning not to unscale and step.

    A loss scaler raises in such a step, and there is one whenever all ranks skip. As gradients are averages, all ranks
    find the same.

    Args:
        optimizer: The optimizer that is about to step.
        closure: Runs the training step and backward, and returns the loss.
    """

    def closure_that_says_if_there_is_nothing_to_step() -> Any:
        result = closure()
        has_grad = any(param.grad is not None for param in parameters_of_optimizers([optimizer]))
        return result if has_grad else None

    return closure_that_says_if_there_is_nothing_to_step
