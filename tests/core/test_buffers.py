"""Which buffers follow rank 0, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_replicate import replicate
from tests.core.helpers import assert_ranks_equal, data, seeded
from tests.ranks import Ranks


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.metric = MeanMetric()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average + x.mean(0).detach()  # assigned anew: another tensor each time
        self.count += x.shape[0]
        return self.norm(self.linear(x))


def _choices(rank: int) -> None:
    shared = {
        # what all ranks have alike: (after a round, after sync_buffers())
        "auto": ({"average"}, {"average", "norm.running_mean"}),
        "step": ({"average", "norm.running_mean"}, {"average", "norm.running_mean"}),
        "epoch": (set(), {"average", "norm.running_mean"}),
        "start": (set(), set()),
        ("count", "norm.*"): ({"count", "norm.running_mean"}, {"count", "norm.running_mean"}),
        "callable": ({"norm.running_mean"}, {"norm.running_mean"}),
    }
    for choice, (after_round, when_read) in shared.items():
        model = seeded(_Model, rank)
        option: Any = (lambda name, buffer: name.endswith("mean")) if choice == "callable" else choice
        state = replicate.state(replicate(model, buffers=option))
        assert_ranks_equal(list(model.buffers()))  # set-up makes all equal, whatever comes later
        for step in range(2):
            x = data(rank, step, 3 + rank, 4)  # other sizes: other counts
            out = model(x) + model(x)  # two forwards, one backward: no buffer changes in between
            out.pow(2).sum().backward()
        assert _equal_on_all_ranks(model) == after_round, choice
        state.sync_buffers()
        assert _equal_on_all_ranks(model) == when_read, choice
        state.remove()


def _equal_on_all_ranks(model: nn.Module) -> set[str]:
    equal = set()
    for name in ("average", "count", "norm.running_mean"):
        try:
            assert_ranks_equal([dict(model.named_buffers())[name]])
            equal.add(name)
        except AssertionError:
            pass
    return equal


def test_r55_r57_d78_d79_d82_t38_choices(ranks: Ranks) -> None:
    ranks(2, _choices)


def _like_ddp(rank: int) -> None:
    """Statistics read at the end are those of a broadcast before each forward, as DDP makes it."""
    from torch.nn.parallel import DistributedDataParallel

    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ours, theirs = seeded(make, 0), seeded(make, 0)
    replicate(ours)
    wrapped = DistributedDataParallel(theirs)
    for model, run in ((ours, ours), (theirs, wrapped)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            run(data(rank, step, 5, 4)).pow(2).sum().backward()
            optimizer.step()
    replicate.state(ours).sync_buffers()
    wrapped.eval()
    wrapped(data(rank, 9, 5, 4))  # DDP, too, broadcasts when they are about to be read
    for mine, reference in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, reference)
    assert_ranks_equal(list(ours.buffers()))


def test_r57_statistics_equal_a_broadcast_before_each_forward(ranks: Ranks) -> None:
    ranks(2, _like_ddp)


class _Scaled(nn.Module):
    """A buffer that autograd keeps for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def _counters_stay(rank: int) -> None:
    model = seeded(_Model, 0)
    state = replicate.state(replicate(model))
    model(data(rank, 0, 3 + rank, 4)).sum().backward()
    model.add_module("late", seeded(lambda: nn.BatchNorm1d(4), rank))
    model.late.running_mean.fill_(rank)
    state.refresh()  # equalizes what is new, and leaves each rank its counters
    assert model.count == 3 + rank
    assert_ranks_equal([*model.late.buffers(), *model.late.parameters()])
    assert model.late.running_mean[0] == 0


def test_r55_new_modules_do_not_touch_the_counters_of_old_ones(ranks: Ranks) -> None:
    ranks(2, _counters_stay)


def _two_backwards(rank: int) -> None:
    model = replicate(seeded(_Scaled, 0))
    out = model(data(rank, 0, 3, 4))
    out[:, 0].sum().backward(retain_graph=True)  # the buffer is synchronized here
    out[:, 1].sum().backward()
    two = model(data(rank, 1, 3, 4)), model(data(rank, 2, 3, 4))
    for each in two:
        each.sum().backward()
    assert_ranks_equal([param.grad for param in model.parameters()])


def test_t38_a_buffer_may_be_part_of_a_graph_that_is_still_to_run(ranks: Ranks) -> None:
    ranks(2, _two_backwards)


def _values(rank: int) -> None:
    model = seeded(_Model, rank)
    replicate(model)
    reference = seeded(_Model, 0)  # what rank 0 alone would have
    for step in range(3):
        model(data(rank, step, 3, 4)).sum().backward()
        reference(data(0, step, 3, 4)).sum().backward()
        torch.testing.assert_close(model.average, reference.average)
    replicate.state(model).sync_buffers()
    torch.testing.assert_close(model.average, reference.average)
    assert model.norm.num_batches_tracked == 3


def test_values_are_rank_0s(ranks: Ranks) -> None:
    ranks(2, _values)
