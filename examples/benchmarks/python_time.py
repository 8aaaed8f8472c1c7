"""Where the time of a backward over a thousand tiny tensors goes: ``python python_time.py``.

Each line adds something to the one before: a hook in Python that does nothing, our hook (within ``no_sync``), our whole
round. DDP tuned does all of it in C++. The last lines count Python calls for each tensor, by function: no noise there.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from peers import Peer
from run import on_ranks
from work import WORK

from lightning_replicate import replicate

WAYS = ("no hooks", "a hook that does nothing", "our hooks", "our round", "ddp tuned")


def measure(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Times backward of all ways in turns, then counts calls."""
    synchronized_by = {"our round": "ours", "ddp tuned": "ddp tuned"}
    peers = {way: Peer(synchronized_by.get(way, "none"), WORK["tiny"], rank) for way in WAYS if way != "our hooks"}
    peers["our hooks"] = peers["our round"]  # two replicated models would be groups of one, and take turns
    for param in peers["a hook that does nothing"].plain[0].parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)
    ours = replicate.state(peers["our round"].plain[0])
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for turn in range(options.turns + 5):
        for way in order.sample(WAYS, len(WAYS)):
            peer = peers[way]
            with ours.no_sync() if way == "our hooks" else nullcontext():
                peer.optimizers[0].zero_grad()
                loss = peer.modules[0](torch.randn(2, 4)).sum()
                dist.barrier()
                start = time.perf_counter()
                loss.backward()
                if turn >= 5:
                    times[way].append(time.perf_counter() - start)
    count = len(list(peers["no hooks"].plain[0].parameters()))
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "lightning_replicate" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    peer = peers["our round"]
    peer.optimizers[0].zero_grad()
    loss = peer.modules[0](torch.randn(2, 4)).sum()
    sys.setprofile(note)
    loss.backward()
    sys.setprofile(None)
    if rank == 0:
        before = None
        for way, found in times.items():
            low, middle, high = (1e6 * quartile / count for quartile in statistics.quantiles(found, n=4))
            added = "" if before is None else f"   {middle - before:+6.2f}"
            print(f"{way:26} {middle:6.2f} us a tensor [{low:6.2f}, {high:6.2f}]{added}")
            before = middle if way != "our round" else statistics.median(times["no hooks"]) * 1e6 / count
        print("The last figure of ddp tuned is against no hooks.")
        for name, number in calls.most_common(6):
            print(f"{number / count:7.3f} calls a tensor  {name}")
    return {"seconds": times, "calls": dict(calls), "tensors": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", default="python_time.json")
    on_ranks(2, measure, parser.parse_args())


if __name__ == "__main__":
    main()
