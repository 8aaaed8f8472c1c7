"""Trains a small CNN on real handwritten digits, data-parallel on two processes.

    python examples/digits.py                      # two processes on the CPU
    python examples/digits.py --devices 4
    python examples/digits.py --accelerator gpu --devices 8

The data are scikit-learn's 1 797 scans of 8x8 pixels, which that package ships. Prints what is replicated, the
accuracy on held-out scans, and whether all ranks end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, RichProgressBar
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Digits(LightningDataModule):
    """1 797 scans, split into 1 400 to train on and 397 to test on."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        scans = load_digits()
        images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(scans.target))
        generator = torch.Generator().manual_seed(0)  # the same split on every rank
        self.train, self.held_out = random_split(data, [1400, 397], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=128)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=128)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 2 * 2, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, targets = batch
        loss = nn.functional.cross_entropy(self(images), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def evaluate(self, batch: tuple[Tensor, Tensor], name: str) -> None:
        images, targets = batch
        self.accuracy(self(images), targets)
        self.log(name, self.accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.evaluate(batch, "val_accuracy")

    def test_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.evaluate(batch, "test_accuracy")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps),
                "interval": "step",
            },
        }


class PrintPlan(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            print("replicated:", trainer.strategy.plan(), flush=True)


def fingerprint(module: nn.Module) -> str:
    """A hash of all parameters and buffers, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="for each process (default: 32)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="replicate", help="'ddp' to compare (default: replicate)")
    options = parser.parse_args(arguments)

    if options.accelerator == "cpu":
        torch.set_num_threads(1)  # one core for each process
    seed_everything(7, verbose=False)
    trainer = Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.epochs,
        callbacks=[RichProgressBar(), *([PrintPlan()] if options.strategy == "replicate" else [])],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    model, data = Classifier(), Digits(options.batch_size)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)

    everybody: list = [None] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(everybody, fingerprint(model))
    else:
        everybody = [fingerprint(model)]
    equal = len(set(everybody)) == 1
    if trainer.is_global_zero:
        print(f"test accuracy: {result['test_accuracy']:.4f}")
        print(f"ranks' weights: {', '.join(everybody)} ({'equal' if equal else 'DIFFERENT'})")
    return 0 if equal and result["test_accuracy"] >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
