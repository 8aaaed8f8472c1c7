"""Trains on streams of unequal length, as sharded files give them: no rank knows how many batches it will have.

    python examples/uneven_stream.py               # two processes on the CPU
    python examples/uneven_stream.py --strategy ddp    # what stock DDP makes of it

Rank 0 gets a third of the digits, rank 1 the rest. First with `uneven_inputs="stop"`: all ranks end the epoch when the
first has no more, and say what was left unused. Then with `"join"`: the rank that has no more takes part with nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from shared import DenseClassifier, Digits, gather, make_trainer, parse, ranks_are_equal
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_replicate import ReplicateStrategy


class Shard(IterableDataset):
    """The batches of one rank. It has no length."""

    def __init__(self, data: Any, first: int, last: int, batch_size: int) -> None:
        self.data, self.first, self.last, self.batch_size = data, first, last, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(self.first, self.last - self.batch_size + 1, self.batch_size):
            samples = [self.data[index] for index in range(start, start + self.batch_size)]
            yield torch.stack([image for image, _ in samples]), torch.stack([target for _, target in samples])


class Streams(Digits):
    def train_dataloader(self) -> DataLoader:
        rank, cut = self.trainer.global_rank, len(self.train) // 3
        first, last = (0, cut) if rank == 0 else (cut, len(self.train))
        return DataLoader(Shard(self.train, first, last, self.batch_size), batch_size=None)


class Classifier(DenseClassifier):
    batches = 0

    def on_train_epoch_start(self) -> None:
        self.batches = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return self.loss(batch)


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, epochs=8)
    fine = True
    for mode in ("stop", "join") if options.strategy == "replicate" else ("stop",):
        if options.strategy == "replicate":
            trainer = make_trainer(options, strategy=ReplicateStrategy(uneven_inputs=mode), limit_val_batches=0)
        else:
            trainer = make_trainer(options, limit_val_batches=0)
        model, data = Classifier(), Streams(options.batch_size)
        trainer.fit(model, data)
        (result,) = trainer.test(model, data, verbose=False)
        batches = gather(trainer, model.batches)
        if trainer.is_global_zero:
            print(f"{mode}: batches of each rank in an epoch {batches}, test accuracy {result['test_accuracy']:.4f}")
        fine = ranks_are_equal(trainer, model) and result["test_accuracy"] >= 0.9 and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
