"""Sharded modules beside replicated ones: the same training as one process on all ranks' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_replicate import ReplicateStrategy, replicate
from tests.core.helpers import assert_ranks_equal, assert_same, data
from tests.ranks import Ranks
from tests.strategy.helpers import Small, trainer

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.trunk = nn.Sequential(*[nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)])
        self.head = nn.Linear(6, 3)
        self.loose = nn.Parameter(torch.randn(3))

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.trunk(self.stem(batch).relu())) + self.loose


class Mixed(Small):
    """A stem, a trunk of three blocks, a head, and a loose parameter; ranks begin with different values."""

    steps = 5

    def __init__(
        self, mark: Callable[[Mixed], None] | None = None, optimizer: Any = None, seed: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1000 + dist.get_rank() if seed is None else seed)
        self.mark = mark
        self.make_optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=0.01))
        self.net = Net()

    def configure_model(self) -> None:
        if self.mark is not None and self.device_mesh is not None:
            self.mark(self)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def full(params: Any) -> list[Tensor]:
    return [param.full_tensor() if hasattr(param, "full_tensor") else param.detach() for param in params]


def one_process(
    steps: int,
    world: int,
    optimizer: Any = None,
    *,
    losses: Callable[[Any, int, int], Tensor | None] | None = None,
    accumulate: int = 1,
    before_step: Callable[[Sequence[nn.Parameter]], Any] = lambda params: None,
) -> Mixed:
    """The same training on one process that sees all ranks' data, from rank 0's first values."""
    model = Mixed(optimizer=optimizer, seed=1000)
    found = losses or (lambda m, rank, step: m.loss(data(rank, step, 3, 4)))
    opt = model.configure_optimizers()
    for step in range(0, steps, accumulate):
        opt.zero_grad()
        for micro in range(step, step + accumulate):
            each = [loss for rank in range(world) if (loss := found(model, rank, micro)) is not None]
            if each:
                (sum(each) / len(each) / accumulate).backward()
        if any(param.grad is not None for param in model.parameters()):
            before_step(list(model.parameters()))
            opt.step()
    return model


def assert_like(model: Mixed, reference: Mixed, **tolerance: float) -> None:
    mine = full(model.parameters())
    assert_ranks_equal(mine)
    assert_same(mine, [param.detach() for param in reference.parameters()], **tolerance)


# ---- layouts --------------------------------------------------------------------------------------------------------


def _sharded_child(self: Mixed) -> None:
    for block in self.net.trunk:
        fully_shard(block, mesh=self.device_mesh)


def _replicated_child(self: Mixed) -> None:
    replicate(self.net.head)
    replicate(self.net.trunk[1])
    fully_shard(self.net, mesh=self.device_mesh)


def _both_under_a_sharded_root(self: Mixed) -> None:
    fully_shard(self.net.trunk[0], mesh=self.device_mesh)
    replicate(self.net.trunk[1])
    fully_shard(self, mesh=self.device_mesh)


def _both_under_a_replicated_root(self: Mixed) -> None:
    fully_shard(self.net.trunk[0], mesh=self.device_mesh)
    replicate(self.net.trunk[1])
    replicate(self)


def _three_levels(self: Mixed) -> None:
    fully_shard(self.net.trunk[0][0], mesh=self.device_mesh)
    fully_shard(self.net.trunk[1][0], mesh=self.device_mesh)
    replicate(self.net.trunk)
    fully_shard(self.net, mesh=self.device_mesh)


def _replicated_before_its_children_are_sharded(self: Mixed) -> None:
    replicate(self.net)
    fully_shard(self.net.trunk[0], mesh=self.device_mesh)


LAYOUTS: dict[str, Any] = {
    "c1 sharded children, replicated root": (_sharded_child, {}),
    "c2 replicated children, sharded root": (_replicated_child, {}),
    "c3 both under a sharded root": (_both_under_a_sharded_root, {}),
    "both under a replicated root": (_both_under_a_replicated_root, {}),
    "c4 three levels": (_three_levels, {}),
    "replicate() before fully_shard() of a child": (_replicated_before_its_children_are_sharded, {}),
    "by arguments": (None, {"shard": "net.trunk.*"}),
    "nested, by arguments": (None, {"shard": ["net.trunk", "net.trunk.*"]}),
    "each with its own arguments": (
        None,
        {"shard": {"net.trunk.*": {"reshard_after_forward": False}, "net.trunk": {"reshard_after_forward": True}}},
    ),
    "alternating": (
        None,
        {"shard": ["net.trunk.0", "net.trunk.2"], "replicate": ["net.stem", "net.trunk.1", "net.head", "net.loose"]},
    ),
    "replicated within sharded": (None, {"shard": ["net"], "replicate": ["net.trunk.1", "net.head"]}),
    "both ways": (_sharded_child, {"shard": "net.head", "replicate": ["net.stem", "net.loose"]}),
    "by a type": (None, {"shard": nn.Linear, "replicate": "net.loose"}),
}


def _layouts(rank: int, world: int, names: list[str]) -> None:
    reference = one_process(5, world)
    for name in names:
        mark, arguments = LAYOUTS[name]
        model = Mixed(mark)
        try:
            trainer(ReplicateStrategy(**arguments)).fit(model)
            assert_like(model, reference)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("world", [2, 3])
def test_r47_r49_t32_c1_to_c4_layouts(ranks: Ranks, world: int) -> None:
    names = list(LAYOUTS) if world == 2 else ["c4 three levels", "alternating"]
    ranks(world, _layouts, world, names)
