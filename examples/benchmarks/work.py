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
        marks: Which submodules of the one module ``replicate()`` is called on, each in a call of its own, where the
            others wrap the whole; the module itself if ``None``.
        optimizers: The parts of the one module that have an optimizer each; the module itself if ``None``.
        warm_up: Steps before anything is measured.
    """

    build: Callable[[], list[nn.Module]]
    step: Callable[..., None]
    unused: bool = False
    accumulate: int = 1
    marks: Callable[[Any], list[nn.Module]] | None = None
    optimizers: Callable[[Any], list[nn.Module]] | None = None
    warm_up: int = 5


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


class _Gan(nn.Module):
    """Both nets in one module, as in a LightningModule. Each takes about 20 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = (
            nn.Sequential(nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280))
            for _ in range(2)
        )

    def forward(self, noise: Tensor, real: Tensor | None) -> Tensor:
        if real is None:
            return self.critic(self.generator(noise)).mean().neg()
        return self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()

    def parts(self) -> list[nn.Module]:
        return [self.generator, self.critic]


def _gan_step(modules: list[Any], optimizers: list[Any], rank: int, number: int) -> None:
    """Each player's turn, the other one frozen, as `toggle_optimizer` does it."""
    (net,) = modules
    of_generator, of_critic = optimizers
    noise, real = torch.randn(8, 1280), torch.randn(8, 1280)
    for optimizer, frozen, batch in ((of_critic, of_generator, real), (of_generator, of_critic, None)):
        for param in frozen.param_groups[0]["params"]:
            param.requires_grad_(False)
        optimizer.zero_grad()
        net(noise, batch).backward()
        optimizer.step()
        for param in frozen.param_groups[0]["params"]:
            param.requires_grad_(True)


WORK: dict[str, Work] = {
    "tiny": Work(_tiny, _simple(lambda net, rank, number: net(torch.randn(2, 4)).sum())),
    "mlp": Work(_mlp, _simple(lambda net, rank, number: net(torch.randn(16, 2048)).sum())),
    "encoder": Work(lambda: [_Encoder()], _simple(lambda net, rank, number: net(torch.randn(4, 64, 256)).sum())),
    "long encoder": Work(lambda: [_Encoder()], _simple(lambda net, rank, number: net(torch.randn(16, 64, 256)).sum())),
    "cnn": Work(lambda: [_Cnn()], _simple(lambda net, rank, number: net(torch.randn(4, 3, 24, 24)).sum())),
    "idle": Work(
        lambda: [_Idle(True)],
        _simple(lambda net, rank, number: net(torch.randn(16, 1024)).sum()),
        unused=True,
        warm_up=40,  # by then ours sends nothing for the idle branch
    ),
    "not idle": Work(lambda: [_Idle(False)], _simple(lambda net, rank, number: net(torch.randn(16, 1024)).sum())),
    "gan": Work(lambda: [_Gan()], _gan_step, unused=True, marks=_Gan.parts, optimizers=_Gan.parts),
    "accumulate": Work(_mlp, _simple(lambda net, rank, number: net(torch.randn(4, 2048)).sum()), accumulate=4),
    "experts": Work(
        lambda: [_Experts()],
        _simple(
            lambda net, rank, number: net(torch.randn(64, 512), [(number + rank) % 8, (3 * number + rank) % 8]).sum()
        ),
        unused=True,
    ),
}


def tensors(count: int, elements: int) -> Work:
    """A chain of ``count`` scale vectors that hold ``elements`` numbers together: little to compute, much to count."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(elements // count)) for _ in range(count))

        def forward(self, batch: Tensor) -> Tensor:
            for scale in self.scales:
                batch = batch * scale
            return batch

    return Work(lambda: [Scales()], _simple(lambda net, rank, number: net(torch.ones(elements // count)).sum()))


def groups(count: int) -> Work:
    """Sixteen linear layers, of which ``replicate()`` is called on ``count`` equal parts."""

    def build() -> list[nn.Module]:
        size = 16 // count
        return [nn.Sequential(*[nn.Sequential(*[nn.Linear(128, 128) for _ in range(size)]) for _ in range(count)])]

    return Work(build, _simple(lambda net, rank, number: net(torch.randn(8, 128)).sum()), marks=list)
