"""Losses that communicate, or differentiate, within themselves."""

from __future__ import annotations

import warnings

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_replicate import replicate
from tests.core.helpers import data, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, assert_trained_like, by_hand, trainer

WORLD = 2


class _Contrast(LightningModule):
    """Two encoders and a temperature; each rank scores its own rows, or all, against all ranks' columns."""

    def __init__(self, own_rows: bool = False) -> None:
        super().__init__()
        self.own_rows = own_rows
        self.images, self.texts = mlp(4, 6, 3, seed=1), mlp(4, 6, 3, seed=2)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def score(self, rows: Tensor, columns: Tensor, first: int = 0) -> Tensor:
        targets = torch.arange(len(rows)) + first
        return nn.functional.cross_entropy(self.temperature * rows @ columns.T, targets)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows, columns = self.images(batch), self.texts(batch + 1)
        everything = self.all_gather(columns, sync_grads=True).flatten(0, 1)
        if self.own_rows:
            return self.score(rows, everything, first=len(rows) * self.global_rank)
        return self.score(self.all_gather(rows, sync_grads=True).flatten(0, 1), everything)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 4), batch_size=None)


def _contrast(rank: int) -> None:
    def whole(model: nn.Module, _: int, step: int) -> Tensor:
        batch = torch.cat([data(r, step, 3, 4) for r in range(WORLD)])
        return model.score(model.images(batch), model.texts(batch + 1))

    reference = by_hand(_Contrast(), whole, 4, world=1)
    for own_rows in (False, True):
        model = _Contrast(own_rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Lightning gathers by a function that torch deprecates
            trainer().fit(model)
        assert_trained_like(model, reference)


def test_lightly_1977_a_loss_over_all_ranks_samples(ranks: Ranks) -> None:
    """lightly-ai/lightly#1977: gathered without its gradient, such a loss is off by the number of ranks.

    Gathered with it, the loss communicates in backward, between our buckets, and must equal one process.
    """
    ranks(2, _contrast)


def _transforms(rank: int) -> None:
    def make() -> nn.Module:
        net = mlp(2, 6, 1)
        net.register_buffer("offset", torch.ones(1))
        return net

    def residual(net: nn.Module, r: int, step: int) -> Tensor:
        x = data(r, step, 3, 2)
        value, slope = torch.func.jvp(net, (x,), (torch.ones_like(x),))
        jacobian = torch.func.vmap(torch.func.jacfwd(net))(x)
        return (slope - value).pow(2).mean() + jacobian.pow(2).mean()

    model = replicate(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch itself scripts functions for this, once
        for step in range(3):
            optimizer.zero_grad()
            residual(model, rank, step).backward()
            optimizer.step()
        assert_trained_like(model, by_hand(make(), residual, 3, world=WORLD))


def test_torch_130932_102197_transforms_of_a_model_with_a_buffer(ranks: Ranks) -> None:
    """pytorch/pytorch#130932, #102197: DDP sends buffers in forward, which no transform of `torch.func` allows."""
    ranks(2, _transforms)
