"""Through the Trainer: gradients that no backward brought, and optimizers that look at the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_replicate import ReplicateError, ReplicateStrategy
from tests.core.helpers import assert_ranks_equal, assert_same, data, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Small, assert_trained_like, trainer

WORLD = 2


def _tasks(net: Any, batch: Tensor) -> list[Tensor]:
    out = net(batch)
    return [out[:, 0].pow(2).mean(), (out[:, 1] - 1).pow(2).mean()]


def _surgery(losses: list[Tensor], params: list[Any]) -> list[Tensor]:
    """The second task's gradient without its part along the first, plus the first."""
    first, second = (torch.autograd.grad(loss, params, retain_graph=True) for loss in losses)
    return [a + b - a * (a * b).sum().clamp(max=0) / (a * a).sum() for a, b in zip(first, second, strict=True)]


class _Surgery(Small):
    """Gradient surgery in manual optimization, with an optimizer (and so a group) for the body and one for the head."""

    forgets = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=self.lr) for part in (self.net[0], self.net[2])]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        losses = _tasks(self.net, batch)
        body, head = list(self.net[0].parameters()), list(self.net[2].parameters())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        with strategy.block_backward_sync():
            torch.autograd.backward(losses, inputs=head, retain_graph=True)
        for param, grad in zip(body, _surgery(losses, body), strict=True):
            param.grad = grad
        if not self.forgets:
            strategy.average_gradients()
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()


class _OwnBackward(Small):
    """Gradient surgery in automatic optimization, in place of the backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.losses = _tasks(self.net, batch)
        return sum(self.losses)  # type: ignore[return-value]

    def backward(self, loss: Tensor, *args: Any) -> None:
        params = list(self.net.parameters())
        for param, grad in zip(params, _surgery(self.losses, params), strict=True):
            param.grad = grad
        self.trainer.strategy.average_gradients(params)  # type: ignore[attr-defined]


def _by_hand(parts: bool) -> list[Any]:
    net = mlp(4, 5, 2)
    params = list(net.parameters())
    for step in range(Small.steps):
        per_rank = []
        for rank in range(WORLD):
            losses = _tasks(net, data(rank, step, 3, 4))
            surgery = _surgery(losses, params)
            plain = torch.autograd.grad(sum(losses), params)  # type: ignore[arg-type]
            per_rank.append([*surgery[:2], *plain[2:]] if parts else surgery)
        with torch.no_grad():
            for param, *column in zip(params, *per_rank, strict=True):
                param -= 0.1 * sum(column) / WORLD
    return params


def _averages(rank: int) -> None:
    for kind, parts in ((_Surgery, True), (_OwnBackward, False)):
        model = kind()
        trainer(gradient_clip_val=None).fit(model)
        assert_trained_like(model, _by_hand(parts))

    model = _Surgery()
    model.forgets = True
    message = rf"SGD is about to step parameter 'net.0.weight' on rank {rank}.*`trainer.strategy`"
    with pytest.raises(ReplicateError, match=message):
        trainer().fit(model)
    assert_same(list(model.parameters()), list(mlp(4, 5, 2).parameters()), rtol=0, atol=0)

    model = _Surgery()
    model.forgets = True
    trainer(ReplicateStrategy(unaveraged_gradients="allow"), max_steps=2).fit(model)
    alone = mlp(4, 5, 2)
    params = list(alone.parameters())
    losses = _tasks(alone, data(rank, 0, 3, 4))
    steps = [*_surgery(losses, params)[:2], *torch.autograd.grad(sum(losses), params)[2:]]  # type: ignore[arg-type]
    assert_same(list(model.parameters()), [p - 0.1 * g for p, g in zip(params, steps, strict=True)])


def test_gradient_surgery_is_averaged_when_asked_and_noticed_when_not(ranks: Ranks) -> None:
    ranks(2, _averages)


class _LineSearch(Small):
    """LBFGS with a line search, in automatic optimization; rank 1 may have nothing to say."""

    skips = False

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.skips and self.global_rank == 1 and batch_idx == 1:
            return None
        return (self.net(batch) - 1).pow(2).mean()


def _line_search(rank: int) -> None:
    for skips in (False, True):
        model = _LineSearch()
        model.skips = skips
        trainer().fit(model)
        net = mlp(4, 5, 2)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        for step in range(Small.steps):
            seen = [data(r, step, 3, 4) for r in range(WORLD) if not (skips and r == 1 and step == 1)]

            def closure(seen: Any = seen) -> Tensor:
                optimizer.zero_grad()
                loss = (net(torch.cat(seen)) - 1).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        assert_same(list(model.parameters()), list(net.parameters()), rtol=1e-3, atol=1e-4)
        assert_ranks_equal(list(model.parameters()))


def test_pytorch_30439_a_line_search_in_the_trainer(ranks: Ranks) -> None:
    ranks(2, _line_search)
