"""Gradient clipping over replicated and sharded parameters together, which torch's own functions refuse.

The norm counts replicated gradients once, since all ranks hold the same, and sums sharded ones over their shards. It is
the same number on all ranks, and that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.dtensor import by_mesh, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _gradients(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [param.grad for param in listed if param.grad is not None]


@torch.no_grad()
def total_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all gradients taken together. Collective if any of them is sharded.

    Args:
        parameters: Parameters, plain or ``DTensor``, in the same order on all ranks. Those without a gradient are left
            out.
        norm_type: The p of the p-norm, ``math.inf`` included.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: See ``torch.nn.utils.get_total_norm``.

    Returns:
        A scalar, equal on all ranks.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is set. On all ranks.
    """
    norms: list[torch.Tensor] = []
    for group in by_mesh(_gradients(parameters)):
        norm = nn.utils.get_total_norm(group, norm_type, foreach=foreach)
        # offloaded gradients are where their mesh cannot send them from
        if is_dtensor(norm):
            norm = cast("DTensor", norm.to(norm.device_mesh.device_type)).full_tensor()
        norms.append(norm)
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it cannot be clipped. To clip"
            f" by it all the same, set `error_if_nonfinite=False`."
        )
    return total


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters of which some are sharded. Collective if any is.

    Args:
        parameters: See :func:`total_grad_norm`.
        max_norm: Gradients are scaled down so that their norm is at most this.
        norm_type: The p of the p-norm.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: See ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping: a scalar, equal on all ranks.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is set. On all ranks.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = total_grad_norm(listed, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in _by_device([local_part(grad) for grad in _gradients(listed)]):
        _private.foreach_mul(group, factor.to(group[0].device))
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` for parameters of which some are sharded. Not collective.

    Args:
        parameters: Parameters, plain or ``DTensor``.
        clip_value: Gradients are clamped to ``[-clip_value, clip_value]``.
    """
    for grad in _gradients(parameters):
        local_part(grad).clamp_(-float(clip_value), float(clip_value))


def _by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """``lightning.pytorch.utilities.grad_norm`` for modules of which some are sharded. Collective if any is.

    Args:
        module: The module. Parameters without a gradient are left out.
        norm_type: The p of the p-norm; ``"inf"`` for the infinity norm.
        group_separator: Goes between the kind of norm and a parameter's name, for loggers.

    Returns:
        The norm of each parameter's whole gradient, and that of all together under ``"..._total"``. Equal on all ranks.

    Raises:
        ValueError: If ``norm_type`` is not positive.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf', got {norm_type!r}.")
    prefix = f"grad_{order}_norm"
    named = {name: param for name, param in module.named_parameters() if param.grad is not None}
    norms = {f"{prefix}{group_separator}{name}": total_grad_norm(param, order) for name, param in named.items()}
    if norms:
        norms[f"{prefix}_total"] = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms.values()]), order)
    return norms
