"""A script that the restart tests start with torchrun. Not a test itself.

    elastic.py FOLDER STRATEGY EPOCHS KILLS [TIMEOUT]

The last rank kills itself in the middle of a backward in each of the first KILLS attempts that come to training, in the
last step of the second epoch that the attempt trains. Checkpoints are written at the end of epochs, since Lightning
begins an epoch with its first batch again. Every rank notes in FOLDER the step from which an attempt trains, and at the
end a hash of its weights. TIMEOUT (seconds) bounds collectives and the start of an attempt.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_replicate import ReplicateStrategy

EPOCH = 2  # steps


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        world_size = int(os.environ["WORLD_SIZE"])
        batches = TensorDataset(torch.randn(2 * EPOCH * world_size, 4, generator=generator))
        return DataLoader(batches, batch_size=2, shuffle=True)  # by a sampler that goes by the epoch


class KillInBackward(Callback):
    """Ends the last rank in the middle of a backward, once for each of the first attempts."""

    def __init__(self, folder: Path, kills: int) -> None:
        self.folder = folder
        self.kills = kills

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        path = self.folder / f"attempts{trainer.global_rank}.txt"
        with path.open("a") as file:
            file.write(f"{trainer.global_step}\n")
        attempt = len(path.read_text().splitlines())
        if attempt > self.kills or trainer.global_rank != trainer.world_size - 1:
            return
        arrived = 0

        def kill(_: Tensor) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 2 * EPOCH:
                os.kill(os.getpid(), signal.SIGKILL)

        module.layers[0].weight.register_hook(kill)  # the other layer's gradients have arrived by then

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        weights = torch.cat([param.detach().reshape(-1) for param in module.parameters()])
        found = {"steps": trainer.global_step, "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def main() -> None:
    folder, name, epochs, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    timeout = timedelta(seconds=float(sys.argv[5]) if len(sys.argv) > 5 else 60)
    torch.set_num_threads(1)
    options: dict[str, Any] = {"timeout": timeout, "process_group_backend": "gloo"}
    strategy: Strategy = ReplicateStrategy(**options) if name == "replicate" else DDPStrategy(**options)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            KillInBackward(folder, kills),
            ModelCheckpoint(folder / "checkpoints", save_last=True, save_on_train_epoch_end=True),
        ],
    )
    trainer.fit(Net(), ckpt_path="last")


if __name__ == "__main__":
    main()
