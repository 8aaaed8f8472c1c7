"""Planned buckets: the cut that ends first, and right gradients before and after it is made."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_replicate import replicate
from lightning_replicate.core.planning import Arrivals, MessageCost, Trial, cut
from lightning_replicate.core.state import ReplicateState
from tests.core.helpers import assert_ranks_equal, assert_same, data, mlp
from tests.ranks import Ranks


def _end(counts: list[int], arrivals: list[float], nbytes: list[int], cost: MessageCost) -> float:
    end, first = 0.0, 0
    for count in counts:
        last = first + count
        end = max(end, arrivals[last - 1]) + cost.of(sum(nbytes[first:last]))
        first = last
    return end


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=7),
    st.floats(1e-6, 1),
    st.floats(0, 1e-2),
)
def test_no_other_cut_ends_earlier(gradients: list[tuple[float, int]], latency: float, per_byte: float) -> None:
    arrivals = sorted(time for time, _ in gradients)
    nbytes = [size for _, size in gradients]
    cost = MessageCost(latency, per_byte)
    planned = cut(arrivals, nbytes, cost)
    assert sum(planned) == len(nbytes)
    size = len(nbytes)
    every = (
        [b - a for a, b in zip((0, *places), (*places, size), strict=True)]
        for number in range(size)
        for places in combinations(range(1, size), number)
    )
    best = min(_end(counts, arrivals, nbytes, cost) for counts in every)
    assert _end(planned, arrivals, nbytes, cost) == pytest.approx(best)


def test_extremes() -> None:
    arrivals, nbytes = [float(i) for i in range(6)], [100] * 6
    assert cut(arrivals, nbytes, MessageCost(1e-6, 1e-6))[-1] == 1  # only the last is sent after backward
    assert cut(arrivals, nbytes, MessageCost(100.0, 0.0)) == [6]  # a message costs more than it hides
    many = cut([i / 1e4 for i in range(10_000)], [4] * 10_000, MessageCost(1e-5, 1e-6))
    assert sum(many) == 10_000


def test_what_a_message_costs() -> None:
    cost = MessageCost.fit((1000, 0.003), (3000, 0.005))
    assert cost.latency == pytest.approx(0.002)
    assert cost.of(5000) == pytest.approx(0.007)
    assert MessageCost.fit((1000, 0.003), (3000, 0.002)).seconds_per_byte == 0.0  # noise


def test_when_gradients_arrive() -> None:
    arrivals = Arrivals()
    assert not arrivals.enough
    arrivals.note([2, 1, 0], [10.0, 50.0, 90.0])  # the first round pays for what is done once
    arrivals.note([2, 1], [5.0, 6.0])
    arrivals.note([2, 1, 2], [7.0, 8.0, 8.5])
    assert arrivals.enough
    assert arrivals.typical([2, 1, 0]) == [0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("by_default", "as_planned", "wins"),
    [
        ([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [9.0, 0.9, 0.9, 5.0, 0.9, 0.9], True),
        ([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.1, 0.99, 0.99, 0.99, 0.99, 0.99], False),  # that little may be noise
        ([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [9.0, 0.9, 0.9], True),
        ([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.1, 0.1], False),  # this rank skipped nearly all rounds
    ],
)
def test_which_plans_stay(by_default: list[float], as_planned: list[float], wins: bool) -> None:
    assert Trial([1], 12, by_default, as_planned).wins is wins


def test_a_trial_counts_rounds_in_which_a_rank_has_nothing() -> None:
    trial = Trial([2, 1])
    for number in range(1, 13):
        trial.start(number % 4 > 0)
        trial.end()
        assert (trial.wants_plan, trial.is_over) == (number == 6, number == 12)
    assert (len(trial.by_default), len(trial.as_planned)) == (5, 4)


PLANNED = 3 + 6  # rounds until buckets are as planned: arrivals are looked at, then the default is timed
DECIDED = PLANNED + 6


def _planned(rank: int, wins: bool) -> None:
    torch.manual_seed(0)
    plain, net = mlp(64, 64, 64, 64, 2), mlp(64, 64, 64, 64, 2)
    net.load_state_dict(plain.state_dict())
    replicate(net, bucket_cap_mb="auto")
    state = replicate.state(net)
    (group,) = state.groups
    group._measure_messages = lambda: MessageCost(1e-9, 1e-9)  # so fast that each gradient may go by itself
    own, Trial.wins = Trial.wins, property(lambda _: wins == (rank == 0))  # rank 0 decides
    try:
        _go_through_a_plan(rank, plain, net, state, wins)
    finally:
        Trial.wins = own
    with pytest.raises(ValueError, match="positive number of MiB, or 'auto'"):
        replicate(mlp(2, 2), bucket_cap_mb="large")  # type: ignore[arg-type]


def _go_through_a_plan(rank: int, plain: nn.Module, net: nn.Module, state: ReplicateState, wins: bool) -> None:
    first_frozen = DECIDED + 2
    for step in range(first_frozen + 8 + DECIDED + 3):  # frozen parameters leave the layout after eight rounds
        if step == first_frozen:  # another layout: looked at anew, and planned anew
            for model in (plain, net):
                model[0].weight.requires_grad_(False)
        for model in (plain, net):
            model.zero_grad()
        sum(plain(data(r, step, 3, 64)).pow(2).mean() / 2 for r in range(2)).backward()
        net(data(rank, step, 3, 64)).pow(2).mean().backward()
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        assert_ranks_equal(grads)
        assert_same(grads, [param.grad for param in plain.parameters() if param.grad is not None])
        plan = [bucket.parameters for bucket in state.plan().buckets]
        as_planned = PLANNED <= step + 1 < DECIDED or (wins and DECIDED <= step + 1 < first_frozen + 8)
        if step < first_frozen + 7:
            assert (len(plan) > 1) is as_planned, step
        names: list[list[str]] = [[]] * 2
        torch.distributed.all_gather_object(names, plan)
        assert names[0] == names[1]  # rank 0's plan
        if step == PLANNED:
            assert state.last_round is not None
            assert state.last_round.early > 0
    assert (len(plan) > 1) is wins


@pytest.mark.parametrize("wins", [True, False])
def test_d17_auto_plans_once_and_after_a_new_layout(ranks: Ranks, wins: bool) -> None:
    ranks(2, _planned, wins)
