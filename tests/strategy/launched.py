"""A script that the launch tests start in every way that Lightning knows. Not a test itself.

    launched.py FOLDER STRATEGY DEVICES NUM_NODES

Each rank leaves a file with its numbers and a hash of its weights in FOLDER, and one with the names of the threads that
it has at its end, where the system tells them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # every rank starts elsewhere
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)


class Report(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        weights = torch.cat([param.detach().reshape(-1) for param in module.parameters()])
        found = {
            "rank": trainer.global_rank,
            "local_rank": trainer.local_rank,
            "node_rank": trainer.node_rank,
            "world_size": dist.get_world_size(),
            "steps": trainer.global_step,
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        }
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def _report_threads(folder: Path) -> None:
    tasks = Path("/proc/self/task")
    if tasks.exists():
        names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
        (folder / f"threads{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(names))


def main() -> None:
    folder, strategy, devices, num_nodes = sys.argv[1:]
    torch.set_num_threads(1)
    atexit.register(_report_threads, Path(folder))  # runs after what fit registers
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        num_nodes=int(num_nodes),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(folder)],
    )
    trainer.fit(Net())


if __name__ == "__main__":
    main()
