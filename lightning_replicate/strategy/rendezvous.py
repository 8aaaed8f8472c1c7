"""A place of its own in the store for every attempt to train, where the store outlives the ranks.

torchrun's agent holds the store through which ranks find each other, and starts the ranks anew when one of them dies
(``--max-restarts``) or a node comes or goes. The store then still holds what dead ranks wrote: their addresses, to
which the new ranks try to connect (torch 2.13: "connectFullMesh failed ... Connection refused", or a hang). So ranks
first agree on a name that no earlier attempt had, and use the store under that prefix. Process groups that are made
later, by whomever, derive their part of the store from the default one's, so one prefix covers them all.

The agents' count of restarts (``TORCHELASTIC_RESTART_COUNT``) cannot be that name: it differs between nodes
(pytorch#135712). Ranks agree through the store itself instead:

- Every process writes a name of its own, never used before, under its rank, and then answers what rank 0 asks it.
- Rank 0 reads all names and calls the roll: it asks each of these processes. If a name changes meanwhile, some rank
  was started anew, so rank 0 calls the roll again, of all. If all have answered and the names are what they were when
  the call began, it tells all of them to go.

Why nothing old gets in: what a dead process left is a name that does not answer, until a new process writes its own
over it. Messages are kept under the name of the process that they are for, and answers under the attempt and the call
that they answer, so nobody reads those of others. An answer counts only for a call that began after the last process
had come, hence after those that it replaces were gone; agents end all processes of a node before they start new ones.
If rank 0 itself is started anew, its successor asks everybody again, whomever they have answered before, and a
predecessor that still runs (its node lost touch) finds its name replaced and leaves.

What it cannot do: a process that dies after its last answer takes part in an attempt that fails. Those who connect to
it fail as they do when a rank dies in training, and are started anew; at worst after the strategy's ``timeout``.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from lightning_replicate.core.api import ReplicateError

_PAUSE = 0.01  # seconds between two looks at the store; rank 0 alone looks, the others are woken
_GO = "go"


def store_outlives_ranks() -> bool:
    """Whether the launcher holds the store, and says so to torch.

    Elsewhere (Lightning's own launchers, SLURM, MPI, ...) rank 0 holds it, so it cannot outlive an attempt, and is left
    to Lightning. torch reads the same variable to decide who holds it.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of the launcher's store that belongs to this attempt alone. Every rank calls it.

    Args:
        address: Host of the launcher's store.
        port: Its port.
        rank: This process's rank.
        world_size: How many ranks there are.
        timeout: How long the others may take to come.

    Raises:
        ReplicateError: If not all ranks came in time.
    """
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"lightning_replicate/{agree_on_attempt(store, rank, world_size, timeout)}", store)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Gathers all ranks of an attempt. Every rank calls it.

    Args:
        store: Where ranks meet. It may hold what earlier attempts left, whichever way they ended.
        rank: This process's rank.
        world_size: How many ranks there are.
        timeout: How long the others may take to come.

    Returns:
        The attempt's name: the same on all ranks, and no other attempt's.

    Raises:
        ReplicateError: If not all ranks came in time, with their numbers as far as this rank knows them; or if another
            process has taken this one's place.
    """
    # ranks that were started for another number of ranks are none of ours
    meeting = _Meeting(dist.PrefixStore(f"lightning_replicate/attempts/{world_size}", store), rank, world_size, timeout)
    return meeting.lead() if rank == 0 else meeting.follow()


class _Meeting:
    """One process's side of the agreement."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.name = uuid.uuid4().hex
        self.places = [f"rank/{other}" for other in range(world_size)]
        store.set(self.places[rank], self.name)

    def follow(self) -> str:
        """Answers rank 0, or whichever process takes its place, until it says go."""
        for number in itertools.count():
            message = f"mail/{self.name}/{number}"
            try:
                self.store.wait([message], self._time_left())
            except dist.DistStoreError:
                known = "was not heard of" if number == 0 else "is there, and its own error names those that it lacks"
                raise ReplicateError(f"{self._complaint()} Rank 0 {known}.{self._never_came()}") from None
            attempt, call = self.store.get(message).decode().split()
            if call == _GO:
                return attempt
            self.store.set(_answer(attempt, call, self.name), "")
        raise AssertionError  # the loop has no end

    def lead(self) -> str:
        """Calls the roll until all answer a call and nobody has come since it began."""
        try:
            self.store.wait(self.places, self._time_left())
        except dist.DistStoreError:
            raise ReplicateError(f"{self._complaint()}{self._never_came()}") from None
        attempt = uuid.uuid4().hex
        for call in map(str, itertools.count()):
            names = self._names()
            self._tell(names, attempt, call)
            answers = [_answer(attempt, call, name) for name in names[1:]]
            while not self._are_there(answers) and self._names() == names:
                if time.monotonic() > self.deadline:
                    silent = [rank for rank, answer in enumerate(answers, 1) if not self._are_there([answer])]
                    raise ReplicateError(f"{self._complaint()} Not heard of: rank {', '.join(map(str, silent))}.")
                time.sleep(_PAUSE)
            if self._names() == names:
                self._tell(names, attempt, _GO)
                return attempt
        raise AssertionError  # the loop has no end

    def _names(self) -> list[str]:
        names = [name.decode() for name in self.store.multi_get(self.places)]
        if names[0] != self.name:
            raise ReplicateError("Another process has taken the place of rank 0, so this one leaves.")
        return names

    def _tell(self, names: list[str], attempt: str, call: str) -> None:
        for name in names[1:]:
            number = self.store.add(f"mail/{name}", 1) - 1  # a predecessor of this process may have written, too
            self.store.set(f"mail/{name}/{number}", f"{attempt} {call}")

    def _are_there(self, keys: list[str]) -> bool:
        return not keys or self.store.check(keys)

    def _time_left(self) -> timedelta:
        return timedelta(seconds=max(self.deadline - time.monotonic(), 0.001))  # torch takes 0 for no limit

    def _complaint(self) -> str:
        return (
            f"Rank {self.rank} waited {self.timeout.total_seconds():g} s for all {len(self.places)} ranks to come. Look"
            f" for an earlier error of a rank that is missing, or allow more time: `ReplicateStrategy(timeout=...)`."
        )

    def _never_came(self) -> str:
        ranks = [str(rank) for rank, place in enumerate(self.places) if not self._are_there([place])]
        return f" Never came: rank {', '.join(ranks)}." if ranks else ""


def _answer(attempt: str, call: str, name: str) -> str:
    return f"here/{attempt}/{call}/{name}"
