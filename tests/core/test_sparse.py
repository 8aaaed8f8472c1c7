"""Sparse gradients stay sparse, and equal the mean over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_replicate import replicate
from tests.core.helpers import assert_ranks_equal, data, local_grads, seeded
from tests.ranks import Ranks


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        self.rows = nn.Embedding(10, 4, sparse=True)
        self.dense = nn.Linear(4, 2)

    def forward(self, indices: torch.Tensor, use_rows: bool = True) -> torch.Tensor:
        x = self.bag(indices.unsqueeze(0))
        if use_rows:
            x = x + self.rows(indices).sum(0, keepdim=True)
        return self.dense(x).pow(2).sum()


def _mean(model: nn.Module, losses: list[torch.Tensor | None], divisor: float) -> list[torch.Tensor | None]:
    params = list(model.parameters())
    found = [local_grads(loss, params) for loss in losses if loss is not None]
    result: list[torch.Tensor | None] = []
    for column in zip(*found, strict=True):
        present = [grad.to_dense() if grad.is_sparse else grad for grad in column if grad is not None]
        result.append(sum(present[1:], present[0]) / divisor if present else None)
    return result or [None] * len(params)


def _check(model: nn.Module, expected: list[torch.Tensor | None]) -> None:
    for (name, param), reference in zip(model.named_parameters(), expected, strict=True):
        assert (param.grad is None) == (reference is None), name
        if reference is not None:
            assert param.grad.is_sparse == (not name.startswith("dense")), name
            torch.testing.assert_close(param.grad.to_dense(), reference)
    assert_ranks_equal([None if p.grad is None else p.grad.to_dense() for p in model.parameters()])


def _indices(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([[0, 3, 3, step], [3, 9, 8 - step, 1]][rank % 2])


def _training(rank: int, world: int) -> None:
    model = seeded(_Model, rank)
    state = replicate.state(replicate(model))
    optimizer = torch.optim.SparseAdam([*model.bag.parameters(), *model.rows.parameters()], lr=0.01)
    for step in range(5):
        if step != 3:
            model.zero_grad()
        kept = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        # in step 1 rank 1 does not run one of the layers, in step 2 nobody does; in step 4 rank 0 skips
        use = lambda r, step=step: not (step == 1 and r == 1) and step != 2
        loss = lambda r, step=step: None if step == 4 and r == 0 else model(_indices(r, step), use(r))
        took_part = world - (step == 4)
        expected: list[Any] = _mean(model, [loss(r) for r in range(world)], took_part)
        if step == 3:  # nothing was zeroed: the old mean stays in, once
            expected = [o if e is None else e if o is None else o + e for o, e in zip(kept, expected, strict=True)]
        mine = loss(rank)
        with state.round():
            if mine is not None:
                mine.backward()
        _check(model, expected)
        optimizer.step()
        assert_ranks_equal(list(model.parameters()))
    # the layers are in buckets of their own from the second round on
    assert sorted(len(bucket.parameters) for bucket in state.plan().buckets) == [1, 1, 2]


def test_r66_d64_sparse_gradients(ranks: Ranks) -> None:
    ranks(2, _training, 2)
    ranks(3, _training, 3)


def _no_rows(rank: int) -> None:
    model = replicate(seeded(lambda: nn.Embedding(6, 2, sparse=True), 0))
    empty = torch.zeros(0, dtype=torch.int64)
    for _ in range(3):
        model.zero_grad()
        loss = lambda r: model(torch.tensor([1, 2]) if r == 0 else empty).sum()
        expected = _mean(model, [loss(r) for r in range(2)], 2)
        loss(rank).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse
        torch.testing.assert_close(model.weight.grad.to_dense(), expected[0])


def test_r66_a_rank_that_touched_no_row(ranks: Ranks) -> None:
    ranks(2, _no_rows)


def _mixed_use(rank: int) -> None:
    """A weight that is looked up on one rank and multiplied with on the other."""
    for average, divisor in (("participants", 2), ("sum", 1)):
        model = replicate(seeded(lambda: nn.Embedding(6, 2, sparse=True), 0), average=average)
        for step in range(3):
            model.zero_grad()
            loss = lambda r, step=step: (
                model(torch.tensor([1, 2])).sum() if r == 0 else (data(r, step, 3, 6) @ model.weight).pow(2).sum()
            )
            expected = _mean(model, [loss(r) for r in range(2)], divisor)
            loss(rank).backward()
            grad = model.weight.grad
            assert grad is not None
            dense = grad.to_dense() if grad.is_sparse else grad
            torch.testing.assert_close(dense, expected[0])
            assert_ranks_equal([dense])
        replicate.state(model).remove()


def test_sparse_on_one_rank_and_dense_on_another(ranks: Ranks) -> None:
    ranks(2, _mixed_use)


def _averages(rank: int) -> None:
    for average, divisor in (("world", 2.0), ("sum", 1.0), ("weighted", 8.0)):
        model = seeded(lambda: nn.Embedding(10, 3, sparse=True), 0)
        state = replicate.state(replicate(model, average=average))
        weights = [3.0, 5.0] if average == "weighted" else [1.0, 1.0]
        kept: torch.Tensor | None = None
        for step in range(4):
            if step == 1:
                model.zero_grad()
                kept = None
            loss = lambda r, step=step: model(_indices(r, step)).pow(2).sum()
            added = _mean(model, [loss(r) * weights[r] for r in range(2)], divisor)[0]
            assert added is not None
            kept = added if kept is None else kept + added
            if average == "weighted":
                state.set_weight(weights[rank])
            loss(rank).backward()
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.grad.to_dense(), kept)
            kept = model.weight.grad.to_dense().clone()
        state.remove()


def test_sparse_gradients_with_every_average(ranks: Ranks) -> None:
    ranks(2, _averages)
