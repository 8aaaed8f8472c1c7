"""The same under Lightning's Trainer: ``python trainer.py`` compares ours with its ``ddp``, fit by fit in turns.

A fit is a few dozen steps; what is measured is from the start of one batch to the start of the next, without the first
batches. "Nothing agreed" is ours with ranks that never ask each other whether to stop: what that message costs.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from run import on_ranks, ratios
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from work import WORK

PEERS = ("ours", "ours, nothing agreed", "lightning ddp", "lightning ddp tuned")
SHAPES = {"tiny": (2, 4), "encoder": (4, 64, 256), "mlp": (16, 2048)}
_WARM_UP = 8


def fit(peer: str, work: str, rank: int, steps: int) -> float:
    """Trains a fresh model.

    Returns:
        Median seconds from batch to batch.
    """
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, Strategy

    from lightning_replicate import ReplicateStrategy
    from lightning_replicate.strategy.stopping import StopTogether

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            (self.net,) = WORK[work].build()

        def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    class Clock(Callback):
        def __init__(self) -> None:
            self.starts: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.starts.append(time.perf_counter())

    torch.manual_seed(rank)
    batches = torch.randn(steps, *SHAPES[work])
    strategy: Strategy
    without: AbstractContextManager[Any] = nullcontext()
    if peer.startswith("ours"):
        strategy = ReplicateStrategy()
        if "nothing agreed" in peer:
            without = patch.object(StopTogether, "_agree_at_batch_end", lambda self: None)
    else:
        tuned = {"gradient_as_bucket_view": True, "batched_grad_copy": True} if "tuned" in peer else {}
        strategy = DDPStrategy(**tuned)
    clock = Clock()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with without:
        trainer.fit(Model(), DataLoader(TensorDataset(batches), batch_size=None))
    starts = clock.starts[_WARM_UP:]
    return statistics.median(after - before for before, after in pairwise(starts))


def measure(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """All works, all peers in turns."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    # what torchrun would set, so that Lightning starts no processes of its own
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", TORCHELASTIC_RUN_ID="benchmark")
    os.environ.update(WORLD_SIZE=str(options.ranks), LOCAL_WORLD_SIZE=str(options.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # unused: the process group is there
    results: dict[str, Any] = {}
    order = random.Random(0)
    for work in options.work:
        times: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for _ in range(options.turns):
            for peer in order.sample(PEERS, len(PEERS)):
                times[peer].append(fit(peer, work, rank, options.steps))
        results[work] = times
        if rank == 0:
            print(f"\n{work}, Trainer loop:")
            for peer, found in times.items():
                middle, low, high = ratios(times["ours"], found)
                median = 1e3 * statistics.median(found)
                print(f"  {peer:24} {median:8.2f} ms   ours / it {middle:5.2f} [{low:4.2f}, {high:4.2f}]", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("work", nargs="*", default=["encoder"], help=f"of {', '.join(SHAPES)} (default: encoder)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="fits of each peer (default: 8)")
    parser.add_argument("--steps", type=int, default=40, help="batches of a fit (default: 40)")
    parser.add_argument("--out", default="trainer.json")
    options = parser.parse_args()
    on_ranks(options.ranks, measure, options)


if __name__ == "__main__":
    main()
