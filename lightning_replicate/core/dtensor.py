"""Telling sharded tensors (``DTensor``) from plain ones, without loading what takes a second where nobody shards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a ``DTensor``. While nobody has imported the class, there cannot be one."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, getattr(loaded, "DTensor", ()))


def by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors that torch can handle in one call: plain ones, and those of each device mesh."""
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_dtensor(tensor) else None, []).append(tensor)
    return list(groups.values())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
