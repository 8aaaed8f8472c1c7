"""What replicate() costs and whether it is right on one NVIDIA GPU: ``python cuda_overhead.py --out cuda.json``.

One GPU cannot hold two nccl ranks, so there are three parts. ``nccl, 1 rank``: with one rank no hooks are installed.
``gloo, 2 ranks``: both on the GPU; gradients are compared with a mean made by hand; times contain gloo's way through
the host. ``no communication``: one process that believes to be one of two. Collectives do nothing there, which leaves
the overhead, and nothing may make the host wait for the device. ``--device cpu`` is a dry run of what needs no GPU.
An error or a host wait gives exit status 1; a missed target of time or kernels, or a mere report, does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run import ratios
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from work import WORK

from lightning_replicate import replicate

PARTS = {"nccl, 1 rank": 1, "gloo, 2 ranks": 2, "no communication": 1}
SHAPES = {"tiny": (2, 4), "encoder": (4, 64, 256), "cnn": (4, 3, 24, 24), "idle": (16, 1024)}
PEERS = ("ours", "none", "ddp")
STREAMS = ("one stream", "all on a side stream", "a branch on a side stream")


class Peer:
    """One way to synchronize the model of one work, with a batch that lies on the device."""

    def __init__(self, name: str, work: str, device: str, **options: Any) -> None:
        torch.manual_seed(dist.get_rank())
        self.plain = WORK[work].build()[0].to(device)
        self.module: Any = self.plain
        if name == "ours":
            replicate(self.plain, **options)
        elif name == "ddp":
            self.module = nn.parallel.DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
            if dist.get_backend() == "fake":  # its futures are empty, which DDP's own all-reduce does not take
                self.module.register_comm_hook(None, noop_hook)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=1e-4, foreach=True)
        self.batch = torch.randn(SHAPES[work]).to(device)
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.steps(5)  # the first rounds agree on the layout

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.optimizer.zero_grad()
            self.module(self.batch).sum().backward()
            self.optimizer.step()

    def seconds(self, number: int) -> float:
        """Seconds that a step keeps the host busy; the device may still be at work then."""
        self.wait()
        dist.barrier()
        start = time.perf_counter()
        self.steps(number)
        return (time.perf_counter() - start) / number


def times(work: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds of each peer, turn by turn. All peers are built first, then they take turns in random order."""
    peers = {name: Peer(name, work, options.device) for name in PEERS}
    number = torch.tensor([max(1, int(options.turn / max(peers["ours"].seconds(2), 1e-4)))], device=options.device)
    dist.broadcast(number, 0)
    found: dict[str, dict[str, Any]] = {name: {"host_s": []} for name in PEERS}
    for turn in range(options.turns):
        for name in random.Random(turn).sample(PEERS, len(PEERS)):
            found[name]["host_s"].append(peers[name].seconds(int(number)))
    replicate.state(peers["ours"].plain).remove()  # or the next model would be a group beside this one
    return found


def counts(name: str, work: str, steps: int = 5) -> dict[str, float]:
    """Peak memory of a peer in MiB, what one step puts on the device, and how often the host waits in it."""
    Peer("none", work, "cuda")  # libraries allocate work space when first used, which is nobody's cost
    gc.collect()
    before = torch.cuda.memory_allocated()
    peer = Peer(name, work, "cuda")
    torch.cuda.reset_peak_memory_stats()
    peer.steps(steps)
    peak, seen = torch.cuda.max_memory_allocated() - before, Counter[str]()
    with torch.profiler.profile() as profiled:  # of the host and the device
        peer.steps(steps)
        peer.wait()
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            seen["copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
        elif event.name in ("cudaStreamSynchronize", "cudaEventSynchronize"):
            seen["waits"] += 1
    if name == "ours":
        replicate.state(peer.plain).remove()
    return {"peak MiB": peak / 2**20, **{kind: seen[kind] / steps for kind in ("kernels", "copies", "waits")}}


def on(stream: Any) -> ExitStack:
    """A block on another stream, which waits for the current one before, and is waited for after."""
    stack = ExitStack()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
        stack.callback(lambda: torch.cuda.current_stream().wait_stream(stream))
        stack.enter_context(torch.cuda.stream(stream))
    return stack


def loss(net: nn.ModuleList, batch: Tensor, stream: Any = None) -> Tensor:
    """Gradients arrive in the order side, trunk, stem, rare. Nobody uses the last layer, and only one rank ``rare``."""
    stem, trunk, side, rare, _ = net
    hidden = (rare(batch) if dist.get_rank() == 0 else 0) + trunk(stem(batch).relu())
    with on(stream):
        branch = side(batch)
        if batch.is_cuda:  # tens of milliseconds in backward: whoever does not wait for this stream reads too early
            branch.register_hook(lambda _: torch.cuda._sleep(50_000_000))
    return (hidden + branch).pow(2).mean()


def gradients(net: nn.Module) -> Tensor:
    """A row for each rank: the elements of all gradients, NaN for ``None``. Collective."""
    found = [torch.full_like(param, torch.nan) if param.grad is None else param.grad for param in net.parameters()]
    row = torch.cat([grad.detach().flatten().cpu() for grad in found])
    rows = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather(list(rows), row)
    return rows


def wrong(device: str, streams: str, backwards: int, tolerance: float, **options: Any) -> list[str]:
    """Compares the gradients of two ranks with the mean of what each of them computes alone."""
    torch.manual_seed(dist.get_rank())
    plain, net = (nn.ModuleList(nn.Linear(8, 8) for _ in range(5)).to(device) for _ in range(2))
    state = replicate.state(replicate(net, bucket_cap_mb=2 * 288 / 2**20, **options))  # side and trunk share a bucket
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    whole, branch = (torch.cuda.Stream() if streams == kind else None for kind in STREAMS[1:])
    found = []
    for step in range(5):
        plain.load_state_dict(net.state_dict())
        plain.zero_grad()
        optimizer.zero_grad()
        for number in range(backwards):
            batch = torch.randn(4, 8).to(device)
            loss(plain, batch).backward()
            with on(whole), state.no_sync() if number < backwards - 1 else nullcontext():
                loss(net, batch, branch).backward()
        local, ours = gradients(plain), gradients(net)
        optimizer.step()
        expected = torch.where(local.isnan().all(0), torch.nan, local.nansum(0) / 2)  # None if it is on all ranks
        try:
            torch.testing.assert_close(ours[0], expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
            torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            found.append(f"step {step}: {' '.join(str(error).split())}")
    assert state.last_round and state.last_round.early, "no bucket left early, so this would show nothing about streams"
    state.remove()
    return found


def waits(mode: str, device: str, work: str, **options: Any) -> list[str]:
    """Where two steps of ours synchronize the host with the device; with mode ``"error"`` only the first place."""
    found: list[str] = []
    peer = Peer("ours", work, device, **options)
    set_mode: Any = torch.cuda.set_sync_debug_mode if device == "cuda" else str
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            set_mode(mode)
            peer.steps(2)  # the second one begins with what other ranks said in the first
        except Exception:
            found = traceback.format_exc().splitlines()[-8:]
        set_mode("default")
    replicate.state(peer.plain).remove()
    return found + sorted({f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message)})


def run_part(rank: int, part: str, folder: str, options: argparse.Namespace) -> None:
    """One rank of one part. Rank 0 writes what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    on_gpu, device, bf16 = options.device == "cuda", options.device, {"reduce_dtype": torch.bfloat16}
    timed = ("tiny", "encoder", "cnn") if on_gpu else ("cnn",)
    checks: dict[str, list[str]] = {}
    if part == "no communication":
        real = dist.new_group  # gloo, which carries our small messages, cannot meet anybody in a fake store
        dist.new_group = lambda *args, **given: real(*args, **{**given, "backend": "fake"})  # type: ignore[assignment]
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        for work in timed:
            checks[f"host waits, {work}"] = waits("error", device, work)
        checks["host waits, bf16 on the wire"] = waits("error", device, "cnn", **bf16)
        checks["host waits, buffers every step"] = waits("error", device, "cnn", buffers="step")
        checks["report: host waits with an idle layer"] = waits("warn", device, "idle")
    else:
        kind, store = "nccl" if part.startswith("nccl") and on_gpu else "gloo", f"file://{folder}/store"
        dist.init_process_group(kind, init_method=store, rank=rank, world_size=PARTS[part])
    if part == "gloo, 2 ranks":
        for streams in STREAMS if on_gpu else STREAMS[:1]:
            checks[f"errors, {streams}"] = wrong(device, streams, 1, 1e-4)
            checks[f"errors, no_sync, {streams}"] = wrong(device, streams, 2, 1e-4)
            checks[f"errors, bf16 on the wire, {streams}"] = wrong(device, streams, 1, 3e-2, **bf16)
        checks["report: host waits over gloo"] = waits("warn", device, "cnn")
    works = {work: times(work, options) for work in timed}
    for work, name in [(work, name) for work in timed for name in PEERS if on_gpu]:
        works[work][name].update(counts(name, work))  # comes last, for a profiler may slow down what comes after it
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps({"works": works, "checks": checks}))


def show(part: str, found: dict[str, Any]) -> None:
    """Prints the table of one part, and adds which targets were met and whether a check failed."""
    targets = found["targets"] = {}
    print(f"\n{part}")
    for work, peers in found["works"].items():
        for name, its in peers.items():
            ratio = "{:5.2f} [{:4.2f}, {:4.2f}]".format(*ratios(peers["ours"]["host_s"], its["host_s"]))
            line = f"  {work:8} {name:5} host {1e3 * torch.tensor(its['host_s']).median():8.3f} ms   ours / it {ratio}"
            print(line, *(f"{key} {its[key]:.1f}" for key in its if key != "host_s"), sep="   ")
        targets[f"{work}: host time <= 1.1 x DDP's"] = ratios(peers["ours"]["host_s"], peers["ddp"]["host_s"])[0] <= 1.1
        if "kernels" in peers["ddp"]:
            targets[f"{work}: kernels <= DDP's"] = peers["ours"]["kernels"] <= peers["ddp"]["kernels"]
    print(*(f"  {'met' if met else 'not met'}: {name}" for name, met in targets.items()), sep="\n")
    for name, problems in found["checks"].items():
        print(f"  {name}: {'none' if not problems else 'FOUND'}", *problems, sep="\n      ", flush=True)
    found["failed"] = any(problems for name, problems in found["checks"].items() if not name.startswith("report"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=15, help="turns of each peer (default: 15)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of a turn (default: 0.3)")
    parser.add_argument("--out", default="cuda.json")
    options = parser.parse_args()
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu (dry run)"
    results: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device}
    print(results)
    for part, ranks in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                torch.multiprocessing.spawn(run_part, (part, folder, options), nprocs=ranks)
                results[part] = json.loads(Path(folder, "found.json").read_text())
            except Exception as error:  # the other parts still tell something
                results[part] = {"works": {}, "checks": {"errors": [str(error)]}}
        show(part, results[part])
    Path(options.out).write_text(json.dumps(results, indent=1))
    return int(any(results[part]["failed"] for part in PARTS))


if __name__ == "__main__":
    raise SystemExit(main())
