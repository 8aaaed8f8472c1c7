"""How the cost grows: ``python growth.py`` sweeps tensors, elements, ranks and groups, and counts memory.

It also compares a model with an idle branch to the same without it. Uses the turns of ``run.py``. Memory is counted in
processes of their own, since a process's peak never falls again.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.profiler
from peers import Peer
from run import compare, on_ranks, ratios, steps_in
from work import WORK, Work, groups, tensors

PEERS = ["ours", "none", "ddp", "ddp tuned"]
SWEEPS: dict[str, list[int]] = {
    "tensors": [100, 1_000, 10_000],
    "elements": [100_000, 1_000_000, 10_000_000, 100_000_000],
    "ranks": [1, 2, 4],
    "groups": [1, 2, 4, 8, 16],
}


def work_of(sweep: str, value: int) -> Work:
    """The work at one point of a sweep."""
    if sweep == "tensors":
        return tensors(value, 16 * value)
    if sweep == "elements":
        return tensors(20, value)
    return groups(value) if sweep == "groups" else WORK["encoder"]


def point(rank: int, options: argparse.Namespace, sweep: str, value: int) -> dict[str, Any]:
    """One point of a sweep."""
    return compare(f"{value} {sweep}", work_of(sweep, value), PEERS, rank, options)


def idle_branch(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step of ours with an idle branch, and of the same model without that branch, turn by turn.

    Each is made and taken off in its turn: two replicated models at once would be groups of one.
    """
    works = ["idle", "not idle"]
    times: dict[str, list[float]] = {name: [] for name in works}
    order = random.Random(0)
    for _ in range(options.turns):
        for name in order.sample(works, len(works)):
            peer = Peer("ours", WORK[name], rank)
            steps = steps_in(options.turn, peer.seconds(WORK["idle"].warm_up))
            times[name].append(peer.seconds(steps))
            peer.remove()
    return times


def peak(rank: int, options: argparse.Namespace, peer_name: str) -> dict[str, Any]:
    """The most that one rank holds over building and training the MLP, beside its parameters.

    Counted from all allocations and releases of tensors, so activations (small here) and temporaries are in it. What
    the process group allocates itself is only in the process's peak.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        peer = Peer(peer_name, WORK["mlp"], rank)
        peer.seconds(4)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(f"{folder}/trace.json").read_text())
    held = [event["args"]["Total Allocated"] for event in trace["traceEvents"] if event["name"] == "[memory]"]
    found = peer.facts()
    found["peak_bytes"] = max(held) - found["model_bytes"]
    found["peak_rss"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def memory(peer_name: str, options: argparse.Namespace, tries: int = 2) -> dict[str, Any]:
    """The peak of one peer: the lowest of some tries.

    The profiler does not see what the process group's own threads release, now and then the message of the set-up, and
    counts it as held ever after. So a try can only be too high.
    """
    found = [on_ranks(2, partial(peak, peer_name=peer_name), options) for _ in range(tries)]
    return min(found, key=lambda facts: facts["peak_bytes"])


def show(sweep: str, value: int, found: dict[str, Any]) -> None:
    """Prints one point of a sweep."""
    ours = found["ours"]
    line = [f"{value:>11} {sweep:9}"]
    for peer in PEERS[1:]:
        middle, low, high = ratios(ours["seconds"], found[peer]["seconds"])
        line.append(f"ours / {peer} {middle:5.2f} [{low:4.2f}, {high:4.2f}]")
    for peer in ("ours", "ddp tuned"):
        apart = [a - b for a, b in zip(found[peer]["seconds"], found["none"]["seconds"], strict=True)]
        line.append(f"{peer} adds {1e6 * statistics.median(apart) / ours['parameters']:8.2f} us a tensor")
    line.append(f"set-up ours {ours['set_up_s']:.3f} s, ddp {found['ddp']['set_up_s']:.3f} s")
    print("   ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", nargs="*", help=f"of {', '.join(SWEEPS)}, idle, memory (default: all)")
    parser.add_argument("--turns", type=int, default=11, help="turns of each peer (default: 11)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of a turn (default: 0.3)")
    parser.add_argument("--peers", nargs="+", default=PEERS, help="whose memory to count (default: all)")
    parser.add_argument("--most", type=float, default=1e9, help="leave out points above this")
    parser.add_argument("--out", default="growth.json")
    options = parser.parse_args()
    for sweep, values in SWEEPS.items():
        if options.sweep and sweep not in options.sweep:
            continue
        for value in values:
            if value <= options.most:
                ranks = value if sweep == "ranks" else 2
                show(sweep, value, on_ranks(ranks, partial(point, sweep=sweep, value=value), options))
    if not options.sweep or "idle" in options.sweep:
        found = on_ranks(2, idle_branch, options)
        middle, low, high = ratios(found["idle"], found["not idle"])
        print(f"with an idle branch / the same model without it {middle:5.2f} [{low:4.2f}, {high:4.2f}]", flush=True)
    if not options.sweep or "memory" in options.sweep:
        for peer in options.peers:
            found = memory(peer, options)
            share = found["peak_bytes"] / found["model_bytes"]
            rss = found["peak_rss"] / 2**20
            print(
                f"memory of {peer:10} at most {share:4.2f} x parameters beside them; process {rss:6.0f} MiB", flush=True
            )


if __name__ == "__main__":
    main()
