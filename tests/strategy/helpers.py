"""Small LightningModules, a Trainer for them, and the same training written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.core.helpers import assert_ranks_equal, assert_same, data, local_grads, mean_of, mlp


class Batches(Dataset):
    """Batches that differ by rank and step; every rank can make every other's."""

    def __init__(self, rank: int, length: int, width: int = 4, size: int = 3) -> None:
        self.rank, self.length, self.width, self.size = rank, length, width, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return data(self.rank, index, self.size, self.width)


class Small(LightningModule):
    """A two-layer network on :class:`Batches` of the process's own rank."""

    steps = 4
    lr = 0.1

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = mlp(4, 5, 2, seed=seed)

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _loader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, self.steps), batch_size=None)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def trainer(strategy: Any = "replicate", **options: Any) -> Trainer:
    """A quiet Trainer on as many CPU processes as there are ranks."""
    return Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": dist.get_world_size() if dist.is_initialized() else 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "limit_val_batches": 0,
            **options,
        }
    )


def by_hand(
    model: nn.Module,
    loss: Callable[[nn.Module, int, int], Tensor | Sequence[Tensor] | None],
    steps: int,
    *,
    world: int,
    lr: float = 0.1,
    after_grads: Callable[[list[nn.Parameter]], Any] = lambda params: None,
    over: str = "participants",
) -> list[nn.Parameter]:
    """Trains with SGD on one process that sees all ranks' data.

    Args:
        model: The model; changed in place.
        loss: ``loss(model, rank, step)``; several losses are a window of accumulation, ``None`` a skipped step.
        steps: Optimizer steps.
        world: Number of ranks.
        lr: Learning rate.
        after_grads: Called when gradients are in ``.grad``, before the step: clipping, say.
        over: ``"participants"`` or ``"world"``.
    """
    params = list(model.parameters())
    for step in range(steps):
        per_rank = []
        for rank in range(world):
            made = loss(model, rank, step)
            if made is None:
                continue
            made = made if isinstance(made, (list, tuple)) else [made]
            columns = zip(*(local_grads(one, params) for one in made), strict=True)
            per_rank.append(
                [
                    sum(present[1:], present[0]) if (present := [g for g in column if g is not None]) else None
                    for column in columns
                ]
            )
        mean = mean_of(per_rank, world if over == "world" else None) if per_rank else [None] * len(params)
        for param, grad in zip(params, mean, strict=True):
            param.grad = grad
        after_grads(params)
        with torch.no_grad():
            for param in params:
                if param.grad is not None:
                    param -= lr * param.grad
    return params


def assert_trained_like(model: nn.Module, reference: Sequence[Tensor], **tolerance: float) -> None:
    """The model's parameters equal the reference and are bit-equal on all ranks. Collective."""
    assert_same(list(model.parameters()), list(reference), **{"rtol": 1e-4, "atol": 1e-6, **tolerance})
    assert_ranks_equal(list(model.parameters()))
