"""``bucket_cap_mb="auto"``: where to cut gradients into buckets, from when they arrive and what a message costs.

One large bucket pays the latency once and leaves all of it to the end; many small ones overlap with backward and pay
for each message. With a cost of ``latency + seconds_per_byte * bytes`` and messages one after the other, the cut that
ends first is found exactly by going through all ends of all prefixes.

The model does not know what messages take from computation where both share cores. So a plan is tried: rounds by
default and rounds as planned are timed, and it stays only where it is faster.

Source: the model and the optimum are those of merged-gradient wait-free backpropagation (Shi et al., arXiv 1811.11141).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

_ROUNDS = 3  # are looked at before a plan is made
_TRIAL_ROUNDS = 6  # by default, and as many as planned; the first of each pays for new buffers
_LEAST_ROUNDS = 3  # of each, in which this rank had gradients
_LEAST_GAIN = 0.03  # of a round; less may be noise
_MOST_CANDIDATES = 256  # places to cut at; more would take long to go through and win nothing


@dataclass(frozen=True)
class MessageCost:
    """What a message costs: ``latency`` in seconds, and seconds for each byte."""

    latency: float
    seconds_per_byte: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> MessageCost:
        """The line through two measured messages, each ``(bytes, seconds)``."""
        per_byte = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(1e-6, small[1] - per_byte * small[0]), per_byte)

    def of(self, nbytes: int) -> float:
        """Seconds for a message of this size."""
        return self.latency + self.seconds_per_byte * nbytes


@dataclass
class Arrivals:
    """When gradients arrived in the rounds that were looked at, in seconds after the first one."""

    rounds: list[dict[int, float]] = field(default_factory=list)

    def note(self, numbers: Sequence[int], times: Sequence[float]) -> None:
        """Adds a round. A parameter that arrived several times counts when it arrived last."""
        start = times[0] if times else 0.0
        self.rounds.append({number: time - start for number, time in zip(numbers, times, strict=True)})

    @property
    def enough(self) -> bool:
        """Whether a plan can be made."""
        return len(self.rounds) >= _ROUNDS

    def typical(self, numbers: Sequence[int]) -> list[float]:
        """When each of these gradients is there, with all before it. Those that never arrived come with the one before.

        The first round is left out where there are others: it pays for what is done once.
        """
        rounds = self.rounds[1:] or self.rounds
        found: list[float] = []
        latest = 0.0
        for number in numbers:
            times = [each[number] for each in rounds if number in each]
            latest = max(latest, median(times)) if times else latest
            found.append(latest)
        return found


@dataclass
class Trial:
    """A plan beside the default.

    Attributes:
        plan: How many gradients each bucket holds, in order.
        rounds: How many rounds were counted: the same on all ranks.
        by_default: Seconds of this rank's rounds from the first gradient to the last average, with default buckets.
        as_planned: The same with the plan's.
    """

    plan: list[int]
    rounds: int = 0
    by_default: list[float] = field(default_factory=list)
    as_planned: list[float] = field(default_factory=list)
    _start: float | None = None

    def start(self, has_gradients: bool) -> None:
        """A round begins. It is timed if this rank has gradients in it."""
        self._start = perf_counter() if has_gradients else None

    def end(self) -> None:
        """A round ends."""
        if self._start is not None:
            seconds = self.by_default if self.rounds < _TRIAL_ROUNDS else self.as_planned
            seconds.append(perf_counter() - self._start)
        self.rounds += 1

    @property
    def wants_plan(self) -> bool:
        """Whether the plan's rounds begin now."""
        return self.rounds == _TRIAL_ROUNDS

    @property
    def is_over(self) -> bool:
        """Whether all rounds were counted."""
        return self.rounds >= 2 * _TRIAL_ROUNDS

    @property
    def wins(self) -> bool:
        """Whether the plan's rounds were faster. Not where this rank had too few to tell."""
        if min(len(self.by_default), len(self.as_planned)) < _LEAST_ROUNDS:
            return False
        return median(self.as_planned[1:]) < (1 - _LEAST_GAIN) * median(self.by_default[1:])


def cut(arrivals: Sequence[float], nbytes: Sequence[int], cost: MessageCost) -> list[int]:
    """Cuts gradients into the buckets that are all sent first.

    Args:
        arrivals: When each gradient is there, in seconds; rising.
        nbytes: Size of each.
        cost: What a message costs.

    Returns:
        How many gradients each bucket holds, in order.
    """
    ends = _candidates(nbytes)
    sums = [0]
    for size in nbytes:
        sums.append(sums[-1] + size)
    # best[k]: when all up to the k-th place to cut are sent at the earliest, and the place of the cut before it
    best: list[tuple[float, int]] = [(0.0, 0)]
    for k in range(1, len(ends)):
        there = arrivals[ends[k] - 1]
        best.append(min((max(best[i][0], there) + cost.of(sums[ends[k]] - sums[ends[i]]), -i) for i in range(k)))
    counts = []
    k = len(ends) - 1
    while k > 0:
        i = -best[k][1]
        counts.append(ends[k] - ends[i])
        k = i
    return counts[::-1]


def _candidates(nbytes: Sequence[int]) -> list[int]:
    """Where a cut is tried: after every gradient, or after about equal bytes where there are very many."""
    if len(nbytes) < _MOST_CANDIDATES:
        return list(range(len(nbytes) + 1))
    step = sum(nbytes) / _MOST_CANDIDATES
    places, filled = [0], 0.0
    for index, size in enumerate(nbytes, 1):
        filled += size
        if filled >= step or index == len(nbytes):
            places.append(index)
            filled = 0.0
    return places
