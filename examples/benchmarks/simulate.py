"""Scale on paper: step time on up to thousands of ranks, from one rank's profile and a model of the messages.

``python simulate.py profile --work encoder`` measures when gradients arrive in backward, ``predict profile.json``
predicts, and ``validate profile.json slow_link.json`` compares with what slow_link.py measured.

An all-reduce of n bytes over p ranks, with a latency of alpha seconds and beta seconds per byte on each link, takes

- in a ring: 2(p-1) alpha + 2(p-1)/p n beta (Patarasu and Yuan 2009; Thakur, Rabenseifner and Gropp 2005);
- in a double binary tree: 2 ceil(log2 p) alpha + 2 n beta, where n is sent in many small pieces (Sanders, Speck and
  Traeff 2009; NCCL has such trees).

Messages go one after the other. Each starts when all its gradients are there and the message before it is done, as in
merged-gradient wait-free backpropagation (Shi et al., arXiv 1811.11141). A step takes forward, then backward or the
last message, whichever ends later, then the optimizer.

Left out: the time that moving bytes takes from computation, copies into and out of buckets, our flags (less than one
per cent of the bytes), slow ranks, several ranks at one network card, and traffic of others. Gloo has two messages
under way where the model has one: they share the link, so the last one ends at about the same time. DDP's plan and our
default are the same here, and so are their predictions.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from work import WORK

from lightning_replicate.core.api import Options
from lightning_replicate.core.layout import assign_buckets
from lightning_replicate.core.planning import MessageCost, cut

ALGORITHMS = ("ring", "tree")
WAYS = ("ddp", "ours", "ours auto", "ours bf16")
# With other works DDP looks for unused parameters, and then does not plan by arrival; or there is more than one plan.
PROFILED = tuple(name for name, work in WORK.items() if work.accumulate == 1 and not work.unused)

_MIB = 2**20
_DDP_CAPS = (_MIB, 25 * _MIB)  # torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES, and bucket_cap_mb's default
# A frame of 1500 bytes carries 1448 bytes of data: IP and TCP take 20 each, timestamps 12. The Ethernet header takes 14
# more, and on a cable preamble, checksum and gap take 24 more. tbf counts the header, once for each frame to be.
_COUNTED_BY_TBF = (1500 + 14) / 1448
_ON_A_CABLE = (1500 + 14 + 24) / 1448


@dataclass(frozen=True)
class Link:
    """What joins a rank to the next one: ``alpha`` seconds for each message, ``beta`` seconds for each byte."""

    alpha: float
    beta: float

    @classmethod
    def of_rate(cls, alpha: float, mbit: float, overhead: float) -> Link:
        """A link of a nominal rate in Mbit/s, where each byte of data takes ``overhead`` bytes on the link."""
        return cls(alpha, 8 * overhead / (mbit * 1e6))


# Latencies are assumptions, not measurements; so is that a link gives all of its nominal rate, less headers.
LINKS = {
    # One InfiniBand NDR port (400 Gbit/s are 50 GB/s) for each rank, of which nine tenths are assumed to be usable.
    # NCCL's tuning table (src/graph/tuning.cc) has 2.7 to 14 us for a step over a network, by protocol.
    "nccl": Link(5e-6, 1 / 45e9),
    # TCP: assumed are 20 to 30 us in a good data centre, and 50 to 100 us through slower cards and switches.
    "tcp-100g": Link.of_rate(20e-6, 100_000, _ON_A_CABLE),
    "tcp-25g": Link.of_rate(30e-6, 25_000, _ON_A_CABLE),
    "tcp-10g": Link.of_rate(50e-6, 10_000, _ON_A_CABLE),
    "tcp-1g": Link.of_rate(100e-6, 1_000, _ON_A_CABLE),
}


@dataclass(frozen=True)
class Profile:
    """One step of one rank alone. All times in seconds.

    Attributes:
        work: Name of the work.
        forward: From the start of the step to the end of the forward pass.
        backward: Duration of backward.
        optimizer: Duration of the optimizer's step.
        arrivals: When each gradient is there, after the start of backward; rising.
        nbytes: Size of each gradient in bytes, in the same order. They are of one data type, float32.
    """

    work: str
    forward: float
    backward: float
    optimizer: float
    arrivals: tuple[float, ...]
    nbytes: tuple[int, ...]

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer

    def scaled(self, step: float) -> Profile:
        """The same profile on a slower or faster machine, where the step takes ``step`` seconds."""
        factor = step / self.step
        times = {name: factor * getattr(self, name) for name in ("forward", "backward", "optimizer")}
        return replace(self, **times, arrivals=tuple(factor * each for each in self.arrivals))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads what ``simulate.py profile`` wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        found.update(arrivals=tuple(found["arrivals"]), nbytes=tuple(found["nbytes"]))
        return cls(**found)


@dataclass(frozen=True)
class Prediction:
    """Step time, and how much of it is waiting for messages, in seconds; and the number of messages."""

    step: float
    exposed: float
    messages: int


def message_cost(ranks: int, link: Link, algorithm: str) -> MessageCost:
    """What an all-reduce costs on this many ranks: a latency, and seconds for each byte of the message."""
    if ranks == 1:
        return MessageCost(0.0, 0.0)
    if algorithm == "ring":
        return MessageCost(2 * (ranks - 1) * link.alpha, 2 * (ranks - 1) / ranks * link.beta)
    assert algorithm == "tree"
    return MessageCost(2 * math.ceil(math.log2(ranks)) * link.alpha, 2 * link.beta)


def all_reduce_seconds(nbytes: int, ranks: int, link: Link, algorithm: str) -> float:
    """Seconds for one all-reduce of ``nbytes`` bytes."""
    return message_cost(ranks, link, algorithm).of(nbytes)


def sent_by(way: str, profile: Profile) -> Sequence[int]:
    """Bytes on the link for each gradient."""
    return [size // 2 for size in profile.nbytes] if "bf16" in way else profile.nbytes


def plan_of(way: str, profile: Profile, cost: MessageCost) -> list[list[int]]:
    """Which gradients travel together, in the order of the messages. ``way`` is a name as in slow_link.py."""
    parts = re.fullmatch(r"(?:ddp(?: tuned)?|ours( auto| (?P<mib>[\d.]+) MiB)?( bf16)?)", way)
    if parts is None:
        raise ValueError(f"No plan is known for {way!r}.")
    if "auto" in way:
        counts = cut(profile.arrivals, sent_by(way, profile), cost)
        return [list(range(end - count, end)) for end, count in zip(accumulate(counts), counts, strict=True)]
    ours = Options(bucket_cap_mb=float(parts["mib"])) if parts["mib"] else Options()
    caps = ours.bucket_caps if way.startswith("ours") else _DDP_CAPS
    return assign_buckets(profile.nbytes, [None] * len(profile.nbytes), caps)


def end_of_messages(plan: list[list[int]], arrivals: Sequence[float], sent: Sequence[int], cost: MessageCost) -> float:
    """When the last message is done, in seconds after the start of backward; ``sent`` has bytes on the link."""
    end = 0.0
    for bucket in plan:
        end = max(end, *(arrivals[index] for index in bucket)) + cost.of(sum(sent[index] for index in bucket))
    return end


def predict(profile: Profile, way: str, cost: MessageCost) -> Prediction:
    """Predicts one step of one way to synchronize, where a message costs ``cost``."""
    plan = plan_of(way, profile, cost)
    end = end_of_messages(plan, profile.arrivals, sent_by(way, profile), cost)
    exposed = max(0.0, end - profile.backward)
    return Prediction(profile.step + exposed, exposed, len(plan))


def measure(name: str, steps: int) -> Profile:
    """Profiles a work on this process, without synchronization. Medians of ``steps`` steps, after three others."""
    work = WORK[name]
    torch.manual_seed(0)
    (module,) = work.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    params = [param for param in module.parameters() if param.requires_grad]
    now: dict[Any, float] = {}  # when what happened, in the step that runs
    clock = time.perf_counter
    module.register_forward_hook(lambda *_: now.update(backward=clock()))  # after it only the loss, a sum, is computed
    optimizer.register_step_pre_hook(lambda *_: now.update(optimizer=clock()))
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda _, index=index: now.update({index: clock()}))
    rows = []
    for number in range(3 + steps):
        now.clear()
        now["start"] = clock()
        work.step([module], [optimizer], 0, number)
        now["end"] = clock()
        rows.append([now["backward"] - now["start"], now["optimizer"] - now["backward"], now["end"] - now["optimizer"]])
        rows[-1] += [now[index] - now["backward"] for index in range(len(params))]
    forward, backward, last, *arrivals = [statistics.median(column) for column in zip(*rows[3:], strict=True)]
    in_order = sorted(zip(arrivals, [param.nbytes for param in params], strict=True))
    return Profile(name, forward, backward, last, *zip(*in_order, strict=True))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    charts = list(dict.fromkeys((row["link"], row["algorithm"]) for row in rows))
    figure, grid = plt.subplots(1, len(charts), figsize=(5 * len(charts), 4), squeeze=False, layout="tight")
    for axes, chart in zip(grid[0], charts, strict=True):
        for way in dict.fromkeys(row["way"] for row in rows):
            drawn = [row for row in rows if (row["link"], row["algorithm"], row["way"]) == (*chart, way)]
            axes.plot([row["ranks"] for row in drawn], [row["efficiency"] for row in drawn], ".-", label=way)
        axes.set_xscale("log", base=2)
        axes.set(title=", ".join(chart), xlabel="ranks", ylabel="scaling efficiency", ylim=(0, 1.05))
    grid[0][0].legend()
    figure.savefig(path)


def show_predictions(options: argparse.Namespace) -> None:
    profile = Profile.load(options.profile)
    rows: list[dict[str, Any]] = []
    print(f"{profile.work}: {sum(profile.nbytes) / _MIB:.1f} MiB; a step alone takes {1e3 * profile.step:.1f} ms")
    print("step, ms (exposed, ms; scaling efficiency)")
    for name, algorithm in [(name, algorithm) for name in options.link for algorithm in options.algorithm]:
        print(f"\n{name}, {algorithm}\n  ranks" + "".join(f"{way:>28}" for way in options.ways))
        for ranks in options.ranks:
            cost = message_cost(ranks, LINKS[name], algorithm)
            line = f"{ranks:7d}"
            for way in options.ways:
                found = predict(profile, way, cost)
                facts = {**asdict(found), "efficiency": profile.step / found.step}
                rows.append({"link": name, "algorithm": algorithm, "ranks": ranks, "way": way, **facts})
                line += f"{1e3 * found.step:12.1f} ({1e3 * found.exposed:8.1f}; {profile.step / found.step:4.2f})"
            print(line)
    options.out.write_text(json.dumps(rows, indent=1))
    plot(rows, options.out.with_suffix(".png"))


def show_validation(options: argparse.Namespace) -> None:
    profile, measured = Profile.load(options.profile), json.loads(options.measured.read_text())
    keys = [key for key in measured if not options.mbit or {key, key.partition("x")[0]} & set(options.mbit)]
    if not keys or any(profile.work not in measured[key] for key in keys):
        raise SystemExit(f"{options.measured} does not have {profile.work!r} at this rate; it has {list(measured)}.")
    if options.cost and len(keys) > 1:
        raise SystemExit("--cost holds for one rate and one number of hosts: choose them with --mbit, such as 200x4.")
    given = MessageCost(*map(float, options.cost.split(","))) if options.cost else None
    for key in keys:
        mbit, _, hosts = key.partition("x")
        link = Link.of_rate(options.alpha, float(mbit), _COUNTED_BY_TBF)
        cost = given or message_cost(int(hosts or 2), link, options.algorithm)
        times = {way: statistics.median(each) for way, each in measured[key][profile.work].items()}
        here = profile.scaled(times.pop("none"))  # ranks that share a machine are slower than one alone
        print(f"\n{mbit} Mbit/s, {hosts or 2} hosts, {profile.work}: {1e3 * here.step:.0f} ms of computation")
        print(f"a message takes {1e3 * cost.latency:.2f} ms and {1e9 * cost.seconds_per_byte:.2f} ns for each byte")
        print("predicted / measured step, ms; predicted / measured exposed, ms")
        for way, seconds in times.items():
            try:
                found = predict(here, way, cost)
            except ValueError as error:
                print(f"  {way:12} {error}")
                continue
            ratio = found.step / seconds
            verdict = "within 15 %;" if abs(ratio - 1) <= 0.15 else "off;"
            print(f"  {way:12} {1e3 * found.step:8.1f} / {1e3 * seconds:8.1f} = {ratio:4.2f} {verdict:12}", end="")
            print(f" {1e3 * found.exposed:8.1f} / {1e3 * (seconds - here.step):8.1f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    profiling = commands.add_parser("profile", help="measure one step of a work on this process")
    profiling.add_argument("--work", choices=PROFILED, default="encoder")
    profiling.add_argument("--steps", type=int, default=10, help="steps to take the median of (default: 10)")
    profiling.add_argument("--out", type=Path, default=Path("profile.json"))
    predicting = commands.add_parser("predict", help="predict step time and scaling efficiency")
    predicting.add_argument("profile", type=Path)
    predicting.add_argument("--link", nargs="+", choices=LINKS, default=["tcp-10g"])
    predicting.add_argument("--algorithm", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    predicting.add_argument("--ranks", type=int, nargs="+", default=[2**power for power in range(1, 13)])
    predicting.add_argument("--ways", nargs="+", default=WAYS, help='such as "ours 4 MiB"; as slow_link.py names them')
    predicting.add_argument("--out", type=Path, default=Path("predictions.json"))
    validating = commands.add_parser("validate", help="compare predictions with what slow_link.py measured")
    validating.add_argument("profile", type=Path)
    validating.add_argument("measured", type=Path)
    validating.add_argument("--mbit", nargs="+", help="such as 200, or 200x4 for 4 hosts (default: all)")
    validating.add_argument("--algorithm", choices=ALGORITHMS, default="ring", help="gloo's default is a ring")
    validating.add_argument("--alpha", type=float, default=2e-4, help="seconds for a message (default: 2e-4, assumed)")
    validating.add_argument("--cost", help="latency,seconds_per_byte of a whole all-reduce on these hosts, as measured")
    options = parser.parse_args(arguments)
    if options.command == "profile":
        torch.set_num_threads(1)  # as in the other benchmarks
        profile = measure(options.work, options.steps)
        options.out.write_text(json.dumps(asdict(profile), indent=1))
        times = (profile.forward, profile.backward, profile.optimizer, profile.arrivals[0], profile.arrivals[-1])
        text = "forward {:.1f} ms, backward {:.1f} ms, optimizer {:.1f} ms; gradients arrive from {:.1f} to {:.1f} ms"
        print(f"{options.work}: {text.format(*(1e3 * each for each in times))} after the start of backward")
    else:
        (show_predictions if options.command == "predict" else show_validation)(options)


if __name__ == "__main__":
    main()
