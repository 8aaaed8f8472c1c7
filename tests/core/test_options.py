"""Options of a round: strict_unused, weights over a window, a divide factor; giving a round up; hooks of the user."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replicate import ReplicateError, replicate
from tests.core.helpers import Branches, assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp, seeded
from tests.ranks import Ranks

WORLD = 2


def _mean(model: nn.Module, loss: Any, divisor: float | None = None) -> list[Any]:
    params = list(model.parameters())
    return mean_of([local_grads(loss(r), params) for r in range(WORLD)], divisor)


def _strict(rank: int) -> None:
    model = seeded(Branches, 0)
    state = replicate.state(replicate(model, strict_unused=True))
    loss = lambda r, step: model(data(r, step, 3, 4), *(["left"] if step == 0 and r else ["left", "right"])).sum()
    model.idle.requires_grad_(False)
    with pytest.raises(ReplicateError, match=r"2 parameters.*right.bias on rank 1; right.weight on rank 1"):
        loss(rank, 0).backward() if rank else model(data(0, 0, 3, 4), "left", "right").sum().backward()
    # the round is closed all the same, and the gradients are averages
    assert_ranks_equal([param.grad for param in model.parameters()])
    model.zero_grad()
    params = [param for param in model.parameters() if param.requires_grad]
    expected = mean_of([local_grads(loss(r, 1), params) for r in range(WORLD)])
    loss(rank, 1).backward()
    assert_same(grads(params), expected)
    model.idle.requires_grad_(True)
    with pytest.raises(ReplicateError, match=r"round 3: idle.bias on rank 0, 1; idle.weight on rank 0, 1"):
        loss(rank, 2).backward()
    assert state.last_round is not None
    assert set(state.last_round.missed) == {"idle.bias", "idle.weight"}


def test_r02_strict_unused_names_parameters_and_ranks(ranks: Ranks) -> None:
    ranks(2, _strict)


def _weighted_windows(rank: int) -> None:
    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model, average="weighted"))
    sizes = [[3, 1, 4], [5, 2, 6]]  # samples by rank and micro-batch
    batch = lambda r, i: data(r, i, sizes[r][i], 4)
    loss = lambda x: model(x).pow(2).mean()
    for repeat in range(3):
        if repeat < 2:
            model.zero_grad(set_to_none=repeat == 0)
        kept = grads(list(model.parameters()))
        everything = torch.cat([batch(r, i) for r in range(WORLD) for i in range(3)])
        expected = local_grads(loss(everything), list(model.parameters()))  # one process on the whole batch
        with state.no_sync():
            for i in range(2):
                state.set_weight(sizes[rank][i])
                loss(batch(rank, i)).backward()
        state.set_weight(sizes[rank][2])
        loss(batch(rank, 2)).backward()
        total = [e if k is None else k + e for k, e in zip(kept, expected, strict=True)]
        assert_same(grads(list(model.parameters())), total, rtol=1e-5, atol=1e-6)
        assert_ranks_equal([param.grad for param in model.parameters()])
    with pytest.raises(ValueError, match="not negative"):
        state.set_weight(-1)


def test_r45_weights_over_a_window_equal_one_process_on_the_whole_batch(ranks: Ranks) -> None:
    ranks(2, _weighted_windows)


def _divide_factor(rank: int) -> None:
    model = mlp(4, 5, 2)
    state = replicate.state(replicate(model))
    loss = lambda r, step: model(data(r, step, 3, 4)).pow(2).sum()
    for factor in (10.0, 1.0, None):
        state.set_gradient_divide_factor(factor)
        for step in range(2):
            if step == 0:
                model.zero_grad()
            kept = grads(list(model.parameters()))
            added = _mean(model, lambda r: loss(r, step), divisor=factor or WORLD)
            loss(rank, step).backward()
            total = [a if k is None else k + a for k, a in zip(kept, added, strict=True)]
            assert_same(grads(list(model.parameters())), total, rtol=1e-5, atol=1e-5)
            assert_ranks_equal([param.grad for param in model.parameters()])
    with pytest.raises(ValueError, match="must be positive"):
        state.set_gradient_divide_factor(0)


def test_t10_gradient_divide_factor(ranks: Ranks) -> None:
    ranks(2, _divide_factor)


def _average_per_submodule(rank: int) -> None:
    trunk, head = mlp(4, 4, seed=1), mlp(4, 2, seed=2)
    replicate(trunk)
    replicate(head, average="sum")
    params = [list(trunk.parameters()), list(head.parameters())]
    for step in range(2):
        for param in (*params[0], *params[1]):
            param.grad = None
        loss = lambda r, step=step: head(trunk(data(r, step, 3, 4))).pow(2).sum()
        expected = [
            mean_of([local_grads(loss(r), some) for r in range(WORLD)], divisor)
            for some, divisor in zip(params, (WORLD, 1), strict=True)
        ]
        loss(rank).backward()
        for some, reference in zip(params, expected, strict=True):
            assert_same(grads(some), reference, rtol=1e-5, atol=1e-5)


def test_r45_a_choice_of_average_per_submodule(ranks: Ranks) -> None:
    ranks(2, _average_per_submodule)


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, explode: bool) -> torch.Tensor:
        ctx.explode = explode
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.explode:
            raise MemoryError("simulated")
        return grad, None


def _one_rank_fails(rank: int, groups: int, cap: float) -> None:
    parts = [mlp(4, 6, 4, seed=i) for i in range(2)]
    if groups == 1:
        replicate(*parts, bucket_cap_mb=cap)
    else:
        for part in parts:
            replicate(part, bucket_cap_mb=cap)
    state = replicate.state(parts[0])
    params = [param for part in parts for param in part.parameters()]

    def loss(r: int, step: int, explode: bool = False) -> torch.Tensor:
        return parts[1](_Bomb.apply(parts[0](data(r, step, 3, 4)), explode)).pow(2).sum()

    def good(step: int) -> None:
        for param in params:
            param.grad = None
        expected = mean_of([local_grads(loss(r, step), params) for r in range(WORLD)])
        loss(rank, step).backward()
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in params])

    good(0)
    good(1)
    for step in range(2, 6):
        began = time.monotonic()
        failing = step % WORLD
        try:
            loss(rank, step, explode=rank == failing).backward()
            pytest.fail("backward did not raise")
        except MemoryError:
            assert rank == failing
            state.reset()
        except ReplicateError as error:
            assert rank != failing
            assert f"Rank {failing} of this process group gave the round up" in str(error)  # noqa: PT017
            if step % 4 < 2:
                state.reset()  # allowed, not needed
        assert time.monotonic() - began < 10
        good(step + 10)
    with pytest.raises(MemoryError):  # all ranks at once
        loss(rank, 20, explode=True).backward()
    state.reset()
    good(21)
    if rank == 0:  # before a backward even began
        state.reset()
    else:
        with pytest.raises(ReplicateError, match="Rank 0 of this process group gave"):
            loss(rank, 22).backward()
    good(23)


@pytest.mark.parametrize("groups", [1, 2])
def test_r37_an_exception_on_one_rank_voids_the_round_on_all(ranks: Ranks, groups: int) -> None:
    for cap in (25.0, 1e-6):
        ranks(2, _one_rank_fails, groups, cap)


def _what_a_hook_sees(rank: int) -> None:
    """Documented: a user's own post-accumulate hook runs before the average is there."""
    model = mlp(4, 2)
    seen: dict[str, torch.Tensor] = {}
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.update(before=p.grad.clone()))
    replicate(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.update(after=p.grad.clone()))
    for step in range(3):
        model.zero_grad()
        loss = lambda r, step=step: model(data(r, step, 3, 4)).sum()
        (own, _), expected = local_grads(loss(rank), list(model.parameters())), _mean(model, loss)
        loss(rank).backward()
        assert_same([seen["before"], seen["after"]], [own, own])
        assert_same(grads(list(model.parameters())), expected)


def test_t41_a_users_own_hook_sees_the_local_gradient(ranks: Ranks) -> None:
    ranks(2, _what_a_hook_sees)


def _optimizer_in_backward(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this part of torch uses what torch itself deprecates
        from torch.distributed.optim import _apply_optimizer_in_backward

        model = mlp(4, 2)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with pytest.raises(ValueError, match=r"'0.weight' has an optimizer that runs in backward"):
            replicate(model)
        model = replicate(mlp(4, 2))
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with pytest.raises(NotImplementedError, match=r"has an optimizer that runs in backward"):
            model(data(rank, 0, 3, 4)).sum().backward()


def test_t41_d76_an_optimizer_in_backward_is_refused(ranks: Ranks) -> None:
    ranks(2, _optimizer_in_backward)


def _pipelined(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    losses = [model(data(rank, i, 3, 4)).pow(2).sum() for i in range(2)]
    for i in range(2, 5):  # the forward of the next before the backward of the last
        losses[0].backward()
        losses = [losses[1], model(data(rank, i, 3, 4)).pow(2).sum()]
    for loss in losses:
        loss.backward()
    params = list(model.parameters())
    everything = [
        [
            sum(column)
            for column in zip(
                *(local_grads(model(data(r, i, 3, 4)).pow(2).sum(), params) for i in range(5)), strict=True
            )
        ]
        for r in range(WORLD)
    ]
    assert_same(grads(params), mean_of(everything), rtol=1e-4, atol=1e-4)
    assert_ranks_equal([param.grad for param in params])


def test_t08_pipelined_micro_batches(ranks: Ranks) -> None:
    ranks(2, _pipelined)


def _graph_that_never_needs_the_same_twice(rank: int) -> None:
    """An output left out of the loss in the third step, and other outputs in turn."""
    model = seeded(Branches, 0)
    replicate(model)
    for step in range(6):
        model.zero_grad()

        def loss(r: int, step: int = step) -> torch.Tensor:
            x = model.trunk(data(r, step, 3, 4))
            outputs = (model.left(x), model.right(x), model.head(x))
            return sum(out.pow(2).sum() for i, out in enumerate(outputs) if i != step % 3)  # type: ignore[return-value]

        expected = _mean(model, loss)
        loss(rank).backward()
        assert_same(grads(list(model.parameters())), expected)


def test_t12_t14_outputs_left_out_of_the_loss(ranks: Ranks) -> None:
    ranks(2, _graph_that_never_needs_the_same_twice)
