"""Buffers that are each rank's own: left out of comparison, set-up and every later synchronization."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_replicate import ReplicateError, replicate
from lightning_replicate.core.names import matches_name
from tests.core.helpers import assert_ranks_equal, data, mlp, seeded
from tests.ranks import Ranks


class _Queue(nn.Module):
    """A layer with running statistics, an average that follows rank 0, and a queue that each rank fills by itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.norm = seeded(lambda: nn.Linear(4, 4), rank), nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.full((2 + rank, 4), float(rank)))  # another shape on each rank
        self.register_buffer("average", torch.full((4,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        self.queue = torch.cat([self.queue[1:], x.detach()[:1]])  # assigned anew: another tensor each time
        self.average = self.average + x.mean(0).detach()
        return self.norm(self.linear(x))


class _Two(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = _Queue(rank), _Queue(rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _ways(rank: int) -> None:
    for way in ("first.queue", "*.queue", "tensor", "several"):
        for choice in ("auto", "step", "epoch", "start", ["*"], lambda name, buffer: True):
            model, reference = _Two(rank), _Two(0)
            own = {way: ["*.queue"], "first.queue": ["first.queue", "second.queue"]}.get(way, ["*.queue"])
            if way == "tensor":
                own = (buffer for buffer in (model.first.queue, model.second.queue))
            modules = [model]
            if way == "several":
                modules, own = [model.first, model.second], ["[0].queue", "[1].*eue"]
            replicate(*modules, ignored_buffers=own, buffers=choice)
            state = replicate.state(modules[0])
            assert torch.equal(model.first.queue, torch.full((2 + rank, 4), float(rank)))  # not equalized at set-up
            assert not model.first.average.any()  # rank 0's, beside it
            expected = torch.full((2 + rank, 4), float(rank))
            for step in range(2):
                x = data(rank, step, 3, 4)
                model(x).pow(2).sum().backward()
                reference(data(0, step, 3, 4))  # what rank 0 alone has: no optimizer, weights stay
                expected = torch.cat([expected[1:], x[:1]])
            state.sync_buffers()
            assert torch.equal(model.first.queue, expected), (way, choice)
            assert model.second.queue.shape == (2 + rank, 4)
            if choice in ("auto", "step"):
                for module, other in ((model.first, reference.first), (model.second, reference.second)):
                    torch.testing.assert_close(module.average, other.average)
                    torch.testing.assert_close(module.norm.running_mean, other.norm.running_mean)
            assert_ranks_equal([param.grad for param in model.parameters()])
            state.remove()


# torch's test_ddp_ignore_params_arg: a buffer is ignored by its name and may have another shape on each rank
def test_by_name_glob_and_tensor_under_every_choice(ranks: Ranks) -> None:
    ranks(2, _ways)


def _not_ignored(rank: int) -> None:
    with pytest.raises(ReplicateError, match=r"Buffer 'queue' differs.*shape.*`replicate\(ignored_buffers=\.\.\.\)`"):
        replicate(_Queue(rank))


def test_without_it_the_message_says_how(ranks: Ranks) -> None:
    ranks(2, _not_ignored)


def _come_later(rank: int) -> None:
    model = _Queue(rank)
    state = replicate.state(replicate(model, ignored_buffers=["queue*", "norm.running_v*"]))
    assert state.ignored_buffers == ("queue*", "norm.running_v*", "queue", "norm.running_var")
    model.register_buffer("queue_of_labels", torch.full((3 + rank,), float(rank)))
    model.register_buffer("late", torch.full((3,), float(rank)))
    state.refresh()
    assert torch.equal(model.queue_of_labels, torch.full((3 + rank,), float(rank)))
    assert torch.equal(model.late, torch.zeros(3))
    model.norm = nn.BatchNorm1d(4)
    model.norm.running_var.fill_(5.0 + rank)
    model.norm.running_mean.fill_(5.0 + rank)
    state.refresh()
    assert torch.equal(model.norm.running_var, torch.full((4,), 5.0 + rank))
    assert torch.equal(model.norm.running_mean, torch.full((4,), 5.0))
    model.late += 1 + rank
    model(data(rank, 0, 3, 4)).sum().backward()
    assert torch.equal(model.late, torch.ones(3))  # it follows rank 0 in every step from now on
    assert model.queue_of_labels.shape == (3 + rank,)


def test_buffers_that_come_later(ranks: Ranks) -> None:
    ranks(2, _come_later)


class _Tied(nn.Module):
    """One buffer under two names, and one module under two names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((2 + rank,), float(rank)))
        self.register_buffer("same_table", self.table)
        self.a = self.b = nn.Module()
        self.a.register_buffer("cache", torch.full((2 + rank,), float(rank)))


def _several_names(rank: int) -> None:
    model = _Tied(rank)
    state = replicate.state(replicate(model, ignored_buffers=["same_table", "b.cache"]))
    assert set(state.ignored_buffers) == {"same_table", "table", "a.cache", "b.cache"}
    assert state.buffers() == []
    model.table = torch.full((5 + rank,), 1.0 + rank)
    state.refresh()
    assert model.table.shape == (5 + rank,) and model.a.cache.shape == (2 + rank,)


def test_one_buffer_of_several_names(ranks: Ranks) -> None:
    ranks(2, _several_names)


class _Nested(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.outer = _Queue(rank), _Queue(rank)


def _innermost(rank: int) -> None:
    model = _Nested(rank)
    inner = replicate.state(replicate(model.inner, ignored_buffers="queue"))  # one name, not letters
    with pytest.raises(ValueError, match=r"'inner.queue' matches no buffer that this call looks after.*'outer.queue'"):
        replicate(model, ignored_buffers=["inner.queue", "outer.queue"])
    outer = replicate.state(replicate(model, ignored_buffers=["outer.queue"]))
    outer.refresh()
    inner.refresh()
    assert model.inner.queue.shape == model.outer.queue.shape == (2 + rank, 4)
    assert_ranks_equal([model.inner.average, model.outer.average])
    with pytest.raises(ReplicateError, match=r"Buffer 'inner.queue' differs"):
        inner.remove()  # the outer call takes over, and was not told to ignore it

    model = _Nested(rank)
    outer = replicate.state(replicate(model, ignored_buffers=["*.queue"]))
    with pytest.raises(ReplicateError, match=r"Buffer 'queue' differs"):  # the inner call decides for itself
        replicate(model.inner)
    replicate(model.inner, ignored_buffers=[model.inner.queue])
    outer.refresh()
    assert model.inner.queue.shape == (2 + rank, 4)


def test_r49_a_buffer_belongs_to_the_innermost_call(ranks: Ranks) -> None:
    ranks(2, _innermost)


def _copies(rank: int) -> None:
    model = _Queue(rank)
    state = replicate.state(replicate(model, ignored_buffers=["queue"]))
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made.queue, model.queue)
        with pytest.raises(ValueError, match="not applied"):
            replicate.state(made)
        replicate(made, ignored_buffers=["queue"])
        assert torch.equal(made.queue, model.queue)
    state.remove()
    with pytest.raises(ReplicateError, match="Buffer 'queue' differs"):  # nothing is left of it
        replicate(model)
    assert model.queue.shape == (2 + rank, 4)


def test_copies_and_the_end(ranks: Ranks) -> None:
    ranks(2, _copies)


def test_a_single_process_checks_and_remembers_the_names() -> None:
    model = _Queue(1)
    with pytest.raises(ValueError, match=r"'quue' matches no buffer that this call looks after\. Near it are: 'queue'"):
        replicate(model, ignored_buffers=["quue"])
    state = replicate.state(replicate(model, ignored_buffers=[model.queue]))
    assert state.ignored_buffers == ("queue",)
    assert len(state.buffers()) == 4 and all(buffer is not model.queue for buffer in state.buffers())


@pytest.mark.parametrize(
    ("ignored", "buffers", "error", "message"),
    [
        ([3], "auto", TypeError, r"`ignored_buffers` takes names, globs and buffers, got int"),
        (torch.zeros(7), "auto", ValueError, r"a Tensor of shape \(7,\) is no buffer that this call looks after"),
        ("linear.weight", "auto", ValueError, r"'linear.weight' matches no buffer"),
        ("*", ["average"], ValueError, r"'average' is to follow rank 0 \(`buffers`\) and to be ignored"),
        ("norm.running_mean", (name for name in ["norm.running_mean"]), ValueError, "Choose one"),
    ],
)
def test_bad_arguments(ignored: Any, buffers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replicate(_Queue(0), ignored_buffers=ignored, buffers=buffers)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*.queue", "net.queue", True),
        ("*.queue", "net.trunk.queue", False),  # a star stays within one part
        ("queue", "net.queue", False),
        ("[0].queue", "[0].queue", True),  # equal, although it could be read as a set of characters
        ("[0].*", "[0].queue", True),
        ("layer[01].queue", "layer1.queue", True),
    ],
)
def test_what_a_glob_means(pattern: str, name: str, matches: bool) -> None:
    assert matches_name(pattern, name) is matches


class _Plain(nn.Module):
    """What DDP can train, too: buffers of equal shapes, and a counter. Ranks begin with different ones."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.norm = seeded(lambda: nn.Linear(4, 4), 0), nn.BatchNorm1d(4)
        self.register_buffer("average", torch.full((4,), float(rank)))
        self.norm.running_mean.fill_(rank)
        self.norm.num_batches_tracked.fill_(10 * rank)

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average + x.mean(0).detach()
        return self.norm(self.linear(x))


def _as_ddp(rank: int) -> None:
    everything = lambda name, buffer: True
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"forward_sync_buffers": True}, lambda module: {"buffers": everything}),
        ({"forward_sync_buffers": False}, lambda module: {"buffers": "start"}),
        ({"broadcast_buffers": False}, lambda module: {"ignored_buffers": list(module.buffers())}),
    ]
    for theirs, ours in cases:
        model, reference = _Plain(rank), _Plain(rank)
        replicate(model, **ours(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers` is deprecated
            wrapped = DistributedDataParallel(reference, **theirs)
        at_forward: list[list[Tensor]] = [[], []]  # DDP has just sent them then
        for module, seen in zip((model, reference), at_forward, strict=True):
            module.linear.register_forward_pre_hook(
                lambda *_, module=module, seen=seen: seen.extend(buffer.clone() for buffer in module.norm.buffers())
            )
        for step in range(3):
            for run in (model, wrapped):
                run(data(rank, step, 5, 4)).pow(2).sum().backward()
        assert len(at_forward[0]) == len(at_forward[1]) == 9
        for mine, other in zip(*at_forward, strict=True):
            torch.testing.assert_close(mine, other)
        counted = {"forward_sync_buffers": 2, "broadcast_buffers": 10 * rank + 2}[next(iter(theirs))]
        assert at_forward[0][-1].item() == counted


@pytest.mark.skipif(
    "forward_sync_buffers" not in inspect.signature(DistributedDataParallel).parameters, reason="new in torch 2.13"
)
def test_what_ddps_arguments_mean_here(ranks: Ranks) -> None:
    ranks(2, _as_ddp)


def _names_of_several(rank: int) -> None:
    pair = [mlp(2, 2), mlp(2, 2)]
    for module in pair:
        module.register_buffer("count", torch.zeros((), dtype=torch.long))
    replicate(*pair, buffers=["[1].count"])
    for module in pair:
        module.count += 1 + rank
    sum(module(torch.ones(1, 2)).sum() for module in pair).backward()
    assert [module.count.item() for module in pair] == [1 + rank, 1]


def test_buffers_of_several_modules_are_chosen_by_their_full_names(ranks: Ranks) -> None:
    ranks(2, _names_of_several)
