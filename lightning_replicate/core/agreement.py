"""What ranks must agree on: the parameters they average, and the values they start from.

Agreement uses two means: a digest that every rank gathers (cheap, and enough when all is well), and the full
description, gathered only when digests differ, so that every rank can name the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.layout import ParamSpec, assign_buckets

_BROADCAST_BYTES = 256 * 1024 * 1024


def require_same_specs(
    specs: Sequence[ParamSpec], options: str, control: dist.ProcessGroup, *, kind: str = "parameter"
) -> None:
    """Checks that all ranks hold the same parameters and options.

    Args:
        specs: This rank's parameters, in order.
        options: Text that must be equal on all ranks.
        control: A group on which CPU tensors travel.
        kind: What is compared, for messages.

    Raises:
        ReplicateError: On every rank, with the first difference and the ranks, if ranks differ.
    """
    text = "\n".join([options, *map(repr, specs)])
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    world_size = dist.get_world_size(control)
    digests = [torch.empty_like(digest) for _ in range(world_size)]
    dist.all_gather(digests, digest, group=control)
    if all(torch.equal(other, digests[0]) for other in digests):
        return
    raise ReplicateError(_first_difference(gather_objects((options, list(specs)), control), kind))


def _first_difference(described: Sequence[tuple[str, Sequence[ParamSpec]]], kind: str) -> str:
    options, reference = described[0]
    for rank, (other_options, others) in enumerate(described):
        for mine, theirs in zip(reference, others, strict=False):
            fields = mine.differences(theirs)
            if "name" in fields:
                return (
                    f"Ranks hold different {kind}s: where rank 0 has {mine.name!r}, rank {rank} has"
                    f" {theirs.name!r}. Build the same modules in the same order on all ranks."
                )
            if fields:
                field = fields[0]
                ignored = {"parameter": "ignored_params", "buffer": "ignored_buffers"}[kind]
                return (
                    f"{kind.capitalize()} {mine.name!r} differs between ranks in its {field}:"
                    f" {getattr(mine, field)} on rank 0, {getattr(theirs, field)} on rank {rank}."
                    f" Give it the same {field} on all ranks, or leave it out: `replicate({ignored}=...)`,"
                    f" `ReplicateStrategy(local=...)`."
                )
        if len(others) != len(reference):
            longer, rank_of_longer = (reference, 0) if len(reference) > len(others) else (others, rank)
            extra = longer[min(len(others), len(reference))]
            return (
                f"Rank 0 has {len(reference)} {kind}s, rank {rank} has {len(others)}; the first that only rank"
                f" {rank_of_longer} has is {extra.name!r}. Build the same modules on all ranks."
            )
        if other_options != options:
            return f"replicate() was called differently: rank 0 with {options}, rank {rank} with {other_options}."
    return "Ranks describe their parameters differently."  # digests differed, texts do not: cannot happen


@torch.no_grad()
def broadcast_from_first(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, unseen_by_autograd: bool = False
) -> None:
    """Gives every rank the values of the group's first rank, a few large messages at a time.

    Args:
        tensors: Tensors of the same shapes, data types and devices on all ranks; changed in place.
        group: The group over which they travel.
        unseen_by_autograd: Whether graphs that are still to be run may hold the tensors. Their versions stay then.
    """
    source = dist.get_global_rank(group, 0)
    is_source = dist.get_rank(group) == 0
    writable = [tensor.data if unseen_by_autograd else tensor.detach() for tensor in tensors if tensor.numel() > 0]
    for chunk in _chunks(writable):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        dist.broadcast(flat.view(torch.uint8), source, group=group)  # bytes: every backend sends every type
        if is_source:
            continue
        start = 0
        for tensor in chunk:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors of one data type and device, each group up to ``_BROADCAST_BYTES``."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    chunks: list[list[torch.Tensor]] = []
    for same_kind in kinds.values():
        sizes = [tensor.nbytes for tensor in same_kind]
        assigned = assign_buckets(sizes, [None] * len(sizes), [_BROADCAST_BYTES])
        chunks.extend([same_kind[index] for index in chunk] for chunk in assigned)
    return chunks


def broadcast_order(order: Sequence[int] | None, size: int, control: dist.ProcessGroup) -> list[int] | None:
    """Sends the first rank's order of ``size`` things to all ranks.

    Args:
        order: The first rank's order, or ``None`` if it has none; ignored on other ranks.
        size: How many things are ordered.
        control: A group on which CPU tensors travel.

    Returns:
        The first rank's order, or ``None`` if it has none.
    """
    message = torch.full((size,), -1, dtype=torch.int64)
    if order is not None and dist.get_rank(control) == 0:
        message.copy_(torch.tensor(list(order), dtype=torch.int64))
    dist.broadcast(message, dist.get_global_rank(control, 0), group=control)
    agreed = message.tolist()
    return None if -1 in agreed else agreed


def union(flags: Sequence[bool], control: dist.ProcessGroup) -> list[bool]:
    """Which of the flags is set on any rank.

    Args:
        flags: This rank's flags; as many on every rank.
        control: A group on which CPU tensors travel.
    """
    message = torch.tensor(list(flags), dtype=torch.uint8)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=control)
    return [bool(flag) for flag in message.tolist()]


def sum_later(numbers: Sequence[int], control: dist.ProcessGroup) -> Callable[[], list[int]]:
    """Starts to sum numbers over ranks, position by position, and does not wait.

    Args:
        numbers: This rank's numbers; as many on every rank.
        control: A group on which CPU tensors travel.

    Returns:
        A function that waits and gives the sums.
    """
    message = torch.tensor(list(numbers), dtype=torch.int64)
    work = dist.all_reduce(message, group=control, async_op=True)

    def read() -> list[int]:
        work.wait()
        return [int(number) for number in message.tolist()]

    return read


def sum_of(numbers: Sequence[float], control: dist.ProcessGroup) -> list[float]:
    """The sums over ranks, position by position.

    Args:
        numbers: This rank's numbers; as many on every rank.
        control: A group on which CPU tensors travel.
    """
    message = torch.tensor(list(numbers), dtype=torch.float64)
    dist.all_reduce(message, group=control)
    return [float(number) for number in message.tolist()]


def gather_numbers(numbers: Sequence[int], control: dist.ProcessGroup) -> list[list[int]]:
    """All ranks' numbers, rank by rank.

    Args:
        numbers: This rank's numbers; as many on every rank.
        control: A group on which CPU tensors travel.
    """
    message = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
    gathered = [torch.empty_like(message) for _ in range(dist.get_world_size(control))]
    dist.all_gather(gathered, message, group=control)
    return [theirs.tolist() for theirs in gathered]


def gather_objects(thing: Any, control: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank has, rank by rank.

    Args:
        thing: What this rank has: anything that can be pickled.
        control: A group on which CPU tensors travel. Default: all ranks.
    """
    gathered: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(gathered, thing, group=control)
    return gathered


def ranks_with(flags: Mapping[str, bool], control: dist.ProcessGroup) -> dict[str, list[int]]:
    """On which ranks each of the named flags is set; those that are set nowhere are left out.

    Args:
        flags: This rank's flags; the same names on every rank.
        control: A group on which CPU tensors travel.
    """
    columns = zip(*gather_flags(list(flags.values()), control), strict=True)
    found = {name: [rank for rank, flag in enumerate(c) if flag] for name, c in zip(flags, columns, strict=True)}
    return {name: ranks for name, ranks in found.items() if ranks}


def gather_flags(flags: Sequence[bool], control: dist.ProcessGroup) -> list[list[bool]]:
    """All ranks' flags, rank by rank; see :func:`gather_numbers`."""
    return [[bool(flag) for flag in theirs] for theirs in gather_numbers(flags, control)]
