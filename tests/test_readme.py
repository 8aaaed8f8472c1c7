"""Every Python snippet of the README runs, on two ranks; its commands are the ones that the gate runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.core.helpers import assert_ranks_equal, mlp
from tests.ranks import Ranks
from tests.strategy.test_mixed import full

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)


def _names(rank: int) -> dict[str, Any]:
    """What the snippets take for granted: a model, a network, batches."""
    from lightning.pytorch import LightningModule

    from tests.strategy.helpers import Batches

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head_a, self.head_b = mlp(4, 4, 4), mlp(4, 2), mlp(4, 2)
            self.ema = mlp(4, 2).requires_grad_(False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.encoder(batch)
            return (self.head_a(x) - self.head_b(x)).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> DataLoader:
            return DataLoader(Batches(rank, 3), batch_size=None)

    net = nn.Linear(4, 2)
    return {
        "Model": Model,
        "model": Model(),
        "net": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "batches": [torch.randn(3, 4), None if rank else torch.randn(3, 4), torch.randn(3, 4)],
    }


def _run(rank: int, snippet: str) -> None:
    import os
    import tempfile
    import warnings

    names = _names(rank)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Trainer's advice on progress bars and loggers
        os.chdir(folder)
        exec(snippet, names)
        os.chdir("/")
    trained = names["trainer"].lightning_module if "trainer" in names else names["net"]
    assert_ranks_equal(full(trained.parameters()))


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet(ranks: Ranks, index: int) -> None:
    ranks(2, _run, SNIPPETS[index])


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 8


def test_the_gate_runs_the_commands() -> None:
    gate = (ROOT / ".ci" / "run").read_text()
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        assert command in gate
