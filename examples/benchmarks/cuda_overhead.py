"""What a step costs on one GPU: ``python cuda_overhead.py``. ``--device cpu`` only tries the script out.

1. One rank with nccl: no strategy, DDP and ours. (With one rank ours installs nothing.)
2. Two ranks that share the GPU, over gloo: gradients are compared with a mean by hand, also from a second stream, in
   bfloat16 and under accumulation; then ours takes turns with DDP.
3. Ours with a process group that moves nothing, where any wait of the host for the device is an error.

Host time is measured without waiting for the device within a step. Kernels are counted by the profiler. Exits with an
error if gradients are wrong or the host waits; times and counts are printed next to their targets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run import ratios
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity
from work import WORK

from lightning_replicate import replicate

SHAPES = {"tiny": (2, 4), "encoder": (4, 64, 256), "cnn": (4, 3, 24, 24)}


class Case:
    """One model, one way to synchronize it, and a batch that is on the device already."""

    def __init__(self, way: str, work: str, device: str, rank: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        (module,) = WORK[work].build()
        self.plain = module.to(device)
        self.net: nn.Module = self.plain
        if way == "ddp":
            self.net = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        elif way == "ours":
            replicate(self.plain, **options)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=1e-4, foreach=True)
        torch.manual_seed(rank + 1)
        self.batch = torch.randn(*SHAPES[work], device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.batch).sum().backward()
        self.optimizer.step()


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_seconds(case: Case, device: str, steps: int) -> float:
    """Seconds of host time a step, as long as the device's queue does not fill."""
    wait_for(device)
    start = time.perf_counter()
    for _ in range(steps):
        case.step()
    seconds = (time.perf_counter() - start) / steps
    wait_for(device)
    return seconds


def count_on_device(case: Case, device: str) -> dict[str, int]:
    """Kernels, copies and peak memory of one step."""
    if device != "cuda":
        return {"kernels": 0, "copies": 0, "peak_bytes": 0}
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        case.step()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return {"kernels": len(names) - copies, "copies": copies, "peak_bytes": torch.cuda.max_memory_allocated()}


def take_turns(title: str, ways: list[str], options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Compares ways to synchronize over all works. Collective."""
    device, found = options.device, {}
    order = random.Random(0)
    for work in SHAPES:
        cases = {way: Case(way, work, device, rank) for way in ways}
        for case in cases.values():
            host_seconds(case, device, 6)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.turns):
            for way in order.sample(ways, len(ways)):
                times[way].append(host_seconds(cases[way], device, options.steps))
        counts = {way: count_on_device(case, device) for way, case in cases.items()}
        found[work] = {way: {"seconds": times[way], **counts[way]} for way in ways}
        if rank == 0:
            print(f"\n{title}, {work}")
        for way in ways:
            middle, low, high = ratios(times["ours"], times[way])
            host = 1e6 * statistics.median(times[way])
            if rank == 0:
                print(f"  {way:5} host {host:8.0f} us   ours / it {middle:5.2f} [{low:4.2f}, {high:4.2f}]", counts[way])
        if rank == 0:
            less = counts["ours"]["kernels"] <= counts["ddp"]["kernels"]
            fast = ratios(times["ours"], times["ddp"])[0] <= 1.1
            print(f"  launches at most DDP's: {less}; host time at most 1.1 of DDP's: {fast}")
        replicate.state(cases["ours"].plain).remove()
    return found


def check_gradients(rank: int, device: str, **options: Any) -> None:
    """Compares averaged gradients with a mean by hand, on the same and on a second stream, and under accumulation."""
    for second_stream in (False, True):
        case, alone = Case("ours", "encoder", device, rank, **options), Case("none", "encoder", device, rank)
        state = replicate.state(case.plain)
        for step in range(5):
            case.optimizer.zero_grad()
            alone.optimizer.zero_grad()
            batch = case.batch * (1 + step)
            alone.plain(batch).square().mean().backward()
            side = torch.cuda.Stream() if second_stream and device == "cuda" else None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side) if side is not None else nullcontext():
                half = 0.5 * case.plain(batch).square().mean()
                with state.no_sync():
                    half.backward(retain_graph=True)
                half.backward()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            for mine, local in zip(case.plain.parameters(), alone.plain.parameters(), strict=True):
                assert mine.grad is not None and local.grad is not None
                on_host = local.grad.cpu()
                parts = [torch.empty_like(on_host) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, on_host)
                loose = {"rtol": 2e-2, "atol": 1e-3} if options else {"rtol": 1e-4, "atol": 1e-6}
                torch.testing.assert_close(mine.grad.cpu(), sum(parts[1:], parts[0]) / len(parts), **loose)
                dist.all_gather(parts, mine.grad.cpu())
                assert all(torch.equal(part, parts[0]) for part in parts), "ranks differ"
            case.optimizer.step()
            alone.plain.load_state_dict(case.plain.state_dict())
        state.remove()


def two_ranks(rank: int, folder: str, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    check_gradients(rank, options.device)
    check_gradients(rank, options.device, reduce_dtype=torch.bfloat16)
    if rank == 0:
        print("\ntwo ranks: gradients are the mean by hand, and equal on both ranks")
    found = take_turns("two ranks, gloo", ["ours", "ddp"], options, rank)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def without_waiting(options: argparse.Namespace) -> None:
    """Runs normal steps while a wait of the host for the device is an error.

    The process group moves nothing, since nccl refuses two ranks on one device and gloo waits by itself. Sums then are
    this rank's own numbers, which is enough here.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    new_group: Callable[..., Any] = dist.new_group
    with patch.object(dist, "new_group", lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})):
        for work in SHAPES:
            case = Case("ours", work, options.device)
            for _ in range(5):  # the first rounds agree on the layout
                case.step()
            if options.device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    case.step()
            finally:
                if options.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            replicate.state(case.plain).remove()
    dist.destroy_process_group()
    print("\nno wait of the host for the device in a normal step" if options.device == "cuda" else "\ndry run only")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=15, help="turns of each way (default: 15)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (default: 10)")
    parser.add_argument("--out", default="cuda.json")
    options = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": options.device}
    if options.device == "cuda":
        results["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "alone"), 1)
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        results["one rank"] = take_turns(f"one rank, {backend}", ["none", "ddp", "ours"], options, 0)
        dist.destroy_process_group()
        mp.spawn(two_ranks, (folder, options), nprocs=2)
        results["two ranks"] = json.loads(Path(folder, "found.json").read_text())
    without_waiting(options)
    Path(options.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
