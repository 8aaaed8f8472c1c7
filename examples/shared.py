"""What the examples share: the data, the options of the command line, and the check that ranks end equal."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Digits(LightningDataModule):
    """scikit-learn's 1 797 handwritten digits of 8x8 pixels: 1 400 to train on, 397 to test on.

    Batches are ``(images, targets)``: float ``[batch, 1, 8, 8]`` in [0, 1], and int64 ``[batch]``.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        scans = load_digits()
        images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(scans.target))
        generator = torch.Generator().manual_seed(0)  # the same split on every rank
        self.train, self.held_out = random_split(data, [1400, 397], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=128)

    test_dataloader = val_dataloader


class DenseClassifier(LightningModule):
    """A small dense network on :class:`Digits`; subclasses say what a step does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(self.net(images), targets)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.accuracy(self.net(images), targets)
        self.log("test_accuracy", self.accuracy, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def parse(description: str | None, arguments: list[str] | None = None, epochs: int = 10) -> argparse.Namespace:
    """Reads the command line: the options that all examples have."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=epochs, help=f"default: {epochs}")
    parser.add_argument("--batch-size", type=int, default=32, help="for each process (default: 32)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="replicate", help="'ddp' to compare (default: replicate)")
    return parser.parse_args(arguments)


def make_trainer(options: argparse.Namespace, **more: Any) -> Trainer:
    """A Trainer with the options of the command line, and nothing written to disk."""
    if options.accelerator == "cpu":
        torch.set_num_threads(1)  # one core for each process
    seed_everything(7, verbose=False)
    return Trainer(
        **{
            "strategy": options.strategy,
            "accelerator": options.accelerator,
            "devices": options.devices,
            "num_nodes": options.num_nodes,
            "max_epochs": options.epochs,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            **more,
        }
    )


def gather(trainer: Trainer, thing: Any) -> list[Any]:
    """What each rank has, on every rank."""
    everybody = [thing] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(everybody, thing)
    return everybody


def ranks_are_equal(trainer: Trainer, module: LightningModule) -> bool:
    """Compares all parameters and buffers of all ranks bit by bit, and prints a hash for each rank."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # sharded ones are put together
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    everybody = gather(trainer, digest.hexdigest()[:16])
    equal = len(set(everybody)) == 1
    if trainer.is_global_zero:
        print(f"ranks' weights: {', '.join(everybody)} ({'equal' if equal else 'DIFFERENT'})", flush=True)
    return equal
