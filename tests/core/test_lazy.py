"""Lazy modules: their parameters come in the first forward, equal on all ranks, and are averaged in that very step."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lightning_replicate import ReplicateError, replicate
from tests.core.helpers import assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, seeded
from tests.ranks import Ranks

WORLD = 2


def _lazy_net() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def _reference() -> nn.Sequential:
    """What each lazy module makes of the seed of rank 0 and its number."""
    first = seeded(lambda: nn.Linear(4, 5), 1000)
    return nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(5), seeded(lambda: nn.Linear(5, 2), 1002))


def _square() -> nn.Linear:
    return seeded(lambda: nn.Linear(4, 4), 0)


def _training(rank: int) -> None:
    torch.rand(3 + rank)  # generators are somewhere else on each rank, and stay where they are
    for model, reference in (
        (_lazy_net(), _reference()),
        (nn.Sequential(_square(), _lazy_net()), nn.Sequential(_square(), _reference())),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # holds what gets its values later
        replicate(model)
        generator = torch.get_rng_state()
        for step in range(4):
            optimizer.zero_grad()
            model(data(rank, step, 6, 4)).pow(2).mean().backward()
            params = list(reference.parameters())
            losses = [reference(data(r, step, 6, 4)).pow(2).mean() for r in range(WORLD)]
            expected = mean_of([local_grads(loss, params) for loss in losses])
            assert_same(grads(list(model.parameters())), expected, rtol=1e-4, atol=1e-6)
            optimizer.step()
            with torch.no_grad():
                for param, grad in zip(params, expected, strict=True):
                    assert grad is not None
                    param -= 0.1 * grad
            assert_same(list(model.parameters()), params, rtol=1e-4, atol=1e-6)
            assert_ranks_equal(list(model.parameters()))
        assert torch.equal(generator, torch.get_rng_state())
        assert set(replicate.state(model).plan().parameters) == {name for name, _ in model.named_parameters()}
        replicate.state(model).sync_buffers()
        assert_ranks_equal([buffer for buffer in model.buffers() if buffer.is_floating_point()])


def _copies(rank: int) -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(2))
    replicate(model)
    for twin in (copy.deepcopy(model), _pickled(model)):
        twin(data(rank, 0, 6, 4)).sum().backward()  # a plain module, of this rank alone
    model(data(rank, 0, 6, 4)).sum().backward()
    copy.deepcopy(model)
    replicate.state(model).remove()
    assert not any(module._forward_pre_hooks for module in model.modules())

    model = nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(2))
    replicate(model)
    replicate.state(model).remove()  # before they had values
    model(data(rank, 0, 6, 4)).sum().backward()

    # one rank does not run them when the others do for the first time
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    replicate(model)
    with pytest.raises(ReplicateError, match=r"Rank 0 has 4 parameters, rank 1 has 2.*'1.weight'"):
        (model if rank == 0 else model[0])(data(rank, 0, 3, 4)).sum().backward()


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _lazy(rank: int) -> None:
    _training(rank)
    _copies(rank)


def test_r26_d2_lazy_modules_join_in_their_first_step(ranks: Ranks) -> None:
    ranks(2, _lazy)
