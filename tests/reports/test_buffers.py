"""Reports about buffers that each rank writes by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replicate import ReplicateError
from tests.core.helpers import assert_ranks_equal
from tests.ranks import Ranks
from tests.strategy.helpers import Small, trainer

WORLD = 2


class _Counting(Small):
    """Experts that are balanced by how many tokens they got, which all ranks sum just before the optimizer's step."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.register_buffer("tokens", torch.zeros(2))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert torch.equal(self.tokens, torch.zeros(2))  # rank 0's, after it was used up
        self.tokens += torch.tensor([10.0, 1.0]) if self.global_rank == 0 else torch.tensor([1.0, 4.0])
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = self.tokens.clone()
        dist.all_reduce(total)
        self.seen.append(total.tolist())
        self.tokens.zero_()
        if self.global_rank == 1:
            self.tokens += 3  # of this rank; rank 0's value is what the next step begins with


def _counting(rank: int) -> None:
    for manual in (False, True):
        model = _Counting(manual)
        trainer().fit(model)
        assert model.seen == [[11.0, 5.0]] * Small.steps
        assert_ranks_equal(list(model.buffers()))  # at the end, too
        assert torch.equal(model.tokens, torch.zeros(2))


def test_torchtitan_1114_counts_are_each_ranks_own_until_the_step(ranks: Ranks) -> None:
    ranks(2, _counting)


class _Growing(Small):
    """A memory bank whose length depends on what a rank saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.bank = torch.cat([self.bank, batch[: 1 + (self.global_rank if batch_idx == 2 else 0)]])
        return self.loss(batch)


def _growing(rank: int) -> None:
    message = r"Buffer 'bank' differs between ranks in its shape: \(3, 4\) on rank 0, \(4, 4\) on rank 1.*local="
    with pytest.raises(ReplicateError, match=message):
        trainer().fit(_Growing())


def test_anomalib_2673_a_buffer_whose_length_differs_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    ranks(2, _growing)
