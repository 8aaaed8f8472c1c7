"""What is trained in the benchmark: small models and one step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """One model and its step.

    Attributes:
        build: Makes the modules, which are wrapped or marked one by one.
        step: ``step(modules, optimizers, rank, number)`` runs one optimizer step.
        unused: Whether some parameters get no gradient, so that stock DDP needs ``find_unused_parameters``.
        accumulate: Backwards in a step; all but the last without synchronization.
    """

    build: Callable[[], list[nn.Module]]
    step: Callable[..., None]
    unused: bool = False
    accumulate: int = 1


def _simple(forward: Callable[[nn.Module, int, int], Tensor]) -> Callable[..., None]:
    def step(modules: list[Any], optimizers: list[Any], rank: int, number: int) -> None:
        optimizers[0].zero_grad()
        forward(modules[0], rank, number).backward()
        optimizers[0].step()

    return step


def _tiny() -> list[nn.Module]:
    return [nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)])]


def _mlp() -> list[nn.Module]:
    return [nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(2048, 2048), nn.ReLU())])]


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)


class _Cnn(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = (hidden + block(hidden)).relu()
        return self.head(hidden.mean((2, 3)))


class _Idle(nn.Module):
    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.used = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(1024, 1024), nn.ReLU())])
        self.idle = nn.Linear(1024, 1024) if branch else None

    def forward(self, batch: Tensor) -> Tensor:
        return self.used(batch)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, batch: Tensor, chosen: list[int]) -> Tensor:
        for index in chosen:
            batch = self.experts[index](batch).relu()
        return batch


def _gan() -> list[nn.Module]:
    def net() -> nn.Module:  # about 20 MB
        return nn.Sequential(nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280))

    return [net(), net()]


def _gan_step(modules: list[Any], optimizers: list[Any], rank: int, number: int) -> None:
    generator, critic = modules
    noise, real = torch.randn(8, 1280), torch.randn(8, 1280)
    optimizers[1].zero_grad()
    (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    for param in critic.parameters():
        param.requires_grad_(False)
    critic(generator(noise)).mean().neg().backward()
    for param in critic.parameters():
        param.requires_grad_(True)
    optimizers[0].step()


WORK: dict[str, Work] = {
    "tiny": Work(_tiny, _simple(lambda net, rank, number: net(torch.randn(2, 4)).sum())),
    "mlp": Work(_mlp, _simple(lambda net, rank, number: net(torch.randn(16, 2048)).sum())),
    "encoder": Work(lambda: [_Encoder()], _simple(lambda net, rank, number: net(torch.randn(4, 64, 256)).sum())),
    "long encoder": Work(lambda: [_Encoder()], _simple(lambda net, rank, number: net(torch.randn(16, 64, 256)).sum())),
    "cnn": Work(lambda: [_Cnn()], _simple(lambda net, rank, number: net(torch.randn(4, 3, 24, 24)).sum())),
    "idle": Work(
        lambda: [_Idle(True)], _simple(lambda net, rank, number: net(torch.randn(16, 1024)).sum()), unused=True
    ),
    "not idle": Work(lambda: [_Idle(False)], _simple(lambda net, rank, number: net(torch.randn(16, 1024)).sum())),
    "gan": Work(_gan, _gan_step, unused=True),
    "accumulate": Work(_mlp, _simple(lambda net, rank, number: net(torch.randn(4, 2048)).sum()), accumulate=4),
    "experts": Work(
        lambda: [_Experts()],
        _simple(
            lambda net, rank, number: net(torch.randn(64, 512), [(number + rank) % 8, (3 * number + rank) % 8]).sum()
        ),
        unused=True,
    ),
}
