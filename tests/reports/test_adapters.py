"""Adapters on a frozen model that are switched from step to step, within a step, or by rank."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.core.helpers import data, seeded
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, assert_trained_like, trainer

WORLD, STEPS = 2, 6


class _Adapted(nn.Module):
    """A frozen layer with two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapters = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
        self.active = "a"

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapters[self.active](x))


class _Model(LightningModule):
    """``order`` says which adapter each rank uses in each step, or ``"both"`` in turn within one step."""

    def __init__(self, order: str, freezes: bool, checkpoints: bool) -> None:
        super().__init__()
        self.layers = seeded(lambda: nn.Sequential(_Adapted(), _Adapted()), 3)
        self.order, self.freezes, self.checkpoints = order, freezes, checkpoints

    def switch(self, name: str) -> None:
        for layer in self.layers:
            layer.active = name
            if self.freezes:
                for other, adapter in layer.adapters.items():
                    adapter.requires_grad_(other == name)

    def score(self, name: str, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.switch(name)  # again when it is recomputed, in the middle of backward
            return self.layers(x)

        return (checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)).pow(2).mean()

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor:
        if self.order == "both":
            return self.score("a", batch) + 0.5 * self.score("b", batch + 1)
        return self.score("ab"[(step + (rank if self.order == "by rank" else 0)) % 2], batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, self.global_rank, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for layer in self.layers for p in layer.adapters.parameters()], lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, STEPS), batch_size=None)


def _by_hand(model: _Model) -> list[nn.Parameter]:
    """With autograd's own backward: freezing decides what it gives a gradient to, which is part of the matter."""
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model.loss(data(rank, step, 3, 4), rank, step) / WORLD).backward()
        optimizer.step()
    return list(model.parameters())


def _switched(rank: int, checkpoints: bool) -> None:
    for order in ("both", "by turns", "by rank"):
        for freezes in (False, True):
            model = _Model(order, freezes, checkpoints)
            trainer().fit(model)
            assert_trained_like(model, _by_hand(_Model(order, freezes, checkpoints)))


def test_peft_2763_adapters_that_are_switched(ranks: Ranks) -> None:
    """huggingface/peft#2763: switching adapters freezes the others behind one's back.

    Stock DDP raises about unused parameters, and leaves alone what was frozen when it was set up.
    """
    ranks(2, _switched, checkpoints=False)


def test_peft_2832_adapters_that_are_switched_within_a_checkpoint(ranks: Ranks) -> None:
    """huggingface/peft#2832: what is recomputed in backward saw the adapter that was switched on last.

    Switched within the checkpoint it is right, and freezes and unfreezes parameters in the middle of our round.
    """
    ranks(2, _switched, checkpoints=True)
