"""Exposed communication time on a slow link: ``sudo python slow_link.py --mbit 200 1000 3000``.

Network namespaces on this machine stand for hosts, joined by a bridge; a token bucket (``tc ... tbf``) limits the rate
at which each of them sends. One rank runs in each. Exposed is what a step takes longer than the same step without
synchronization. Needs Linux, root, and the commands ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import WORK

from lightning_replicate import replicate

SWITCH = "replicate-switch"


def ways(name: str, net: nn.Module) -> nn.Module:
    """One way to synchronize."""
    if name == "none":
        return net
    if name.startswith("ddp"):
        tuned = {"gradient_as_bucket_view": True, "batched_grad_copy": True} if "tuned" in name else {}
        return DistributedDataParallel(net, **tuned)
    options: dict[str, Any] = {}
    if "bf16" in name:
        options["reduce_dtype"] = torch.bfloat16
    if "auto" in name:
        options["bucket_cap_mb"] = "auto"
    if "MiB" in name:
        options["bucket_cap_mb"] = float(name.split()[1])
    return replicate(net, **options)


WARM_UP = 4  # steps; by then orders are agreed
TRIAL = 14  # more steps, after which it is known whether a plan stays
NAMES = ("none", "ddp", "ddp tuned", "ours", "ours 4 MiB", "ours 1 MiB", "ours auto", "ours bf16")


def run_rank(options: argparse.Namespace) -> None:
    """What each rank does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "veth"
    dist.init_process_group(
        "gloo",
        init_method="tcp://10.77.0.1:29533",
        rank=options.rank,
        world_size=options.hosts,
        timeout=timedelta(seconds=300),
    )
    found: dict[str, dict[str, list[float]]] = {}
    names = ["none", "ddp", *(way for way in options.ways if way not in ("none", "ddp"))]
    for work_name in options.work:
        work = WORK[work_name]
        times: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(0)
        for turn in range(options.turns):
            for name in order.sample(names, len(names)):
                # one at a time: several replicated models would be groups of one model that take turns
                torch.manual_seed(0)
                (plain,) = work.build()
                optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
                net = ways(name, plain)
                warm_up = WARM_UP + TRIAL * ("auto" in name)
                for step in range(warm_up + 3):
                    dist.barrier()
                    start = time.perf_counter()
                    work.step([net], [optimizer], options.rank, step)
                    if step >= warm_up:
                        times[name].append(time.perf_counter() - start)
                if name.startswith("ours"):
                    if options.rank == 0 and (turn == 0 or "auto" in name):
                        sizes = [f"{bucket.nbytes / 2**20:.1f}" for bucket in replicate.state(plain).plan().buckets]
                        print(f"{name}: buckets of {', '.join(sizes)} MiB", flush=True)
                    replicate.state(plain).remove()
                del net
        found[work_name] = times
    if options.rank == 0:
        Path(options.out).write_text(json.dumps(found))
    dist.destroy_process_group()


@contextmanager
def hosts_on_a_switch(count: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces whose links to a common bridge send at this rate, in Mbit/s."""
    hosts = [f"replicate-{number}" for number in range(count)]
    commands = [
        *(f"ip netns add {name}" for name in (SWITCH, *hosts)),
        f"ip -n {SWITCH} link add bridge type bridge",
        f"ip -n {SWITCH} link set bridge up",
    ]
    for number, host in enumerate(hosts):
        commands += [
            f"ip link add veth netns {host} type veth peer name port{number} netns {SWITCH}",
            f"ip -n {SWITCH} link set port{number} master bridge",
            f"ip -n {SWITCH} link set port{number} up",
            f"ip -n {host} addr add 10.77.0.{number + 1}/24 dev veth",
            f"ip -n {host} link set veth up",
            f"ip -n {host} link set lo up",
            f"ip netns exec {host} tc qdisc add dev veth root tbf rate {mbit}mbit burst 256kb latency 50ms",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield hosts
    finally:
        for name in (SWITCH, *hosts):
            subprocess.run(["ip", "netns", "del", name], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 1000, 3000])
    parser.add_argument("--work", nargs="+", default=["long encoder"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=list(NAMES), help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="slow_link.json")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    results: dict[str, Any] = {}
    for mbit in options.mbit:
        key = str(mbit) if options.hosts == 2 else f"{mbit}x{options.hosts}"
        with hosts_on_a_switch(options.hosts, mbit) as hosts, tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/found.json"
            passed_on = ["--turns", options.turns, "--hosts", options.hosts, "--work", *options.work, "--ways"]
            command = [sys.executable, __file__, "--out", out, *map(str, passed_on), *options.ways]
            ranks = [
                subprocess.Popen(["ip", "netns", "exec", host, *command, "--rank", str(rank)])
                for rank, host in enumerate(hosts)
            ]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise SystemExit(f"A rank failed at {mbit} Mbit/s.")
            results[key] = json.loads(Path(out).read_text())
        for work, times in results[key].items():
            show(f"{key} Mbit/s, {work}", times)
    Path(options.out).write_text(json.dumps(results, indent=1))


def show(title: str, times: dict[str, list[float]]) -> None:
    """Prints what is exposed, with quartiles over steps."""
    alone = statistics.median(times["none"])
    print(f"\n{title}: {1e3 * alone:.0f} ms of computation")
    ddp = statistics.median(times["ddp"]) - alone
    for name, found in times.items():
        if name != "none":
            low, middle, high = (1e3 * (quartile - alone) for quartile in statistics.quantiles(found, n=4))
            print(
                f"  {name:12} exposed {middle:7.1f} ms [{low:7.1f}, {high:7.1f}], {middle / 1e3 / ddp:5.2f} of ddp's",
                flush=True,
            )


if __name__ == "__main__":
    main()
