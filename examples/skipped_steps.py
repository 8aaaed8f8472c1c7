"""Skips bad batches on the rank that has them: `training_step` returns None there, and nowhere else.

    python examples/skipped_steps.py               # two processes on the CPU
    python examples/skipped_steps.py --strategy ddp    # stock DDP ends with an error

A tenth of the scans is damaged on purpose (NaN pixels). A rank whose batch holds one skips it; the step's average is
over the ranks that have a good one. Prints how many batches each rank skipped.
"""

from __future__ import annotations

import sys

from shared import DenseClassifier, Digits, gather, make_trainer, parse, ranks_are_equal
from torch import Tensor


class DamagedDigits(Digits):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        images = self.train.dataset.tensors[0]
        for index in self.train.indices[::50]:
            images[index, 0, 0, 0] = float("nan")


class Classifier(DenseClassifier):
    skipped = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if batch[0].isnan().any():
            self.skipped += 1
            return None
        return self.loss(batch)


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, epochs=15)
    trainer = make_trainer(options, limit_val_batches=0)
    model, data = Classifier(), DamagedDigits(options.batch_size)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    skipped = gather(trainer, model.skipped)
    if trainer.is_global_zero:
        print(f"batches skipped by each rank: {skipped}")
        print(f"test accuracy: {result['test_accuracy']:.4f}")
    return 0 if ranks_are_equal(trainer, model) and result["test_accuracy"] >= 0.93 else 1


if __name__ == "__main__":
    sys.exit(main())
