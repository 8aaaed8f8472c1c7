"""One group's round: gradients equal a mean computed by hand, ranks are bit-equal, whatever each rank did."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_replicate import ReplicateError, replicate
from tests.core.helpers import (
    Branches,
    assert_ranks_equal,
    assert_same,
    data,
    grads,
    local_grads,
    mean_of,
    mlp,
    seeded,
)
from tests.ranks import Ranks

WORLD = 2
TINY = 1e-6  # MiB: a bucket for each parameter


def _expect_mean(model: nn.Module, losses: Any, world: int = WORLD, divisor: float | None = None) -> list[Any]:
    """The mean over ranks of the gradients of ``losses(rank)``; one loss or several that add up."""
    params = list(model.parameters())
    per_rank = []
    for rank in range(world):
        made = losses(rank)
        made = made if isinstance(made, list) else [made]
        summed: list[Any] = [None] * len(params)
        for loss in made:
            if loss is None:
                continue
            for index, grad in enumerate(local_grads(loss, params)):
                summed[index] = (
                    grad if summed[index] is None else summed[index] if grad is None else summed[index] + grad
                )
        per_rank.append(summed)
    return mean_of(per_rank, divisor)


def _check(model: nn.Module, expected: list[Any], **tolerance: float) -> None:
    params = list(model.parameters())
    assert_same(grads(params), expected, **tolerance)
    assert_ranks_equal([param.grad for param in params])


# ---- parity with one process ----------------------------------------------------------------------------------------


def _parity(rank: int, cap: float, optimizer: str, set_to_none: bool, world: int) -> None:
    model, reference = mlp(6, 8, 8, 3, seed=rank), mlp(6, 8, 8, 3, seed=0)
    replicate(model, bucket_cap_mb=cap)
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adam": lambda p: torch.optim.Adam(p, lr=0.01)}
    mine, theirs = make[optimizer](model.parameters()), make[optimizer](reference.parameters())
    for step in range(5):
        loss = lambda module, r, step=step: module(data(r, step, 4, 6)).pow(2).mean()
        mine.zero_grad(set_to_none=set_to_none)
        loss(model, rank).backward()
        theirs.zero_grad(set_to_none=set_to_none)
        (sum(loss(reference, r) for r in range(world)) / world).backward()
        assert_same(grads(list(model.parameters())), grads(list(reference.parameters())), rtol=1e-5, atol=1e-7)
        assert_ranks_equal([param.grad for param in model.parameters()])
        mine.step()
        theirs.step()
        assert_same(list(model.parameters()), list(reference.parameters()), rtol=1e-4, atol=1e-5)
        assert_ranks_equal(list(model.parameters()))
    buckets = len(replicate.state(model).plan().buckets)
    assert buckets == (6 if cap == TINY else 1)


def _parity_grid(rank: int, world: int) -> None:
    for cap, optimizer, set_to_none in itertools.product((TINY, 25.0), ("sgd", "adam"), (True, False)):
        _parity(rank, cap, optimizer, set_to_none, world)


@pytest.mark.parametrize("world", [2, 3])
def test_r3_d16_d17_five_steps_equal_one_process(ranks: Ranks, world: int) -> None:
    """Caps from one-parameter buckets to one bucket, SGD and Adam, gradients set to None and zeroed in place."""
    ranks(world, _parity_grid, world)


def _gradient_storage(rank: int) -> None:
    model = mlp(6, 8, 3)
    replicate(model)
    for step in range(3):
        model(data(rank, step, 4, 6)).sum().backward()
        storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters() if param.grad is not None}
        assert len(storages) == 1  # all gradients are views of one buffer: one copy of the gradients
        if step == 0:
            model.zero_grad()
    before = model[0].weight.grad.clone()
    assert before is not None
    model.zero_grad(set_to_none=False)
    assert model[0].weight.grad.count_nonzero() == 0


def test_d61_gradients_are_views_of_the_bucket(ranks: Ranks) -> None:
    ranks(2, _gradient_storage)


def _early_launch(rank: int) -> None:
    model = mlp(6, 8, 8, 8, 3)
    replicate(model, bucket_cap_mb=TINY)
    state = replicate.state(model)
    for step in range(3):
        model(data(rank, step, 4, 6)).sum().backward()
        stats = state.last_round
        assert stats is not None
        # in the first round the order of arrival is not known yet; later all leave while backward runs but for the
        # last, which is complete when backward ends and waits for that
        assert (stats.early, stats.late) == ((0, 8) if step == 0 else (7, 1))
    assert stats.collectives == 8
    assert stats.missed == ()


def test_buckets_leave_while_backward_runs(ranks: Ranks) -> None:
    ranks(2, _early_launch)


def _arrival_order(rank: int) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    model = Backwards()
    replicate(model, bucket_cap_mb=TINY)
    state = replicate.state(model)
    assert state.plan().parameters == ("first.bias", "first.weight", "last.bias", "last.weight")
    if rank == 0:
        loss = model(data(rank, 0, 2, 4)).sum()
    else:  # another order on rank 1, which does not count
        loss = model.first(model.last(data(rank, 0, 2, 4))).sum()
    loss.backward()
    arrived = state.plan().parameters
    assert {name.partition(".")[0] for name in arrived[:2]} == {"last"}
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, arrived)
    assert everybody[0] == everybody[1]


def test_d56_order_of_arrival_on_rank_0_orders_the_buckets_of_all(ranks: Ranks) -> None:
    ranks(2, _arrival_order)


# ---- ranks that differ ----------------------------------------------------------------------------------------------


def _branches(rank: int, pattern: str) -> None:
    model = Branches()
    replicate(model, bucket_cap_mb=TINY)
    chosen = {
        "same": lambda r, step: ["left"],
        "rank 0 only": lambda r, step: ["left"] if r == 0 else [],
        "equal shapes": lambda r, step: ["left"] if r == 0 else ["right"],
        "alternating": lambda r, step: ["left", "right"][(r + step) % 2 : (r + step) % 2 + 1],
        "rank 1 uses less": lambda r, step: ["left", "right"] if r == 0 else ["right"],
    }[pattern]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        before = grads(list(model.parameters()))
        loss = lambda r, step=step: model(data(r, step, 3, 4), *chosen(r, step)).pow(2).sum()
        expected = _expect_mean(model, loss)
        # used on no rank: untouched, None stays None and an old value stays
        expected = [old if new is None else new for old, new in zip(before, expected, strict=True)]
        loss(rank).backward()
        _check(model, expected)
        optimizer.step()
        assert_ranks_equal(list(model.parameters()))
    assert model.idle.weight.grad is None
    assert model.idle.weight not in optimizer.state  # so weight decay and momentum leave it alone


def _branches_grid(rank: int) -> None:
    for pattern in ("same", "rank 0 only", "equal shapes", "alternating", "rank 1 uses less"):
        _branches(rank, pattern)


def test_r01_r05_t01_t16_t42_d31_to_d37_idle_layers_and_branches(ranks: Ranks) -> None:
    """No flag, no hang: a layer idle on some ranks gets the mean with zeros, one idle everywhere keeps its ``None``."""
    ranks(2, _branches_grid)


def _old_gradients_stay(rank: int) -> None:
    model = Branches()
    replicate(model)
    model(data(rank, 0, 3, 4), "left", "right").sum().backward()
    old = grads(list(model.parameters()))
    objects = [param.grad for param in model.right.parameters()]
    loss = lambda r: model(data(r, 1, 3, 4), *(["left"] if r == 0 else [])).sum()
    added = _expect_mean(model, loss)
    loss(rank).backward()  # nothing was zeroed: the old mean stays in, once
    expected = [o if a is None else a if o is None else o + a for o, a in zip(old, added, strict=True)]
    _check(model, expected)
    for before, param in zip(objects, model.right.parameters(), strict=True):
        assert param.grad is before  # used on no rank: not even another object


def test_d31_an_old_gradient_stays_as_it_is_where_nobody_contributed(ranks: Ranks) -> None:
    ranks(2, _old_gradients_stay)


def _skipping(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    state = replicate.state(model)
    loss = lambda r, step: model(data(r, step, 3, 4)).pow(2).sum()
    for step, present in enumerate([{0, 1}, {0}, {1}, set(), {0, 1}]):
        model.zero_grad()
        # the average is over the ranks that took part
        expected = _expect_mean(model, lambda r: loss(r, step) if r in present else None, divisor=max(1, len(present)))
        with state.round():
            if rank in present:
                loss(rank, step).backward()
        _check(model, expected)


def test_r28_a_rank_without_a_backward_takes_part_with_nothing(ranks: Ranks) -> None:
    ranks(2, _skipping)


def _zero_loss(rank: int) -> None:
    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model))
    for step in range(3):
        model.zero_grad()
        with state.round():
            if rank == 1 and step == 1:
                torch.zeros(1, requires_grad=True).backward()  # reaches no parameter
            else:
                model(data(rank, step, 3, 4)).sum().backward()
        taking_part = [0] if step == 1 else [0, 1]
        expected = _expect_mean(
            model,
            lambda r: model(data(r, step, 3, 4)).sum() if r in taking_part else None,
            divisor=len(taking_part),
        )
        _check(model, expected)


def test_r29_a_fresh_zero_loss_does_not_hang(ranks: Ranks) -> None:
    ranks(2, _zero_loss)


# ---- several forwards, several backwards, other ways to use a parameter ---------------------------------------------


def _uses(rank: int) -> None:
    model = Branches()
    state = replicate.state(replicate(model))

    def several_forwards(r: int) -> torch.Tensor:
        return sum(model(data(r, i, 3, 4), "left").sum() for i in range(3))  # type: ignore[return-value]

    def thrown_away(r: int) -> torch.Tensor:
        model(data(r, 5, 3, 4), "right")
        return model(data(r, 6, 3, 4), "left").sum()

    def without_forward(r: int) -> torch.Tensor:
        x = model.trunk(data(r, 7, 3, 4))
        return (model.head.weight @ x.t()).pow(2).sum() + torch.sigmoid(model.left(x)).sum()

    def nested_outputs(r: int) -> torch.Tensor:
        out = {"a": [model(data(r, 8, 3, 4)), "text"], "b": (model(data(r, 9, 3, 4), "right"),)}
        return out["a"][0].sum() + out["b"][0].sum()  # type: ignore[union-attr]

    def changed_in_place(r: int) -> torch.Tensor:
        loss = model(data(r, 10, 3, 4), "left").sum()
        loss /= 10
        return loss

    for use in (several_forwards, thrown_away, without_forward, nested_outputs, changed_in_place):
        model.zero_grad()
        expected = _expect_mean(model, use)
        use(rank).backward()
        _check(model, expected)
    assert state.last_round is not None


def test_r14_t17_d20_d21_d24_any_use_of_a_parameter_is_reduced(ranks: Ranks) -> None:
    ranks(2, _uses)


def _several_backwards(rank: int) -> None:
    model = Branches()
    replicate(model)
    first = lambda r: model(data(r, 0, 3, 4), "left").pow(2).sum()
    second = lambda r: model(data(r, 1, 3, 4), "right").pow(2).sum()
    both = lambda r: [first(r), second(r)]
    expected = _expect_mean(model, both)

    one, two = first(rank), second(rank)  # two forwards, then two backwards
    one.backward()
    two.backward()
    _check(model, expected)

    model.zero_grad()
    one = first(rank)
    for _ in range(2):  # the same graph twice
        one.backward(retain_graph=True)
    _check(model, _expect_mean(model, lambda r: [first(r), first(r)]))

    model.zero_grad()
    out = model.trunk(data(rank, 2, 3, 4))  # two outputs of one forward, one backward each
    a, b = model.left(out).sum(), model.right(out).sum()
    a.backward(retain_graph=True)
    b.backward()
    expected = _expect_mean(
        model,
        lambda r: [model.left(model.trunk(data(r, 2, 3, 4))).sum(), model.right(model.trunk(data(r, 2, 3, 4))).sum()],
    )
    _check(model, expected)


def test_t08_d22_each_backward_closes_its_own_round(ranks: Ranks) -> None:
    ranks(2, _several_backwards)


def _autograd_grad(rank: int) -> None:
    model = mlp(4, 5, 1)
    state = replicate.state(replicate(model))
    model(data(rank, 0, 3, 4)).sum().backward()
    rounds = state.closed_rounds
    x = data(rank, 1, 3, 4).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)  # no communication
    assert state.closed_rounds == rounds

    def penalty(r: int) -> torch.Tensor:
        x = data(r, 2, 3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(2, dim=1) - 1).pow(2).mean()

    model.zero_grad()
    expected = _expect_mean(model, penalty)  # the last bias does not enter the penalty
    assert expected[-1] is None
    penalty(rank).backward()
    _check(model, expected)


def test_d29_t39_autograd_grad_does_not_communicate_and_does_not_disturb(ranks: Ranks) -> None:
    ranks(2, _autograd_grad)


def _second_order(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    for step in range(6):
        model.zero_grad()
        loss = lambda r, step=step: model(data(r, step, 3, 4)).pow(2).sum()
        expected = _expect_mean(model, loss)
        loss(rank).backward(create_graph=True)
        _check(model, expected)
        assert all(param.requires_grad for param in model.parameters())
        with pytest.raises(RuntimeError, match="does not require grad"):  # refused, not silently local
            model[0].weight.grad.sum().backward()
        for param in model.parameters():
            param.grad = None  # a graph that holds its own parameters is a cycle


def test_d30_create_graph(ranks: Ranks) -> None:
    # torch itself warns that create_graph in backward() makes a cycle
    ranks(2, _ignoring_create_graph_warning)


def _ignoring_create_graph_warning(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        _second_order(rank)


def _odd_outputs(rank: int) -> None:
    class Cut(torch.autograd.Function):
        """Gives nothing back to its input."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.cut = nn.Linear(4, 4), nn.Linear(4, 4)
            self.carried = torch.zeros(4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            carried = torch.ones(4)  # made anew, and fed back next time
            out = self.used(x + self.carried) + Cut.apply(self.cut(x))
            self.carried = carried
            return out, carried, x.detach()

    model = seeded(Model, 0)
    replicate(model)
    for step in range(3):
        model.zero_grad()
        carried = model.carried

        def loss(r: int, step: int = step, carried: torch.Tensor = carried) -> torch.Tensor:
            model.carried = carried
            return model(data(r, step, 3, 4))[0].pow(2).sum()

        expected = _expect_mean(model, loss)
        _, made, detached = model(data(rank, step, 3, 4))
        model.carried = carried
        assert not made.requires_grad
        assert not detached.requires_grad
        loss(rank).backward()
        assert model.cut.weight.grad is None  # an undefined gradient is none
        _check(model, expected)


def test_d23_d35_outputs_without_gradients_and_undefined_gradients(ranks: Ranks) -> None:
    ranks(2, _odd_outputs)


def _functional_call(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    others = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    loss = torch.func.functional_call(model, others, (data(rank, 0, 3, 4),)).sum()
    loss.backward()
    assert all(param.grad is None for param in model.parameters())
    expected = local_grads(
        torch.func.functional_call(model, others, (data(rank, 0, 3, 4),)).sum(), list(others.values())
    )
    assert_same([leaf.grad for leaf in others.values()], expected)  # local: these leaves are nobody's parameters


def test_d27_functional_call_with_other_leaves(ranks: Ranks) -> None:
    ranks(2, _functional_call)


def _lstm(rank: int) -> None:
    model = seeded(lambda: nn.LSTM(3, 5, num_layers=2, batch_first=True), 0)
    replicate(model)

    def loss(r: int) -> torch.Tensor:
        packed = nn.utils.rnn.pack_sequence([data(r, 0, 4, 3), data(r, 1, 2 + r, 3)], enforce_sorted=False)
        out, _ = model(packed)
        return out.data.pow(2).sum()

    for _ in range(2):
        model.zero_grad()
        expected = _expect_mean(model, loss)
        loss(rank).backward()
        _check(model, expected)


def test_d28_packed_sequences(ranks: Ranks) -> None:
    ranks(2, _lstm)


def _user_hooks(rank: int) -> None:
    model = mlp(4, 5, 2)
    seen: list[str] = []
    model[2].register_forward_hook(lambda module, args, out: seen.append("forward"))
    model[2].register_full_backward_hook(lambda module, gi, go: seen.append("backward"))
    replicate(model)
    expected = _expect_mean(model, lambda r: model(data(r, 0, 3, 4)).sum())
    seen.clear()
    model(data(rank, 0, 3, 4)).sum().backward()
    assert seen == ["forward", "backward"]
    _check(model, expected)


def test_d26_the_users_own_hooks_keep_working(ranks: Ranks) -> None:
    ranks(2, _user_hooks)


def _no_gradients(rank: int) -> None:
    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model))
    if rank == 0:  # forward never communicates, so one rank may go first, or evaluate alone
        with torch.no_grad():
            model(data(rank, 0, 3, 4))
        model.eval()
        model(data(rank, 1, 3, 4))
        with torch.inference_mode():
            model(data(rank, 1, 3, 4))
        model.train()
    assert state.closed_rounds == 0
    assert all(param.grad is None for param in model.parameters())
    model(data(rank, 2, 3, 4)).sum().backward()
    _check(model, _expect_mean(model, lambda r: model(data(r, 2, 3, 4)).sum()))


def test_t35_t47_d25_forward_never_communicates(ranks: Ranks) -> None:
    ranks(2, _no_gradients)


# ---- activation checkpointing ---------------------------------------------------------------------------------------


def _checkpointing(rank: int, reentrant: bool) -> None:
    def ckpt(function: Any, x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():  # torch warns in the forward of a nested reentrant checkpoint
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            return checkpoint(function, x, use_reentrant=reentrant)

    def plain(function: Any, x: torch.Tensor) -> torch.Tensor:
        return function(x)

    def once(model: Branches, run: Any, x: torch.Tensor, r: int) -> torch.Tensor:
        return model.head(run(model.right, run(model.left, model.trunk(x))))

    def twice(model: Branches, run: Any, x: torch.Tensor, r: int) -> torch.Tensor:
        return model.head(run(model.left, run(model.left, model.trunk(x))))

    def by_rank(model: Branches, run: Any, x: torch.Tensor, r: int) -> torch.Tensor:
        return model.head(run(model.left if r == 0 else model.right, model.trunk(x)))

    def everything(model: Branches, run: Any, x: torch.Tensor, r: int) -> torch.Tensor:
        return run(lambda z: model(z, "left", "right"), x.requires_grad_())

    def nested(model: Branches, run: Any, x: torch.Tensor, r: int) -> torch.Tensor:
        inner = lambda z: run(model.left, run(model.left, z))
        return model.head(run(inner, model.trunk(x)))

    for use in (once, twice, by_rank, everything, nested):
        model = seeded(Branches, 0)
        replicate(model, bucket_cap_mb=TINY)
        for step in range(4):
            model.zero_grad(set_to_none=step != 2)
            expected = _expect_mean(model, lambda r: use(model, plain, data(r, step, 3, 4), r).pow(2).sum())
            if step == 2:
                expected = [
                    torch.zeros_like(p) if e is None and p.grad is not None else e
                    for e, p in zip(expected, model.parameters(), strict=True)
                ]
            use(model, ckpt, data(rank, step, 3, 4), rank).pow(2).sum().backward()
            _check(model, expected)
        replicate.state(model).remove()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_r18_t06_t07_d88_to_d91_activation_checkpointing(ranks: Ranks, reentrant: bool) -> None:
    ranks(2, _checkpointing, reentrant)


def _late_reentrant(rank: int) -> None:
    """Checkpointing that begins after the first rounds, when buckets already leave early."""
    model = seeded(Branches, 0)
    replicate(model, bucket_cap_mb=TINY)
    for step in range(4):
        model.zero_grad()
        x = model.trunk(data(rank, step, 3, 4))
        reentrant = step >= 2
        run = (lambda f, z: checkpoint(f, z, use_reentrant=True)) if reentrant else (lambda f, z: f(z))
        model.head(run(model.left, run(model.left, x))).sum().backward()
        _check(
            model,
            _expect_mean(model, lambda r: model.head(model.left(model.left(model.trunk(data(r, step, 3, 4))))).sum()),
        )


def test_r18_reentrant_checkpointing_that_begins_later(ranks: Ranks) -> None:
    ranks(2, _late_reentrant)


def _inside_and_outside(rank: int) -> None:
    """One layer both inside and outside of a reentrant checkpoint, from the first step on."""
    model = seeded(Branches, 0)
    replicate(model, bucket_cap_mb=TINY)
    for step in range(3):
        model.zero_grad()
        x = checkpoint(model.left, model.trunk(data(rank, step, 3, 4)), use_reentrant=True)
        model.head(model.left(x)).sum().backward()
        _check(
            model,
            _expect_mean(model, lambda r: model.head(model.left(model.left(model.trunk(data(r, step, 3, 4))))).sum()),
        )


def test_r18_a_layer_inside_and_outside_of_a_checkpoint(ranks: Ranks) -> None:
    ranks(2, _inside_and_outside)


def _inside_and_outside_later(rank: int) -> None:
    model = seeded(Branches, 0)
    replicate(model, bucket_cap_mb=TINY)
    for step in range(3):
        model.zero_grad()
        model.head(model.left(model.trunk(data(rank, step, 3, 4)))).sum().backward()
    model.zero_grad()
    x = checkpoint(model.left, model.trunk(data(rank, 3, 3, 4)), use_reentrant=True)
    with pytest.raises(ReplicateError, match=r"'left\.(weight|bias)' received a gradient on rank \d after its bucket"):
        model.head(model.left(x)).sum().backward()


def test_r18_a_second_gradient_after_the_bucket_left_is_an_error(ranks: Ranks) -> None:
    ranks(2, _inside_and_outside_later)


# ---- accumulation ---------------------------------------------------------------------------------------------------


def _accumulation(rank: int) -> None:
    model = Branches()
    state = replicate.state(replicate(model))
    loss = lambda r, i: model(data(r, i, 3, 4), ["left", "right", "idle"][i % 3]).pow(2).sum()
    for window in range(2):
        model.zero_grad()
        micro = [window * 3 + i for i in range(3)]
        rounds = state.closed_rounds
        with state.no_sync():
            loss(rank, micro[0]).backward()
            late = loss(rank, micro[1])
        assert_same(grads([model.left.weight]), [local_grads(loss(rank, micro[0]), [model.left.weight])[0]])
        with state.no_sync():  # what counts is the switch at backward, not at forward
            late.backward()
        assert state.closed_rounds == rounds
        loss(rank, micro[2]).backward()  # touches another branch than the first two
        assert state.closed_rounds == rounds + 1
        _check(model, _expect_mean(model, lambda r: [loss(r, i) for i in micro]))


def test_r44_t37_d42_d50_a_window_reduces_once_all_that_it_touched(ranks: Ranks) -> None:
    ranks(2, _accumulation)


def _forward_inside_backward_outside(rank: int) -> None:
    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model))
    with state.no_sync():
        loss = model(data(rank, 0, 3, 4)).sum()
    loss.backward()
    _check(model, _expect_mean(model, lambda r: model(data(r, 0, 3, 4)).sum()))
    model.zero_grad()
    state.set_requires_gradient_sync(False)
    model(data(rank, 1, 3, 4)).sum().backward()
    state.set_requires_gradient_sync(True)
    with state.round():  # nothing more to come: the window's gradients are averaged on the way out
        pass
    _check(model, _expect_mean(model, lambda r: model(data(r, 1, 3, 4)).sum()))


def test_t37_the_switch_at_backward_decides(ranks: Ranks) -> None:
    ranks(2, _forward_inside_backward_outside)


# ---- kinds of parameters --------------------------------------------------------------------------------------------


class _Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(3, 4)
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.low = nn.Parameter(torch.randn(4).bfloat16())
        self.imaginary = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.frozen = nn.Parameter(torch.randn(100), requires_grad=False)
        self.tied = self.single.weight
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.pointwise = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.single(x) + x @ self.tied.t()) * self.scalar
        y = y + x @ self.transposed.t()
        y = y + (y * self.imaginary).abs() + (y.bfloat16() * self.low).float()
        image = self.pointwise(self.conv(y.reshape(1, 2, 2, -1).repeat(1, 1, 2, 2)))
        return self.wide(y.double()).sum() + image.pow(2).sum() + self.empty.sum() + self.frozen.sum()


def _zoo(rank: int, cap: float) -> None:
    model = seeded(_Zoo, rank)
    replicate(model, bucket_cap_mb=cap)
    plan = replicate.state(model).plan()
    assert plan.frozen == ("frozen",)
    assert sorted(plan.parameters) == sorted(n for n, p in model.named_parameters() if n != "frozen")
    for bucket in plan.buckets:
        dtypes = {dict(model.named_parameters())[name].dtype for name in bucket.parameters}
        assert dtypes == {bucket.dtype}
    tolerance = {"rtol": 2e-2, "atol": 1e-2}
    for step in range(3):
        model.zero_grad(set_to_none=step == 1)
        loss = lambda r, step=step: model(data(r, step, 8, 3)).real
        params = [param for param in model.parameters() if param.requires_grad]
        expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)])
        loss(rank).backward()
        exact = [i for i, param in enumerate(params) if param.dtype != torch.bfloat16]
        assert_same([params[i].grad for i in exact], [expected[i] for i in exact], rtol=1e-4, atol=1e-5)
        assert_same([param.grad for param in params], expected, **tolerance)
        assert_ranks_equal([param.grad for param in model.parameters()])
        for param in params:
            assert param.grad is not None and param.grad.stride() == param.stride()
    assert model.frozen.grad is None


def _zoo_grid(rank: int) -> None:
    for cap in (TINY, 0.0001, 25.0):
        _zoo(rank, cap)


def test_d57_d58_d59_d60_every_kind_of_parameter(ranks: Ranks) -> None:
    """Data types, complex numbers, memory formats, scalars, empty tensors, tied weights, frozen ones."""
    ranks(2, _zoo_grid)


# ---- the model changes ----------------------------------------------------------------------------------------------


def _unfreezing(rank: int) -> None:
    model = seeded(Branches, rank)
    model.trunk.requires_grad_(False)
    model.left.requires_grad_(False)
    state = replicate.state(replicate(model, bucket_cap_mb=TINY))
    assert "trunk.weight" not in state.plan().parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 2:
            model.trunk.requires_grad_(True)
        if step == 4:
            model.left.requires_grad_(True)
        optimizer.zero_grad()
        loss = lambda r, step=step: model(data(r, step, 3, 4), "left").pow(2).sum()
        params = [param for param in model.parameters() if param.requires_grad]
        expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)])
        loss(rank).backward()
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in model.parameters()])
        optimizer.step()
        assert_ranks_equal(list(model.parameters()))
    assert "trunk.weight" in state.plan().parameters
    assert "left.weight" in state.plan().parameters


def test_r23_t02_t05_unfreezing(ranks: Ranks) -> None:
    ranks(2, _unfreezing)


def _freezing(rank: int) -> None:
    model = Branches()
    state = replicate.state(replicate(model))
    step = itertools.count()

    def train() -> None:
        model.zero_grad()
        at = next(step)
        model(data(rank, at, 3, 4), "left").sum().backward()
        assert_ranks_equal([param.grad for param in model.parameters()])

    train()
    full = state.plan().nbytes
    model.left.requires_grad_(False)
    model.trunk.requires_grad_(False)
    for _ in range(10):
        train()
        assert model.left.weight.grad is None
    assert state.plan().nbytes == full - sum(p.nbytes for m in (model.left, model.trunk) for p in m.parameters())
    assert state.last_round is not None and state.last_round.nbytes < full
    model.left.requires_grad_(True)
    train()
    _check(
        model.left,
        mean_of(
            [local_grads(model(data(r, 11, 3, 4), "left").sum(), list(model.left.parameters())) for r in range(WORLD)]
        ),
    )


def test_t04_t05_freezing_shrinks_traffic(ranks: Ranks) -> None:
    ranks(2, _freezing)


def _toggling(rank: int) -> None:
    """Freezing that alternates, as toggled optimizers do, keeps one layout."""
    model = Branches()
    state = replicate.state(replicate(model))
    layouts = set()
    for step in range(24):
        model.left.requires_grad_(step % 2 == 0)
        model.right.requires_grad_(step % 2 == 1)
        model.zero_grad()
        params = [param for param in model.parameters() if param.requires_grad]
        loss = lambda r, step=step: model(data(r, step, 3, 4), "left", "right").sum()
        expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)])
        loss(rank).backward()
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in model.parameters()])
        if step >= 2:
            layouts.add(state.plan().parameters)
    assert len(layouts) == 1


def test_alternating_freezes_keep_the_layout(ranks: Ranks) -> None:
    ranks(2, _toggling)


def _rank_dependent_freeze(rank: int) -> None:
    model = Branches()
    model.left.requires_grad_(False)
    replicate(model)
    if rank == 1:
        model.left.requires_grad_(True)
    with pytest.raises(ReplicateError, match=r"'left.weight' differs between ranks in its requires_grad: False on ran"):
        model(data(rank, 0, 3, 4), "left").sum().backward()


def test_ranks_that_unfreeze_differently_get_an_error_on_every_rank(ranks: Ranks) -> None:
    ranks(2, _rank_dependent_freeze)


def _late_news(rank: int) -> None:
    """As on a GPU: a rank that has nothing to say reads what others said at the start of the next round."""
    from lightning_replicate.core.reducer import Reducer

    at_once = Reducer.reads_at_once
    Reducer.reads_at_once = lambda self, bucket: self._tally.arrivals is not None  # type: ignore[method-assign]
    try:
        model = Branches()
        replicate(model)
        loss = lambda r, step: model(data(r, step, 3, 4), "left").pow(2).sum()
        for step in range(3):
            model.zero_grad()
            expected = _expect_mean(model, lambda r: loss(r, step))
            loss(rank, step).backward()
            _check(model, expected)
        model.right.requires_grad_(False)  # alike on all ranks, and noticed after some rounds
        for step in range(12):
            model.zero_grad()
            loss(rank, step).backward()
            assert_ranks_equal([param.grad for param in model.parameters()])
        assert "right.weight" not in replicate.state(model).plan().parameters
        if rank == 1:  # on one rank only: every rank hears of it
            model.right.requires_grad_(True)
        match = r"'right.weight' differs between ranks in its requires_grad"
        if rank == 1:
            with pytest.raises(ReplicateError, match=match):
                loss(rank, 20).backward()
        else:
            loss(rank, 20).backward()
            with pytest.raises(ReplicateError, match=match):
                loss(rank, 21).backward()
    finally:
        Reducer.reads_at_once = at_once  # type: ignore[method-assign]


def test_news_of_the_last_round_reaches_every_rank(ranks: Ranks) -> None:
    ranks(2, _late_news)


def _conversions(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    dtype = torch.float32
    changes = [
        lambda: None,
        lambda: model.double(),
        lambda: model.float(),
        lambda: model.half().float(),  # ends where it began, in other memory
        lambda: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        lambda: setattr(model[0], "weight", nn.Parameter(torch.full_like(model[0].weight, 0.1 * (rank + 1)))),
    ]
    for step, change in enumerate(changes):
        for zero in (True, False):
            change()
            model.zero_grad(set_to_none=zero)
            if step == 5:
                replicate.state(model).refresh()  # new parameters take rank 0's values before they are used
                assert_ranks_equal(list(model.parameters()))
                assert model[0].weight[0, 0].item() == pytest.approx(0.1)
            dtype = next(model.parameters()).dtype
            loss = lambda r, dtype=dtype, step=step: model(data(r, step, 3, 4).to(dtype)).pow(2).sum()
            for _ in range(2):
                model.zero_grad(set_to_none=zero)
                expected = _expect_mean(model, loss)
                loss(rank).backward()
                _check(model, expected)


def test_r17_r25_t03_conversions_and_replaced_parameters(ranks: Ranks) -> None:
    """``double()``, ``half().float()``, ``load_state_dict(assign=True)`` and parameters assigned anew."""
    ranks(2, _conversions)


def _new_parameters(rank: int) -> None:
    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model))
    model(data(rank, 0, 3, 4)).sum().backward()
    model.append(seeded(lambda: nn.Linear(2, 3), rank))  # other values on each rank
    model.zero_grad()
    model(data(rank, 1, 3, 4)).sum().backward()  # noticed without refresh(): equal from here on
    assert_ranks_equal([param.grad for param in model.parameters()])
    assert_ranks_equal(list(model.parameters()))
    assert "3.weight" in state.plan().parameters
    del model[3]
    for step in range(2):
        model.zero_grad()
        model(data(rank, 2 + step, 3, 4)).sum().backward()
        _check(model, _expect_mean(model, lambda r: model(data(r, 2 + step, 3, 4)).sum()))
    assert "3.weight" not in state.plan().parameters


def test_r26_modules_that_come_and_go(ranks: Ranks) -> None:
    ranks(2, _new_parameters)


def _nothing_trainable(rank: int) -> None:
    model = seeded(lambda: nn.Linear(3, 3), rank)
    model.requires_grad_(False)
    replicate(model)
    assert_ranks_equal(list(model.parameters()))
    assert replicate.state(model).plan().buckets == ()
    x = data(rank, 0, 2, 3).requires_grad_()
    model(x).sum().backward()
    model.requires_grad_(True)
    for step in range(2):
        model.zero_grad()
        model(data(rank, step, 2, 3)).sum().backward()
        _check(model, _expect_mean(model, lambda r: model(data(r, step, 2, 3)).sum()))


def test_t21_a_module_with_nothing_trainable_wakes_up(ranks: Ranks) -> None:
    ranks(2, _nothing_trainable)


def _user_touches_gradients(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    for step in range(4):
        model(data(rank, step, 3, 4)).sum().backward()
        if step == 0:
            model[0].weight.grad = None
        elif step == 1:
            model[0].weight.grad = torch.ones_like(model[0].weight)
        elif step == 2:
            model.zero_grad(set_to_none=False)
    expected = _expect_mean(model, lambda r: model(data(r, 3, 3, 4)).sum())
    _check(model, expected)


def test_gradients_may_be_replaced_between_rounds(ranks: Ranks) -> None:
    ranks(2, _user_touches_gradients)


# ---- failures -------------------------------------------------------------------------------------------------------


def _exception_in_backward(rank: int) -> None:
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise MemoryError("simulated")

    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model))
    model(data(rank, 0, 3, 4)).sum().backward()
    for zero in (True, False):
        with pytest.raises(MemoryError):
            model[2](Bomb.apply(model[:2](data(rank, 1, 3, 4)))).sum().backward()
        with pytest.raises(ReplicateError, match=r"did not finish.*reset\(\)"):
            model(data(rank, 2, 3, 4)).sum().backward()
        state.reset()
        model.zero_grad(set_to_none=zero)
        model(data(rank, 3, 3, 4)).sum().backward()
        _check(model, _expect_mean(model, lambda r: model(data(r, 3, 3, 4)).sum()))


def test_r37_d15_reset_after_an_exception_in_backward(ranks: Ranks) -> None:
    ranks(2, _exception_in_backward)


def _averages(rank: int) -> None:
    for average in ("participants", "world", "sum", "weighted"):
        model = mlp(4, 5, 2)
        state = replicate.state(replicate(model, average=average))
        weights = [3.0, 5.0]
        divisor = {"participants": 2, "world": 2, "sum": 1, "weighted": 8}[average]
        for step in range(3):
            if step == 1:
                model.zero_grad()  # step 2 adds to step 1's averaged gradients
            old = grads(list(model.parameters()))
            scale = weights if average == "weighted" else [1.0, 1.0]
            loss = lambda r, step=step: model(data(r, step, 3, 4)).pow(2).sum()
            added = _expect_mean(model, lambda r: loss(r) * scale[r], divisor=divisor)
            if average == "weighted":
                state.set_weight(weights[rank])
            loss(rank).backward()
            assert_same(
                grads(list(model.parameters())),
                [a if o is None or step == 1 else o + a for o, a in zip(old, added, strict=True)],
                rtol=1e-5,
                atol=1e-5,
            )
            assert_ranks_equal([param.grad for param in model.parameters()])
        state.remove()


def test_r45_t10_averages(ranks: Ranks) -> None:
    """``sum`` for loops that divide by themselves, ``weighted`` for ranks that hold different numbers of samples."""
    ranks(2, _averages)
