"""A script in which rank 1 fails in its third step. Not a test itself.

failing.py raise|kill
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        if self.global_rank == 1 and batch_idx == 2:
            if self.how == "raise":
                raise ValueError("batch 2 is no good")
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)


def main() -> None:
    torch.set_num_threads(1)
    trainer = Trainer(
        strategy="replicate",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(sys.argv[1]))


if __name__ == "__main__":
    main()
