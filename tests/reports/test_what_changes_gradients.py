"""Hooks, clipping and loss scaling: what changes a gradient before or after it was averaged."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.core.helpers import data, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, assert_trained_like, trainer

WORLD = 2


class _Hooked(Small):
    """Trains some rows of a matrix only, limits the gradient of another, and doubles what flows further back."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        if not late:
            self.hook()

    def on_train_start(self) -> None:
        if self.late:
            self.hook()

    def hook(self) -> None:
        rows = torch.zeros(5, 4)
        rows[3:] = 1
        self.net[0].weight.register_hook(lambda grad: grad * rows)
        self.net[2].weight.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
        self.net[2].register_full_backward_hook(lambda module, before, after: tuple(2 * grad for grad in before))


def _hooked(rank: int) -> None:
    reference = _Hooked(late=False)
    params = list(reference.parameters())
    for step in range(4):
        by_rank = []
        for r in range(WORLD):  # hooks see one rank's gradient: a limit does not commute with the mean
            reference.zero_grad()
            reference.loss(data(r, step, 3, 4)).backward()
            by_rank.append([param.grad.clone() for param in params])
        with torch.no_grad():
            for param, *grads in zip(params, *by_rank, strict=True):
                param -= 0.1 * sum(grads) / WORLD
    for late in (False, True):
        model = _Hooked(late)
        trainer().fit(model)
        assert_trained_like(model, params)


def test_picotron_39_hooks_that_change_gradients(ranks: Ranks) -> None:
    """huggingface/picotron#39: which hook sees which gradient.

    A user's tensor hooks come before our reduction, whoever registered first.
    """
    ranks(2, _hooked)


class _Clipped(LightningModule):
    """Two optimizers, a clipped norm for each, a loss scaler, and an overflow on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(4, 6, 3, seed=1), mlp(3, 6, 1, seed=2)
        self.scales: list[float] = []

    def nets(self) -> list[nn.Module]:
        return [self.generator, self.critic]

    def loss(self, turn: int, batch: Tensor) -> Tensor:
        made = self.generator(batch)
        return 20 * (self.critic(made).pow(2) if turn == 0 else (self.critic(made.detach()) - 1).pow(2)).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == 1:
            batch = batch * 1e9
        for turn, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(turn, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, 0.5, "norm")  # here, and not in the step, gradients are unscaled

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets()]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 5), batch_size=None)


def _clipped(rank: int) -> None:
    model = _Clipped()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)]).fit(model)
    reference = _Clipped()
    for step in range(5):
        for turn, net in enumerate(reference.nets() if step != 2 else []):
            params = list(net.parameters())
            losses = [reference.loss(turn, data(r, step, 3, 4)) for r in range(WORLD)]
            for param, grad in zip(params, torch.autograd.grad(sum(losses) / WORLD, params), strict=True):
                param.grad = grad
            nn.utils.clip_grad_norm_(params, 0.5)
            with torch.no_grad():
                for param in params:
                    param -= 0.1 * param.grad
    assert_trained_like(model, list(reference.parameters()), rtol=2e-2, atol=2e-3)
    assert model.scales == [64.0, 64.0, 16.0, 16.0, 16.0]  # halved by both turns, on both ranks


def test_lightning_18089_clipping_with_a_loss_scaler_in_manual_optimization(ranks: Ranks) -> None:
    """Lightning-AI/pytorch-lightning#18089: gradients were clipped while they were still scaled.

    Ranks must agree on the norm, and that both turns of the step with the overflow are skipped.
    """
    ranks(2, _clipped)
