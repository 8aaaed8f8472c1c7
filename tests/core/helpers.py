"""The reference that every parity test rests on: all ranks' data, on one process, averaged by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Grads = list[torch.Tensor | None]


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """Runs ``make`` with its own seed and leaves the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def data(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A batch that differs from rank to rank and step to step, and that every rank can make for every other."""
    return seeded(lambda: torch.randn(*shape, dtype=dtype), 7919 * step + rank + 1)


def grads(params: Sequence[torch.Tensor]) -> Grads:
    """Copies of the current gradients."""
    return [None if param.grad is None else param.grad.detach().clone() for param in params]


def local_grads(loss: torch.Tensor, params: Sequence[torch.Tensor]) -> Grads:
    """Gradients of a loss without touching ``.grad`` and without communication."""
    if not loss.requires_grad:
        return [None] * len(params)
    return list(torch.autograd.grad(loss, list(params), allow_unused=True))


def mean_of(per_rank: Sequence[Grads], divisor: float | None = None) -> Grads:
    """The mean over ranks with zeros where a rank has none, and ``None`` where no rank has any."""
    result: Grads = []
    for column in zip(*per_rank, strict=True):
        present = [grad for grad in column if grad is not None]
        result.append(sum(present[1:], present[0]) / (divisor or len(per_rank)) if present else None)
    return result


def assert_same(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], **tolerance: float
) -> None:
    """Compares values, and where ``None`` stands."""
    assert [grad is None for grad in actual] == [grad is None for grad in expected]
    for mine, reference in zip(actual, expected, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, reference, **tolerance)


def assert_ranks_equal(tensors: Sequence[torch.Tensor | None]) -> None:
    """Checks bit by bit that all ranks hold the same. Collective."""
    mine = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    for rank, theirs in enumerate(everybody):
        for index, (first, other) in enumerate(zip(everybody[0], theirs, strict=True)):
            same = (first is None) == (other is None) and (first is None or bitwise_equal(first, other))
            assert same, f"tensor {index} differs between rank 0 and rank {rank}: {first} and {other}"


def bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaNs included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


class Branches(nn.Module):
    """A trunk, two branches of equal shape, a head and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.idle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *branches: str) -> torch.Tensor:
        x = self.trunk(x)
        for branch in branches:
            x = torch.tanh(getattr(self, branch)(x))
        return self.head(x)


def mlp(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers with tanh between them."""

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for size, following in itertools.pairwise(sizes):
            layers += [nn.Linear(size, following, dtype=dtype), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    return seeded(make, seed)
