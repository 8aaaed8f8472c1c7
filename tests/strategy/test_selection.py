"""Names, globs, types and callables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_replicate.strategy.selection import select


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
        self.head_a, self.head_b = nn.Linear(1, 1), nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("patterns", "modules", "params"),
    [
        ("trunk", ["trunk"], []),
        (["head_a", "trunk"], ["trunk", "head_a"], []),  # in the model's order
        ("head_*", ["head_a", "head_b"], []),
        ("trunk.*", ["trunk.0", "trunk.1"], []),  # a star stays within one part of the name
        (["trunk.*", "trunk"], ["trunk"], []),  # no module inside another one
        (nn.Sequential, ["trunk"], []),
        (lambda name, module: name.endswith("0"), ["trunk.0", "trunk.1.0"], []),
        ("scale", [], ["scale"]),
        (["head_a.weight", "head_b"], ["head_b"], ["head_a.weight"]),
        (["trunk.0", "trunk.0.bias"], ["trunk.0"], []),  # covered by its module
        ([], [], []),
    ],
)
def test_select(patterns: Any, modules: list[str], params: list[str]) -> None:
    model = _Model()
    found = select(model, patterns, "replicate")
    assert (list(found.modules), list(found.params)) == (modules, params)
    for name, module in found.modules.items():
        assert model.get_submodule(name) is module
    assert len(found.all_parameters()) == 2 * sum(
        isinstance(m, nn.Linear) for root in found.modules.values() for m in root.modules()
    ) + len(params)


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        ("haed_a", ValueError, r"`shard`: 'haed_a' matches no submodule or parameter.*Near it are: 'head_a'"),
        ("zzz", ValueError, r"'zzz' matches no submodule or parameter of the model\.$"),
        (nn.Conv2d, ValueError, r"`shard`: Conv2d matches no submodule"),
        (["trunk", 3], TypeError, r"`shard` takes names, globs, module classes or callables, got 3"),
        (int, TypeError, r"`shard` takes module classes, got int"),
    ],
)
def test_what_matches_nothing_is_an_error(patterns: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select(_Model(), patterns, "shard")
