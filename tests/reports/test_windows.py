"""Steps that are made of several backwards: which of them communicate, and what is averaged in the end."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from lightning_replicate import replicate
from tests.core.helpers import data, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Small, assert_trained_like, by_hand, trainer

WORLD = 2


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step, 3, 4)).pow(2).mean()


def _descend(params: list[nn.Parameter], gradients: list[Any]) -> None:
    with torch.no_grad():
        for param, grad in zip(params, gradients, strict=True):
            param -= 0.1 * grad


def _short_epochs(rank: int) -> None:
    model = Small()
    model.steps = 5  # type: ignore[misc]
    run = trainer(max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 8, 1: 3, 2: 2})])
    run.fit(model)
    # an epoch's last window may be short; its losses are divided by what was asked for all the same
    windows = [(range(5), 8), (range(3), 3), (range(3, 5), 3), (range(2), 2), (range(2, 4), 2), (range(4, 5), 2)]

    def losses(m: nn.Module, r: int, number: int) -> list[Tensor]:
        batches, asked = windows[number]
        return [_loss(m, r, batch) / asked for batch in batches]

    assert run.global_step == len(windows)
    assert_trained_like(model, by_hand(mlp(4, 5, 2), losses, len(windows), world=WORLD))


def test_lightning_21808_19987_epochs_shorter_than_a_window(ranks: Ranks) -> None:
    """Lightning-AI/pytorch-lightning#21808, #19987: an epoch that ends within a window steps early, unnoticed.

    A strategy that believed in full windows would leave the last one unsent, and ranks would step with their own.
    """
    ranks(2, _short_epochs)


def _two_windows(rank: int) -> None:
    first, second = mlp(4, 5, 3, seed=1), mlp(3, 5, 2, seed=2)
    plain = copy.deepcopy(first), copy.deepcopy(second)
    models = {2: replicate(first), 3: replicate(second)}  # by the length of their windows
    optimizers = {length: torch.optim.SGD(model.parameters(), lr=0.1) for length, model in models.items()}
    for step in range(12):
        ends = [length for length in models if (step + 1) % length == 0]
        with contextlib.ExitStack() as stack:
            for length in models.keys() - set(ends):
                stack.enter_context(replicate.state(models[length]).no_sync())
            second(first(data(rank, step, 3, 4))).pow(2).mean().backward()
        for length in ends:
            optimizers[length].step()
            optimizers[length].zero_grad()

    params = {length: list(model.parameters()) for length, model in zip(models, plain, strict=True)}
    for step in range(12):
        whole = sum(plain[1](plain[0](data(r, step, 3, 4))).pow(2).mean() for r in range(WORLD)) / WORLD
        whole.backward()
        for length, own in params.items():
            if (step + 1) % length == 0:
                _descend(own, [param.grad for param in own])
                for param in own:
                    param.grad = None
    for length, model in models.items():
        assert_trained_like(model, params[length])


def test_accelerate_668_two_models_with_windows_of_other_lengths(ranks: Ranks) -> None:
    """huggingface/accelerate#668: two models under accumulation; one context for both sent the wrong one's gradients.

    Here some backwards end a window of one model, of the other, of both or of none.
    """
    ranks(2, _two_windows)


def _cached(rank: int) -> None:
    def contrast(embeddings: Tensor) -> Tensor:
        return nn.functional.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)))

    for once in (True, False):
        model = replicate(mlp(4, 6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            chunks = data(rank, step, 6, 4).split(2)
            with torch.no_grad():
                mine = torch.cat([model(chunk) for chunk in chunks])
            everybody = [torch.empty_like(mine) for _ in range(WORLD)]
            dist.all_gather(everybody, mine)
            everybody[rank] = mine.requires_grad_()
            (wanted,) = torch.autograd.grad(contrast(torch.cat(everybody)), mine)
            optimizer.zero_grad()
            for number, (chunk, part) in enumerate(zip(chunks, wanted.split(2), strict=True)):
                silent = once and number < len(chunks) - 1
                with replicate.state(model).no_sync() if silent else contextlib.nullcontext():
                    (model(chunk) * part * WORLD).sum().backward()  # the mean over ranks shall be the sum
            optimizer.step()
        whole = lambda m, _, step: contrast(m(torch.cat([data(r, step, 6, 4) for r in range(WORLD)])))
        assert_trained_like(model, by_hand(mlp(4, 6, 3), whole, 3, world=1))


def test_gradcache_5_chunks_that_are_run_again_for_gradients_that_are_known(ranks: Ranks) -> None:
    """luyug/GradCache#5: the loss is taken on cached outputs, then each chunk runs again: "ready only once" in DDP.

    Once with one round at the last chunk, once with a round for each chunk.
    """
    ranks(2, _cached)


class _Sharpness(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        before = _climb(list(self.net.parameters()), [param.grad for param in self.net.parameters()])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for param, value in zip(self.net.parameters(), before, strict=True):
                param.copy_(value)
        optimizer.step()
        optimizer.zero_grad()


def _climb(params: list[nn.Parameter], gradients: list[Any]) -> list[Tensor]:
    before = [param.detach().clone() for param in params]
    norm = torch.stack([grad.norm() for grad in gradients]).norm()
    with torch.no_grad():
        for param, grad in zip(params, gradients, strict=True):
            param += 0.3 * grad / norm
    return before


def _sharpness(rank: int) -> None:
    model = _Sharpness()
    trainer().fit(model)
    reference = mlp(4, 5, 2)
    for step in range(4):
        by_rank = []
        for r in range(WORLD):  # each from where its own gradient leads
            moved = copy.deepcopy(reference)
            params = list(moved.parameters())
            _climb(params, list(torch.autograd.grad(_loss(moved, r, step), params)))
            by_rank.append(torch.autograd.grad(_loss(moved, r, step), params))
        _descend(list(reference.parameters()), [sum(column) / WORLD for column in zip(*by_rank, strict=True)])
    assert_trained_like(model, list(reference.parameters()))


def test_sam_78_a_gradient_that_is_not_sent_and_thrown_away(ranks: Ranks) -> None:
    """davda54/sam#78: each rank climbs along its own gradient, and only the second backward is averaged.

    What was accumulated without communication is cleared by the user in between, and must not come back with the round.
    """
    ranks(2, _sharpness)
