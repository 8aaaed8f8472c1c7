"""Trains a small CNN on real handwritten digits, data-parallel on two processes.

    python examples/digits.py                      # two processes on the CPU
    python examples/digits.py --devices 4
    python examples/digits.py --accelerator gpu --devices 8

The data are scikit-learn's 1 797 scans of 8x8 pixels, which that package ships. Prints what is replicated, the
accuracy on held-out scans, and whether all ranks end with the same weights.
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from shared import Digits, make_trainer, parse, ranks_are_equal
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


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

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        loss = nn.functional.cross_entropy(self(images), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def evaluate(self, batch: tuple[Tensor, Tensor], name: str) -> None:
        images, targets = batch
        self.accuracy(self(images), targets)
        self.log(name, self.accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val_accuracy")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test_accuracy")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PrintPlan(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and hasattr(trainer.strategy, "plan"):
            print("replicated:", trainer.strategy.plan(), flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, epochs=12)
    callbacks = [RichProgressBar(), PrintPlan()]
    trainer = make_trainer(options, callbacks=callbacks, enable_progress_bar=True, log_every_n_steps=10)
    model, data = Classifier(), Digits(options.batch_size)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {result['test_accuracy']:.4f}")
    equal = ranks_are_equal(trainer, model)
    return 0 if equal and result["test_accuracy"] >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
