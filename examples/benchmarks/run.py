"""Step times of replicate() and its peers, side by side: ``python run.py`` runs everything, ``--help`` tells more.

All peers are built first, on the same ranks. Then they take turns: A B C A B C ... Each turn is a few steps, and what
is reported is the median of paired ratios, ours over the peer's in the same turn, with quartiles. What else the machine
does falls on all of them.
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
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import WORK, Work

from lightning_replicate import replicate


class Peer:
    """One way to synchronize the modules of one work."""

    def __init__(self, name: str, work: Work, rank: int) -> None:
        self.name, self.work, self.rank = name, work, rank
        torch.manual_seed(0)
        self.plain = work.build()
        self.modules: list[Any] = [self._synchronize(module) for module in self.plain]
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=1e-4) for module in self.plain]
        self.number = 0

    def _synchronize(self, module: nn.Module) -> Any:
        if self.name == "none":
            return module
        if self.name == "ours":
            return replicate(module)
        if self.name.startswith("ddp"):
            options: dict[str, Any] = {"find_unused_parameters": "unused" in self.name}
            if "tuned" in self.name:
                options.update(gradient_as_bucket_view=True, batched_grad_copy=True)
            return DistributedDataParallel(module, **options)
        if self.name == "torch replicate":
            from torch.distributed._composable.replicate import replicate as composable

            return composable(module)
        from torch.distributed._composable.replicate_with_fsdp import replicate as on_fsdp2
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for child in module.modules():
            if child is not module and any(True for _ in child.parameters(recurse=False)):
                on_fsdp2(child, mesh=mesh)
        return on_fsdp2(module, mesh=mesh)

    def _no_sync(self) -> Any:
        if self.name == "ours":
            return replicate.state(self.plain[0]).no_sync()
        return self.modules[0].no_sync() if hasattr(self.modules[0], "no_sync") else nullcontext()

    def step(self) -> None:
        if self.work.accumulate > 1:
            with ExitStack() as stack:
                stack.enter_context(self._no_sync())
                for _ in range(self.work.accumulate - 1):
                    self.modules[0](torch.randn(4, 2048)).sum().backward()
        self.work.step(self.modules, self.optimizers, self.rank, self.number)
        self.number += 1

    def seconds(self, steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps

    def facts(self) -> dict[str, Any]:
        """What can be counted: it does not depend on the machine."""
        params = [param for module in self.plain for param in module.parameters()]
        found: dict[str, Any] = {"parameters": len(params), "model_bytes": sum(param.nbytes for param in params)}
        if self.name == "ours":
            rounds = [replicate.state(module).last_round for module in self.plain]
            found.update(bytes=sum(r.nbytes for r in rounds if r), collectives=sum(r.collectives for r in rounds if r))
            found["early"] = sum(r.early for r in rounds if r)
        storages = {
            param.grad.untyped_storage().data_ptr(): param.grad.untyped_storage().nbytes()
            for param in params
            if param.grad is not None and type(param.grad) is torch.Tensor
        }
        found["gradient_bytes"] = sum(storages.values())
        return found


def peers_of(work: Work) -> list[str]:
    unused = " unused" if work.unused else ""
    names = ["ours", "none", f"ddp{unused}", f"ddp tuned{unused}"]
    return names if work.unused else [*names, "torch replicate", "torch replicate on FSDP2"]


def measure(rank: int, world: int, store: str, options: argparse.Namespace, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    results: dict[str, Any] = {}
    for name in options.work or WORK:
        work = WORK[name]
        peers: list[Peer] = []
        setup = {}
        for peer_name in peers_of(work):
            if options.peers and peer_name not in options.peers and peer_name != "ours":
                continue
            dist.barrier()
            start = time.perf_counter()
            try:
                peer = Peer(peer_name, work, rank)
                built = time.perf_counter() - start
                first = peer.seconds(1)
            except Exception as error:  # a peer that cannot run this work is left out, and said so
                if rank == 0:
                    print(f"{name}: {peer_name} does not run: {str(error).splitlines()[0]}", flush=True)
                continue
            setup[peer_name] = {"set_up_s": built, "first_step_s": first}
            peers.append(peer)
        for peer in peers:
            peer.seconds(5)
        steps = torch.tensor([max(1, int(options.turn / max(peers[0].seconds(2), 1e-4)))])
        dist.broadcast(steps, 0)
        times: dict[str, list[float]] = {peer.name: [] for peer in peers}
        order = random.Random(0)
        for _ in range(options.turns):
            for peer in order.sample(peers, len(peers)):
                times[peer.name].append(peer.seconds(int(steps)))
        results[name] = {peer.name: {"seconds": times[peer.name], **setup[peer.name], **peer.facts()} for peer in peers}
        if rank == 0:
            show(name, results[name])
        for peer in peers:
            if peer.name == "ours":
                for module in peer.plain:
                    replicate.state(module).remove()  # or the next model would be a group beside this one
        del peers
    if rank == 0:
        Path(out).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def ratios(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of ours over theirs, turn by turn."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return middle, low, high


def show(name: str, found: dict[str, Any]) -> None:
    ours = found["ours"]
    print(f"\n{name}: {ours['parameters']} parameters, {ours['model_bytes'] / 2**20:.1f} MiB;", end=" ")
    print(f"a step of ours sends {ours.get('bytes', 0)} bytes in {ours.get('collectives', 0)} collectives")
    for peer, result in found.items():
        middle, low, high = ratios(ours["seconds"], result["seconds"])
        print(
            f"  {peer:26} {1e3 * statistics.median(result['seconds']):9.2f} ms   ours / it {middle:5.2f}"
            f" [{low:4.2f}, {high:4.2f}]   set-up {result['set_up_s']:5.2f} s   first step"
            f" {1e3 * result['first_step_s']:7.1f} ms   gradients {result['gradient_bytes'] / 2**20:6.1f} MiB",
            flush=True,
        )


def plot(results: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(figsize=(8, 4))
    marks: dict[str, Any] = {}
    for x, (_, found) in enumerate(results.items()):
        for peer, result in found.items():
            if peer in ("ours", "none"):
                continue
            middle, low, high = ratios(found["ours"]["seconds"], result["seconds"])
            kind = peer.removesuffix(" unused")
            color = marks.setdefault(kind, f"C{len(marks)}")
            label = kind if color not in [line.get_color() for line in axes.get_lines()] else None
            axes.errorbar(x, middle, [[middle - low], [high - middle]], fmt="o", color=color, label=label)
    axes.axhline(1.0, color="gray", linewidth=0.5)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel("step time, ours / peer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("work", nargs="*", help=f"of {', '.join(WORK)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15, help="turns of each peer (default: 15)")
    parser.add_argument("--turn", type=float, default=0.5, help="seconds of a turn (default: 0.5)")
    parser.add_argument("--peers", nargs="*", help="only these peers, beside ours")
    parser.add_argument("--out", default="results.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(measure, (options.ranks, store, options, options.out), nprocs=options.ranks)
    results: dict[str, Any] = json.loads(Path(options.out).read_text())
    plot(results, Path(options.out).with_suffix(".png"))
    return results


if __name__ == "__main__":
    main()
