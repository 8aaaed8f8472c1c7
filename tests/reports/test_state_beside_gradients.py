"""What models and callbacks keep beside what gradients do: averages of weights, codebooks, banks of features."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.core.helpers import assert_ranks_equal, assert_same, data, mlp, seeded
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, assert_trained_like, trainer

WORLD = 2


class _Normalized(Small):
    steps = 3

    def __init__(self) -> None:
        super().__init__()
        layers = lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
        self.net = seeded(layers, 0)
        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        # Lightning steps once more in the callback's extra epoch; without this, with the gradients of the step before
        self.zero_grad()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def _averaged_weights(rank: int, half: bool) -> None:
    plugins: list[Any] = []
    if half:
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)))
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    model = _Normalized()
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1, annealing_strategy="linear")
    trainer(max_epochs=4, callbacks=[averaging], plugins=plugins).fit(model)

    net = _Normalized().net
    params = list(net.parameters())
    seen = []
    for epoch in range(4):
        if epoch >= 1:  # the callback takes what an epoch begins with
            seen.append([param.detach().clone() for param in params])
        for step in range(3):
            loss = sum(net(data(r, step, 3, 4)).pow(2).mean() for r in range(WORLD)) / WORLD
            found = torch.autograd.grad(loss, params)
            with torch.no_grad():
                for param, grad in zip(params, found, strict=True):
                    param -= model.rates[3 * epoch + step] * grad
    with torch.no_grad():
        for param, *values in zip(params, *seen, strict=True):
            param.copy_(sum(values) / len(values))
    assert_trained_like(model.net, params, **tolerance)

    features = [net[0](data(0, step, 3, 4)) for step in range(3)]  # running statistics are rank 0's
    expected = [sum(f.mean(0) for f in features) / 3, sum(f.var(0) for f in features) / 3]
    norm = model.net[1]
    assert_same([norm.running_mean, norm.running_var], expected, **tolerance)
    assert_ranks_equal([norm.running_mean, norm.running_var])


def test_lightning_21347_17245_averaged_weights_and_a_pass_without_backward(ranks: Ranks) -> None:
    """Lightning-AI/pytorch-lightning#21347, #17245: averaging weights adds an epoch that renews running statistics.

    In it no step has a backward, and the callback puts new tensors in the buffers' place. With a loss scaler, stock DDP
    stops in it.
    """
    for half in (False, True):
        ranks(2, _averaged_weights, half)


class _Codebook(LightningModule):
    """A quantizing autoencoder whose codes are moving averages of what fell to them, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(4, 6, 3, seed=1), mlp(3, 6, 4, seed=2)
        codes = seeded(lambda: torch.randn(5, 3), 7)
        self.register_buffer("codes", codes)
        self.register_buffer("sums", codes.clone())
        self.register_buffer("counts", torch.ones(5))

    def loss(self, batch: Tensor, over_ranks: Callable[[Tensor], Any]) -> Tensor:
        z = self.encoder(batch)
        chosen = torch.cdist(z.detach(), self.codes).argmin(1)
        quantized = self.codes[chosen]
        if self.training:
            where = nn.functional.one_hot(chosen, 5).float()
            counts, sums = where.sum(0), where.T @ z.detach()
            over_ranks(counts)
            over_ranks(sums)
            self.counts.lerp_(counts, 0.2)
            self.sums.lerp_(sums, 0.2)
            self.codes.copy_(self.sums / self.counts[:, None])
        decoded = self.decoder(z + (quantized - z).detach())
        return (decoded - batch).pow(2).mean() + 0.25 * (z - quantized).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, dist.all_reduce)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("distance", self.loss(batch, lambda tensor: None), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 6), batch_size=None)

    val_dataloader = train_dataloader


def _codes(rank: int) -> None:
    model, whole = _Codebook(), _Codebook()
    run = trainer(limit_val_batches=2, val_check_interval=2)
    run.fit(model)
    params = list(whole.parameters())
    for step in range(6):
        batch = torch.cat([data(r, step, 3, 4) for r in range(WORLD)])
        found = torch.autograd.grad(whole.loss(batch, lambda tensor: None), params)
        with torch.no_grad():
            for param, grad in zip(params, found, strict=True):
                param -= 0.1 * grad
    assert_trained_like(model, params)
    assert_same(list(model.buffers()), list(whole.buffers()), rtol=1e-4, atol=1e-5)
    assert_ranks_equal(list(model.buffers()))
    whole.eval()
    distances = [whole.loss(data(r, step, 3, 4), lambda tensor: None).item() for r in range(WORLD) for step in range(2)]
    assert abs(run.callback_metrics["distance"].item() - sum(distances) / 4) < 1e-4


def test_espnet_6284_a_codebook_that_follows_all_ranks(ranks: Ranks) -> None:
    """espnet/espnet#6284: codes moved by each rank's own samples, and rank 0's were then sent to all.

    Summed over ranks by the model, in its forward, they must come out of our own handling of buffers as they are.
    """
    ranks(2, _codes)


class _Bank(LightningModule):
    """Nothing is trained: features of a frozen net are gathered into a buffer, which begins empty."""

    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.with_loss = with_loss
        self.net = mlp(4, 5, 3).requires_grad_(False)
        self.features: list[Tensor] = []
        self.register_buffer("bank", torch.empty(0, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.features.append(self.net(batch))
        return torch.zeros((), requires_grad=True) if self.with_loss else None

    def on_validation_start(self) -> None:  # the first validation comes before the end of the epoch
        self.bank = self.all_gather(torch.cat(self.features)).flatten(0, 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("distance", torch.cdist(self.net(batch), self.bank).amin(1).mean(), sync_dist=True)

    def configure_optimizers(self) -> None:
        return None

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 4), batch_size=None)

    val_dataloader = train_dataloader


def _bank(rank: int) -> None:
    net = mlp(4, 5, 3)
    expected = torch.cat([net(data(r, step, 3, 4)).detach() for r in range(WORLD) for step in range(4)])
    for with_loss in (True, False):
        model = _Bank(with_loss)
        before = copy.deepcopy(model.net)
        run = trainer(limit_val_batches=2, num_sanity_val_steps=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no optimizer, and no loss, is the point
            warnings.simplefilter("ignore", FutureWarning)  # Lightning gathers by a function that torch deprecates
            run.fit(model)
        assert_same([model.bank], [expected])
        assert_ranks_equal([model.bank])
        assert_same(list(model.net.parameters()), list(before.parameters()), rtol=0, atol=0)
        assert run.callback_metrics["distance"].item() < 1e-6


def test_anomalib_2673_a_bank_of_features_and_no_optimizer(ranks: Ranks) -> None:
    """open-edge-platform/anomalib#2673: half of the features were saved.

    Nothing is trained, which stock DDP refuses, and the buffer grows between steps and validation.
    """
    ranks(2, _bank)
