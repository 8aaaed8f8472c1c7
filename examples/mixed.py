"""A small transformer with sharded layers and a replicated rest, on real text; saved, and continued in one process.

The text is what scikit-learn tells about its data sets. Each process holds half of every layer's weights, gradients and
optimizer state, and all of the embedding and the head. The checkpoint is an ordinary file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from shared import make_trainer, parse, ranks_are_equal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replicate import ReplicateStrategy

LENGTH = 64


def read_text() -> str:
    """scikit-learn's descriptions of its data sets, about 50 000 characters."""
    folder = resources.files("sklearn.datasets") / "descr"
    parts = sorted((part for part in folder.iterdir() if part.name.endswith(".rst")), key=lambda part: part.name)
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


class Text(LightningDataModule):
    """Batches are int64 ``[batch, LENGTH + 1]``: characters, as their places in the alphabet."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        text = read_text()
        alphabet = {letter: number for number, letter in enumerate(sorted(set(text)))}
        numbers = torch.tensor([alphabet[letter] for letter in text])
        windows = numbers.unfold(0, LENGTH + 1, 16)
        border = int(0.9 * len(windows))
        self.train = TensorDataset(windows[:border])
        self.held_out = TensorDataset(windows[border + LENGTH // 16 + 1 :])  # no character is in both

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.batch_size, drop_last=True)


class Transformer(LightningModule):
    """Predicts the next character."""

    def __init__(self, letters: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(letters, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, letters)

    def forward(self, letters: Tensor) -> Tensor:
        hidden = self.embedding(letters) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (letters,) = batch
        return nn.functional.cross_entropy(self(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def continue_alone(path: str, options: Any) -> None:
    """One process reads the checkpoint and trains one more epoch."""
    options.devices, options.strategy, options.epochs = 1, "auto", options.epochs + 1
    trainer = make_trainer(options)
    data = Text(options.batch_size)
    model = Transformer.load_from_checkpoint(path, weights_only=True)
    (before,) = trainer.test(model, datamodule=data, verbose=False)
    trainer.fit(model, datamodule=data, ckpt_path=path, weights_only=True)
    (after,) = trainer.test(model, datamodule=data, verbose=False)
    print(f"in one process: test loss {before['test_loss']:.3f}, an epoch later {after['test_loss']:.3f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(__doc__, arguments, epochs=3)
    if os.environ.get("CONTINUE_FROM"):
        continue_alone(os.environ["CONTINUE_FROM"], options)
        return
    if options.strategy == "replicate":
        options.strategy = ReplicateStrategy(shard="layers.*")
    trainer = make_trainer(options, gradient_clip_val=1.0)
    model = Transformer(letters=len(set(read_text())))
    whole = sum(param.numel() for param in model.parameters())
    data = Text(options.batch_size)
    trainer.fit(model, datamodule=data)
    here = sum((param.to_local() if hasattr(param, "to_local") else param).numel() for param in model.parameters())
    (result,) = trainer.test(model, datamodule=data, verbose=False)
    equal = ranks_are_equal(trainer, model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trainer.strategy.broadcast(folder)) / "mixed.ckpt"  # rank 0's
        trainer.save_checkpoint(path)
        if not trainer.is_global_zero:
            return
        print(f"{here} of {whole} parameters in each process, test loss {result['test_loss']:.3f}", flush=True)
        if not equal or result["test_loss"] > 2.6:
            raise SystemExit("The ranks differ, or the model did not learn.")
        launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        alone = {name: value for name, value in os.environ.items() if name not in launch}
        subprocess.run([sys.executable, *sys.argv], env={**alone, "CONTINUE_FROM": str(path)}, check=True)


if __name__ == "__main__":
    main()
