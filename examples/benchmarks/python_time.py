"""Where the time of a step over a thousand tiny tensors goes: ``python python_time.py``.

Each line adds something to the one before: a hook in Python that does nothing, our hook (within ``no_sync``), our
whole round. DDP tuned does all of it in C++. The last lines count calls and instructions of Python for each tensor, by
function: there is no noise in them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import Peer
from run import on_ranks
from work import WORK

from lightning_replicate import replicate

WAYS = ("no hooks", "a hook that does nothing", "our hooks", "our round", "ddp tuned")


def count_python(peer: Peer) -> tuple[Counter[str], Counter[str]]:
    """Calls, and instructions of Python's byte code, that the package runs in one step, by function."""
    calls: Counter[str] = Counter()
    instructions: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if "lightning_replicate" not in code.co_filename:
            return None
        name = f"{Path(code.co_filename).stem}.{getattr(code, 'co_qualname', code.co_name)}"  # 3.10 has the name only
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls[name] += event == "call"
        instructions[name] += event == "opcode"
        return note

    sys.settrace(note)
    try:
        peer.step()
    finally:
        sys.settrace(None)
    return calls, instructions


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
    calls, instructions = count_python(peers["our round"])
    if rank == 0:
        before = None
        for way, found in times.items():
            low, middle, high = (1e6 * quartile / count for quartile in statistics.quantiles(found, n=4))
            added = "" if before is None else f"   {middle - before:+6.2f}"
            print(f"{way:26} {middle:6.2f} us a tensor [{low:6.2f}, {high:6.2f}]{added}")
            before = middle if way != "our round" else statistics.median(times["no hooks"]) * 1e6 / count
        print("The last figure of ddp tuned is against no hooks.")
        total = sum(instructions.values())
        print(f"a step runs {sum(calls.values()) / count:.2f} calls and {total / count:.1f} instructions a tensor, in")
        for name, number in instructions.most_common(6):
            print(f"{number / count:7.1f} instructions, {calls[name] / count:6.3f} calls  {name}")
    return {"seconds": times, "calls": calls, "instructions": instructions, "tensors": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", default="python_time.json")
    on_ranks(2, measure, parser.parse_args())


if __name__ == "__main__":
    main()
