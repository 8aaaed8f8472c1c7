"""Trains a head on a frozen backbone, then unfreezes the backbone: Lightning's own callback, on two processes.

    python examples/finetune.py                    # two processes on the CPU
    python examples/finetune.py --strategy ddp     # ends with different weights on each rank, without a warning

Prints what is replicated before and after the unfreezing.
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from shared import Digits, make_trainer, parse, ranks_are_equal
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

UNFREEZE_AT = 2


class Finetuned(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(self.head(self.backbone(images)), targets)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.accuracy(self.head(self.backbone(images)), targets)
        self.log("test_accuracy", self.accuracy, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=3e-3)


class PrintPlan(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and hasattr(trainer.strategy, "plan"):
            plan = trainer.strategy.plan()
            print(f"epoch {trainer.current_epoch}: {len(plan.parameters)} parameters, {plan.nbytes} bytes", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, epochs=14)
    unfreeze = BackboneFinetuning(UNFREEZE_AT, backbone_initial_lr=1e-3)
    trainer = make_trainer(options, callbacks=[unfreeze, PrintPlan()], limit_val_batches=0)
    model, data = Finetuned(), Digits(options.batch_size)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {result['test_accuracy']:.4f}")
    return 0 if ranks_are_equal(trainer, model) and result["test_accuracy"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
