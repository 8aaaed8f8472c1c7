"""Exposed communication time on a slow link: ``sudo python slow_link.py --mbit 200 1000 3000``.

Two network namespaces on this machine stand for two hosts, joined by a pair of virtual interfaces whose rate a token
bucket limits (``tc ... tbf``). One rank runs in each. Exposed is what a step takes longer than the same step without
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

HOSTS = ("replicate-a", "replicate-b")


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
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    found: dict[str, dict[str, list[float]]] = {}
    for work_name in options.work:
        work = WORK[work_name]
        times: dict[str, list[float]] = {name: [] for name in NAMES}
        order = random.Random(0)
        for _ in range(options.turns):
            for name in order.sample(NAMES, len(NAMES)):
                # one at a time: several replicated models would be groups of one model that take turns
                torch.manual_seed(0)
                (plain,) = work.build()
                optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
                net = ways(name, plain)
                for step in range(7):
                    dist.barrier()
                    start = time.perf_counter()
                    work.step([net], [optimizer], options.rank, step)
                    if step >= 4:  # by then orders are agreed and plans are made
                        times[name].append(time.perf_counter() - start)
                if name.startswith("ours"):
                    replicate.state(plain).remove()
                del net
        found[work_name] = times
    if options.rank == 0:
        Path(options.out).write_text(json.dumps(found))
    dist.destroy_process_group()


@contextmanager
def two_hosts(mbit: int) -> Iterator[None]:
    """Two namespaces with a link of this rate between them."""
    with_tc = f"tbf rate {mbit}mbit burst 256kb latency 50ms"
    commands = [
        *(f"ip netns add {host}" for host in HOSTS),
        f"ip link add veth netns {HOSTS[0]} type veth peer name veth netns {HOSTS[1]}",
    ]
    for number, host in enumerate(HOSTS, 1):
        commands += [
            f"ip -n {host} addr add 10.77.0.{number}/24 dev veth",
            f"ip -n {host} link set veth up",
            f"ip -n {host} link set lo up",
            f"ip netns exec {host} tc qdisc add dev veth root {with_tc}",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 1000, 3000])
    parser.add_argument("--work", nargs="+", default=["long encoder"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="slow_link.json")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    results: dict[str, Any] = {}
    for mbit in options.mbit:
        with two_hosts(mbit), tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/found.json"
            ranks = [
                subprocess.Popen(
                    [
                        *("ip", "netns", "exec", host, sys.executable, __file__, "--rank", str(rank), "--out", out),
                        *("--turns", str(options.turns), "--work", *options.work),
                    ]
                )
                for rank, host in enumerate(HOSTS)
            ]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise SystemExit(f"A rank failed at {mbit} Mbit/s.")
            results[str(mbit)] = json.loads(Path(out).read_text())
        for work, times in results[str(mbit)].items():
            alone = statistics.median(times["none"])
            print(f"\n{mbit} Mbit/s, {work}: {1e3 * alone:.0f} ms of computation")
            exposed = {name: statistics.median(each) - alone for name, each in times.items()}
            for name in NAMES[1:]:
                share = exposed[name] / exposed["ddp"]
                print(f"  {name:12} exposed {1e3 * exposed[name]:7.1f} ms, {share:5.2f} of ddp's", flush=True)
    Path(options.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
