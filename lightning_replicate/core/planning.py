"""``bucket_cap_mb="auto"``: where to cut gradients into buckets, from when they arrive and what a message costs.

One large bucket pays the latency once and leaves all of it to the end; many small ones overlap with backward and pay
for each message. With a cost of ``latency + seconds_per_byte * bytes`` and messages one after the other, the cut that
ends first is found exactly by going through all ends of all prefixes.

Source: the model and the optimum are those of merged-gradient wait-free backpropagation (Shi et al., arXiv 1811.11141).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_ROUNDS = 3  # are looked at before a plan is made
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
