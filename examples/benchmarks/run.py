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
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peers import Peer, peers_of
from work import WORK, Work


def turns(peers: list[Peer], count: int, seconds: float) -> dict[str, list[float]]:
    """Lets peers take turns in random order.

    Args:
        peers: Who takes turns.
        count: Turns of each.
        seconds: About how long a turn is.

    Returns:
        Seconds a step, turn by turn, of each peer.
    """
    for peer in peers:
        peer.seconds(peer.work.warm_up)
    steps = steps_in(seconds, peers[0].seconds(2))
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    order = random.Random(0)
    for _ in range(count):
        for peer in order.sample(peers, len(peers)):
            times[peer.name].append(peer.seconds(steps))
    return times


def steps_in(seconds: float, of_one: float) -> int:
    """How many steps take about so many seconds, by rank 0's measure of one. Collective."""
    steps = torch.tensor([max(1, int(seconds / max(of_one, 1e-4)))])
    dist.broadcast(steps, 0)
    return int(steps)


def compare(name: str, work: Work, names: list[str], rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures some peers over one work. Collective."""
    peers: list[Peer] = []
    setup = {}
    for peer_name in names:
        try:
            peer = Peer(peer_name, work, rank)
            first = peer.seconds(1)
        except Exception as error:  # a peer that cannot run this work is left out, and said so
            if rank == 0:
                print(f"{name}: {peer_name} does not run: {str(error).splitlines()[0]}", flush=True)
            continue
        setup[peer_name] = {"set_up_s": peer.set_up_s, "first_step_s": first}
        peers.append(peer)
    times = turns(peers, options.turns, options.turn)
    found = {peer.name: {"seconds": times[peer.name], **setup[peer.name], **peer.facts()} for peer in peers}
    for peer in peers:
        peer.remove()
    return found


def on_rank(rank: int, world: int, store: str, job: Callable[[int, argparse.Namespace], Any], options: Any) -> None:
    """Runs a job on one rank of a group, with one thread."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    results = job(rank, options)
    if rank == 0:
        Path(options.out).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def on_ranks(world: int, job: Callable[[int, argparse.Namespace], Any], options: argparse.Namespace) -> Any:
    """Runs a job on some ranks and returns what rank 0 found, which is written to ``options.out``, too."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (world, os.path.join(folder, "store"), job, options), nprocs=world)
    return json.loads(Path(options.out).read_text())


def measure(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """All works, one after the other."""
    results: dict[str, Any] = {}
    for name in options.work or WORK:
        names = [peer for peer in peers_of(WORK[name]) if not options.peers or peer in ("ours", *options.peers)]
        results[name] = compare(name, WORK[name], names, rank, options)
        if rank == 0:
            show(name, results[name])
    return results


def ratios(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of ours over theirs, turn by turn."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return middle, low, high


def show(name: str, found: dict[str, Any]) -> None:
    ours = found["ours"]
    print(f"\n{name}: {ours['parameters']} parameters, {ours['model_bytes'] / 2**20:.1f} MiB;", end=" ")
    print(f"the last round of ours sent {ours.get('bytes', 0)} bytes in {ours.get('collectives', 0)} collectives")
    for peer, result in found.items():
        middle, low, high = ratios(ours["seconds"], result["seconds"])
        exposed = ""
        if "none" in found and peer != "none":  # what a step takes longer than without synchronization
            apart = [a - b for a, b in zip(result["seconds"], found["none"]["seconds"], strict=True)]
            exposed = f"exposed {1e3 * statistics.median(apart):7.2f} ms"
        print(
            f"  {peer:24} {1e3 * statistics.median(result['seconds']):8.2f} ms   ours / it {middle:5.2f}"
            f" [{low:4.2f}, {high:4.2f}]   {exposed:18}   set-up {result['set_up_s']:5.2f} s   first step"
            f" {1e3 * result['first_step_s']:7.1f} ms   gradients {result['gradient_bytes'] / 2**20:6.1f} MiB",
            flush=True,
        )


def plot(results: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(figsize=(10, 4))
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
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
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
    results: dict[str, Any] = on_ranks(options.ranks, measure, options)
    plot(results, Path(options.out).with_suffix(".png"))
    return results


if __name__ == "__main__":
    main()
