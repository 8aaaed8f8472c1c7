"""Parameters that stand in for others, come back, or move: they are averaged wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import replicate
from tests.core.helpers import assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp
from tests.ranks import Ranks

WORLD = 2


def _step(model: nn.Module, rank: int, step: int, run: Any = None) -> None:
    """One backward; gradients equal the mean by hand."""
    run = run or model
    params = list(model.parameters())
    for param in params:
        param.grad = None
    expected = mean_of([local_grads(run(data(r, step, 3, 4)).pow(2).sum(), params) for r in range(WORLD)])
    run(data(rank, step, 3, 4)).pow(2).sum().backward()
    assert_same(grads(params), expected)
    assert_ranks_equal([param.grad for param in params])


def _stand_ins(rank: int) -> None:
    for average in ("participants", "sum"):
        model = replicate(mlp(4, 5, 2), average=average)
        for kind in ("tensors", "parameters", "frozen parameters"):
            others: dict[str, torch.Tensor] = {
                name: param.detach().clone() if kind == "tensors" else nn.Parameter(param.detach().clone())
                for name, param in model.named_parameters()
            }
            if kind == "frozen parameters":
                for other in others.values():
                    other.requires_grad_(False)
            params = list(model.parameters())
            for step in range(3):
                for evaluate in (torch.no_grad, torch.enable_grad):
                    with evaluate():
                        torch.func.functional_call(model, others, (data(rank, 9, 3, 4),))
                for param in params:
                    param.grad = None

                def loss(r: int, others: Any = others, step: int = step) -> torch.Tensor:
                    x = data(r, step, 3, 4)
                    target = torch.func.functional_call(model, others, (x,)).detach()
                    return (model(x) - 0.5 * target).pow(2).sum()

                divisor = 1 if average == "sum" else WORLD
                expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)], divisor)
                loss(rank).backward()
                assert_same(grads(params), expected)
                assert_ranks_equal([param.grad for param in params])
            assert len(replicate.state(model).plan().parameters) == 4
        replicate.state(model).remove()


def test_d27_functional_call_with_other_parameters(ranks: Ranks) -> None:
    ranks(2, _stand_ins)


def _coming_back(rank: int) -> None:
    model = replicate(mlp(4, 4, 4))
    for step in range(6):
        if step == 2:
            head = model[2]
            model[2] = nn.Identity()
        if step == 4:
            model[2] = head
        _step(model, rank, step)


def test_r26_a_module_that_goes_and_comes_back(ranks: Ranks) -> None:
    ranks(2, _coming_back)


def _moving(rank: int) -> None:
    one, two = replicate(mlp(4, 4, 4, seed=1)), replicate(mlp(4, 4, seed=2))
    _step(one, rank, 0)
    _step(two, rank, 1)
    two.append(one[2])
    del one[2]
    for step in range(2, 5):
        _step(two, rank, step)
        _step(one, rank, step)


def test_a_module_that_moves_from_one_call_to_another(ranks: Ranks) -> None:
    ranks(2, _moving)


def _removed_child(rank: int) -> None:
    model = mlp(4, 4, 4)
    replicate(model)
    replicate(model[2])
    _step(model, rank, 0)
    replicate.state(model[2]).remove()
    for step in range(1, 4):
        _step(model, rank, step)
    assert len(replicate.state(model).plan().parameters) == 4


def test_r49_what_a_removed_call_owned_belongs_to_its_parent_again(ranks: Ranks) -> None:
    ranks(2, _removed_child)


def _failing_child(rank: int) -> None:
    def refuse(name: str, buffer: torch.Tensor) -> bool:
        raise LookupError("refused")

    model = nn.Sequential(mlp(4, 4), nn.BatchNorm1d(4))
    replicate(model)
    with pytest.raises(LookupError, match="refused"):
        replicate(model[1], buffers=refuse)
    for step in range(3):
        model(data(rank, step, 3, 4)).pow(2).sum().backward()
        assert_ranks_equal([param.grad for param in model.parameters()])


def test_a_call_that_fails_late_leaves_the_parent_whole(ranks: Ranks) -> None:
    ranks(2, _failing_child)


def _two_process_groups(rank: int) -> None:
    one, two = mlp(4, 4, seed=1), mlp(4, 4, seed=2)
    replicate(one)
    replicate(two, process_group=dist.new_group([0, 1]))
    both = nn.ModuleList([one, two])
    runs = (
        lambda x: one(x) + two(x) if rank == 0 else two(x) + one(x),  # reached in another order
        lambda x: two(one(x)),
        lambda x: one(x),
    )
    for step in range(6):
        for run in runs:
            _step(both, rank, step, run)
    params = list(both.parameters())
    for step in range(4):  # reached on one rank only
        for param in params:
            param.grad = None
        loss = lambda r, step=step: (one(data(r, step, 3, 4)) if r else two(data(r, step, 3, 4))).sum()
        expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)])
        loss(rank).backward()
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in params])
    with replicate.state(one).round():  # a rank that has no backward takes part on both
        if rank == 0:
            both[1](data(rank, 9, 3, 4)).sum().backward()


def test_several_process_groups(ranks: Ranks) -> None:
    ranks(2, _two_process_groups)


def _same_address(rank: int) -> None:
    model = replicate(mlp(4, 2), average="sum")
    param = model[0].weight
    for step in range(3):
        if step:
            before = param.data
            param.data = param.data.double()
            param.data = before  # the same memory as ever, and another autograd node
        for each in model.parameters():
            each.grad = None
        params = list(model.parameters())
        loss = lambda r, step=step: model(data(r, step, 3, 4)).sum()
        model(data(rank, step, 3, 4)).sum().backward()
        loss(rank).backward()  # adds to the sum that is there
        total = mean_of([local_grads(loss(r), params) for r in range(WORLD)], 0.5)
        assert_same(grads(params), total)


def test_r25_a_round_trip_that_ends_at_the_same_address(ranks: Ranks) -> None:
    ranks(2, _same_address)


def _unfrozen_between_two_backwards(rank: int) -> None:
    model = mlp(4, 5, 2)
    model[0].requires_grad_(False)
    replicate(model)
    model[0].requires_grad_(True)
    out = model(data(rank, 0, 3, 4))
    out[:, 0].sum().backward(retain_graph=True)  # the new layout is agreed on here
    out[:, 1].sum().backward()
    assert_ranks_equal([param.grad for param in model.parameters()])


def test_a_new_layout_between_two_backwards_of_one_graph(ranks: Ranks) -> None:
    ranks(2, _unfrozen_between_two_backwards)


def _half_weights(rank: int) -> None:
    model = mlp(4, 2, dtype=torch.float16)
    state = replicate.state(replicate(model, average="weighted", reduce_dtype=torch.float32))
    params = list(model.parameters())
    state.set_weight(3000.0 + rank)  # not a whole number of either half type
    loss = lambda r: model(data(r, 0, 3, 4, dtype=torch.float16)).sum() * 1e-3
    weights = [3000.0, 3001.0]
    expected = mean_of(
        [[g.float() * weights[r] for g in local_grads(loss(r), params)] for r in range(WORLD)],  # type: ignore[union-attr]
        sum(weights),
    )
    loss(rank).backward()
    assert_same([param.grad.float() for param in params if param.grad is not None], expected, rtol=2e-2, atol=1e-4)


def test_r45_weights_do_not_travel_in_half_precision(ranks: Ranks) -> None:
    ranks(2, _half_weights)
