"""Trains a Wasserstein GAN with gradient penalty on real digits: two networks, two optimizers, no flags.

    python examples/gan.py                         # two processes on the CPU
    python examples/gan.py --strategy ddp          # what stock DDP says to it

Each backward leaves the other network without gradients, or deposits gradients there that nobody wants; stock DDP
refuses that. Prints how many bytes the critic's and the generator's turns moved: each its own network's, or both.
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule
from shared import Digits, make_trainer, parse, ranks_are_equal
from torch import Tensor, nn

LATENT = 16


def dense(*sizes: int) -> nn.Sequential:
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))]  # noqa: B905, RUF007
    return nn.Sequential(*layers[:-1])


class Gan(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(dense(LATENT, 128, 128, 64), nn.Sigmoid())
        self.critic = dense(64, 128, 128, 1)
        self.moved: dict[str, int] = {}

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        mix = torch.rand(len(real), 1, device=self.device)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return (slope.norm(2, dim=1) - 1).pow(2).mean()

    def turn(self, name: str, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        before = self.rounds()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log(name, loss.detach())
        self.moved[name] = sum(nbytes for (count, nbytes), (old, _) in zip(self.rounds(), before) if count > old)  # noqa: B905

    def rounds(self) -> list[tuple[int, int]]:
        """For each group of parameters that reduces by itself: how many rounds it closed, and the last one's bytes."""
        states = getattr(self.trainer.strategy, "states", ())
        stats = [group.last_round for state in states for group in state.groups]
        return [(0, 0) if last is None else (last.number, last.nbytes) for last in stats]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), LATENT, device=self.device))
        distance = self.critic(fake.detach()).mean() - self.critic(real).mean()
        self.turn("critic", critic, distance + 10 * self.penalty(real, fake.detach()))
        if batch_idx % 2 == 0:
            self.turn("generator", generator, -self.critic(fake).mean())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.critic)
        return [torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.9)) for network in networks]


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, epochs=20)
    trainer = make_trainer(options, limit_val_batches=0)
    model, data = Gan(), Digits(options.batch_size)
    trainer.fit(model, data)
    images = torch.stack([image.flatten() for image, _ in data.train])
    with torch.no_grad():
        made = model.generator(torch.randn(1000, LATENT))
    error = (made.mean(0) - images.mean(0)).abs().mean().item()  # before training it is about 0.27
    if trainer.is_global_zero:
        print("bytes of a turn:", ", ".join(f"{name} {nbytes}" for name, nbytes in model.moved.items()))
        print(f"mean pixel error of made digits: {error:.3f}")
    return 0 if ranks_are_equal(trainer, model) and error < 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
