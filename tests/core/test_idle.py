"""Parameters that no rank uses leave the layout, cost nothing, and come back in the round in which a rank uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_replicate import replicate
from lightning_replicate.core import group
from tests.core.helpers import assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, seeded
from tests.ranks import Ranks

WORLD = 2
PATIENCE = 3
impatient = patch.object(group, "_IDLE_ROUNDS", PATIENCE)


class Branches(nn.Module):
    """A trunk and two branches, of which a step uses any."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 50)

    def forward(self, batch: torch.Tensor, uses: str = "") -> torch.Tensor:
        hidden = self.trunk(batch)
        return sum((getattr(self, name)(hidden).square().mean() for name in uses), hidden.mean())


def _round(net: Branches, rank: int, step: int, uses: Sequence[str], divisor: float | None = None) -> None:
    """One round, compared with the mean by hand; ``uses`` has the branches by rank."""
    params = [param for param in net.parameters() if param.requires_grad]
    loss = lambda r: net(data(r, step, 5, 3), uses[r])
    expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)], divisor)
    before = grads(params)
    loss(rank).backward()
    # what was there stays, and the new gradient comes on top
    expected = [
        new if old is None else old if new is None else old + new for old, new in zip(before, expected, strict=True)
    ]
    assert_same(grads(params), expected)
    assert_ranks_equal([param.grad for param in params])


def _bytes(net: nn.Module) -> int:
    stats = replicate.state(net).last_round
    assert stats is not None
    return stats.nbytes


def _idle(net: nn.Module) -> set[str]:
    return {name.partition(".")[0] for name in replicate.state(net).plan().idle}


@impatient
def _leave_and_come_back(rank: int, average: Any, zero: bool) -> None:
    net = seeded(Branches, 1)
    replicate(net, average=average, bucket_cap_mb=0.0001)
    divisor = 1.0 if average == "sum" else None
    uses = ["a", "a"]
    step = 0

    def rounds(count: int, *uses: str) -> None:
        nonlocal step
        for _ in range(count):
            if zero:
                net.zero_grad()
            _round(net, rank, step, uses, divisor)
            step += 1

    rounds(2, "ab", "b")
    full = _bytes(net)
    rounds(PATIENCE + 1, *uses)  # after the last of them the layout is made
    assert _idle(net) == {"b"}
    stats = replicate.state(net).last_round
    assert stats is not None and {"b.weight", "b.bias"} <= set(stats.missed)
    rounds(2, *uses)
    assert _bytes(net) < full - 4 * 250 + 64  # 250 elements of b
    rounds(1, "a", "ab")  # one rank alone, in this very round
    assert _idle(net) == set()
    rounds(1, "ab", "a")
    assert _bytes(net) >= full - 64
    rounds(PATIENCE + 1, *uses)
    assert _idle(net) == set()  # more patience than the first time
    rounds(3 * PATIENCE, *uses)
    assert _idle(net) == {"b"}
    rounds(1, "", "")  # now a as well has no gradient, but not for long
    rounds(1, "b", "b")
    assert _idle(net) == set()
    rounds(2, "ab", "ab")


@impatient
def _accumulation(rank: int) -> None:
    """An idle parameter that is used within ``no_sync`` alone is averaged when the window closes."""
    net = seeded(Branches, 2)
    replicate(net)
    params = list(net.parameters())
    for step in range(PATIENCE + 2):
        net.zero_grad()
        _round(net, rank, step, ["a", "a"])
    assert _idle(net) == {"b"}
    net.zero_grad()
    uses = ["a", "ab"]
    both = lambda r: net(data(r, 50, 5, 3), uses[r]) + net(data(r, 51, 5, 3), "a")
    expected = mean_of([local_grads(both(r), params) for r in range(WORLD)])
    with replicate.state(net).no_sync():
        net(data(rank, 50, 5, 3), uses[rank]).backward()
    net(data(rank, 51, 5, 3), "a").backward()
    assert_same(grads(params), expected)
    assert_ranks_equal([param.grad for param in params])
    assert _idle(net) == set()


@impatient
def _several_groups(rank: int) -> None:
    """With other groups the last bucket would leave early: not while a parameter may come back."""
    nets = [seeded(Branches, seed) for seed in (3, 4)]
    for net in nets:
        replicate(net)
    params = [param for net in nets for param in net.parameters()]
    for step in range(2 * PATIENCE):
        uses = ["a", "ab" if step == 2 * PATIENCE - 1 else "a"]
        loss = lambda r, step=step, uses=uses: sum((net(data(r, step, 5, 3), uses[r]) for net in nets), torch.zeros(()))
        expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)])
        if step == 2 * PATIENCE - 1:
            assert [_idle(net) for net in nets] == [{"b"}, {"b"}]
        for param in params:
            param.grad = None
        loss(rank).backward()
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in params])
    assert [_idle(net) for net in nets] == [set(), set()]


@impatient
def _frozen_while_idle(rank: int) -> None:
    net = seeded(Branches, 5)
    replicate(net)
    for step in range(PATIENCE + 2):
        net.zero_grad()
        _round(net, rank, step, ["a", "a"])
    net.b.requires_grad_(False)
    net.zero_grad()
    _round(net, rank, 20, ["a", "a"])
    assert _idle(net) == set() and {"b.weight", "b.bias"} <= set(replicate.state(net).plan().frozen)
    net.b.requires_grad_(True)
    for step in range(21, 24):
        net.zero_grad()
        _round(net, rank, step, ["ab", "a"])
    assert _idle(net) == set()


@impatient
def _the_rest_is_frozen(rank: int) -> None:
    """A layout without any bucket could not say that one rank uses an idle parameter."""
    net = seeded(Branches, 7)
    replicate(net, average="world")
    state = replicate.state(net)
    for step in range(PATIENCE + 2):
        net.zero_grad()
        _round(net, rank, step, ["a", "a"])
    assert _idle(net) == {"b"}
    net.trunk.requires_grad_(False)
    net.a.requires_grad_(False)
    net.zero_grad()
    for _ in range(group._FROZEN_ROUNDS + 2):
        state.close_round()
    assert _idle(net) == set() and {"b.weight", "b.bias"} == set(state.plan().parameters)
    params = list(net.b.parameters())
    batch = data(1, 40, 5, 3)
    expected = [grad / WORLD for grad in local_grads(net(batch, "b"), params) if grad is not None]
    with state.round():
        if rank == 1:
            net(batch, "b").backward()
    assert_same(grads(params), expected)
    assert_ranks_equal([param.grad for param in params])


@impatient
def _never(rank: int, options: dict[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    net = seeded(Branches, 6)
    replicate(net, **({"comm_hook": allreduce_hook} if options else {}))
    if not options:  # nothing but idle parameters: they stay, since the layout must hold something
        net.trunk.requires_grad_(False)
        net.b.requires_grad_(False)
        state = replicate.state(net)
        for _ in range(2 * PATIENCE):
            state.close_round()
    else:
        for step in range(2 * PATIENCE):
            net.zero_grad()
            _round(net, rank, step, ["a", "a"])
    assert _idle(net) == set()


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("average", ["participants", "sum", "weighted"])
def test_r68_idle_parameters_cost_nothing_until_they_are_used(ranks: Ranks, average: str, zero: bool) -> None:
    ranks(WORLD, _leave_and_come_back, average, zero)


def test_used_within_no_sync(ranks: Ranks) -> None:
    ranks(WORLD, _accumulation)


def test_several_groups(ranks: Ranks) -> None:
    ranks(WORLD, _several_groups)


def test_frozen_while_idle(ranks: Ranks) -> None:
    ranks(WORLD, _frozen_while_idle)


def test_the_rest_is_frozen(ranks: Ranks) -> None:
    ranks(WORLD, _the_rest_is_frozen)


@pytest.mark.parametrize("options", [{}, {"hook": True}])
def test_they_stay(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks(WORLD, _never, options)


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 1)
        self.words = nn.Embedding(6, 4, sparse=True)

    def forward(self, batch: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self.trunk(batch).mean() + self.words(torch.tensor(rows, dtype=torch.int64)).square().sum()


@impatient
def _wakes_sparse(rank: int) -> None:
    """What leaves the layout before it ever had a gradient may turn out to be sparse, on one rank alone."""
    net = seeded(_Words, 8)
    replicate(net)
    for step in range(PATIENCE + 2):
        net.zero_grad()
        net.trunk(data(rank, step, 5, 3)).mean().backward()
    assert _idle(net) == {"words"}
    for step, rows in ((10, [[], [1, 4]]), (11, [[2], [1]]), (12, [[5, 5], []])):
        net.zero_grad()
        expected = torch.zeros(6, 4)
        for mine in rows:
            for row in mine:
                expected[row] += net.words.weight.detach()[row]  # twice the weight, over two ranks
        loss = net(data(rank, step, 5, 3), rows[rank]) if rows[rank] else net.trunk(data(rank, step, 5, 3)).mean()
        loss.backward()
        grad = net.words.weight.grad
        assert grad is not None and grad.is_sparse
        torch.testing.assert_close(grad.to_dense(), expected)
        assert_ranks_equal([grad.to_dense()])


def test_a_sparse_gradient_comes_back(ranks: Ranks) -> None:
    ranks(WORLD, _wakes_sparse)
