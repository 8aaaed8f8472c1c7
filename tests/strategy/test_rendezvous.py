"""How the ranks of an attempt find each other in a store that still holds what earlier attempts left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_replicate.core.api import ReplicateError
from lightning_replicate.strategy.rendezvous import agree_on_attempt, store_outlives_ranks

LONG = timedelta(seconds=30)  # nothing here comes near it
SHORT = timedelta(seconds=0.5)  # for those who wait in vain

Connect = Callable[[], dist.Store]
Come = Callable[..., "Future[str]"]


@pytest.fixture(params=["tcp", "hash"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Makes a client of one store for each process of an attempt."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # as many clients as there are processes: each is locked while it waits. The server lives as long as the function
    return lambda: dist.TCPStore(server.host, server.port, is_master=False, timeout=LONG)


@pytest.fixture
def come(connect: Connect) -> Iterator[Come]:
    """Starts one process of an attempt, as a thread."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        yield lambda rank, world_size, timeout=LONG: pool.submit(agree_on_attempt, connect(), rank, world_size, timeout)


def _attempt(coming: list[Future[str]]) -> str:
    """The name that all of them agreed on."""
    (name,) = {process.result(timeout=60) for process in coming}
    return name


def _wait_for(store: dist.Store, world_size: int, key: str) -> None:
    dist.PrefixStore(f"lightning_replicate/attempts/{world_size}", store).wait([key], LONG)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_attempt_has_a_name_of_its_own(world_size: int, come: Come) -> None:
    names = [_attempt([come(rank, world_size) for rank in range(world_size)]) for _ in range(3)]
    assert len(set(names)) == 3


def test_ranks_come_in_any_order(come: Come) -> None:
    for order in ([2, 1, 0], [0, 2, 1], [1, 0, 2]):
        coming = []
        for rank in order:
            coming.append(come(rank, 3))
            time.sleep(0.05)  # nothing depends on it; without it they would all come at once
        _attempt(coming)


def test_world_sizes_may_change(come: Come) -> None:
    names = [_attempt([come(rank, size) for rank in range(size)]) for size in (2, 4, 1, 3, 2)]
    assert len(set(names)) == 5


def test_names_of_dead_ranks_are_not_waited_for(connect: Connect, come: Come) -> None:
    store = connect()
    for rank in range(3):  # an attempt whose ranks were killed as soon as they had come
        dist.PrefixStore("lightning_replicate/attempts/3", store).set(f"rank/{rank}", f"dead{rank}")
    first = [come(0, 3)]  # asks the dead at first
    _wait_for(store, 3, "mail/dead2/0")
    first += [come(2, 3)]
    time.sleep(0.05)
    assert not any(process.done() for process in first)
    _attempt([*first, come(1, 3)])


def test_an_answer_of_a_rank_that_died_does_not_count(connect: Connect, come: Come) -> None:
    """Ranks 1 and 2 are of one node: rank 2 has answered when rank 1 dies, so both are started anew."""
    store = connect()
    meeting = dist.PrefixStore("lightning_replicate/attempts/3", store)
    for rank in (1, 2):
        meeting.set(f"rank/{rank}", f"dead{rank}")
    leader = come(0, 3)
    _wait_for(store, 3, "mail/dead2/0")
    attempt, call = meeting.get("mail/dead2/0").decode().split()
    meeting.set(f"here/{attempt}/{call}/dead2", "")
    again = come(1, 3)  # the new rank 1 is first
    time.sleep(0.1)
    assert not leader.done() and not again.done()
    _attempt([leader, again, come(2, 3)])


def test_rank_0_is_started_anew_while_others_wait(connect: Connect, come: Come) -> None:
    store = connect()
    first = come(0, 3)
    waiting = come(1, 3)
    _wait_for(store, 3, "rank/0")
    _wait_for(store, 3, "rank/1")
    again = come(0, 3)
    time.sleep(0.1)
    assert not waiting.done()
    _attempt([again, waiting, come(2, 3)])
    with pytest.raises(ReplicateError, match="taken the place of rank 0"):
        first.result(timeout=60)


def test_a_rank_that_answered_a_dead_rank_0_follows_the_next(connect: Connect, come: Come) -> None:
    store = connect()
    meeting = dist.PrefixStore("lightning_replicate/attempts/2", store)
    waiting = come(1, 2)
    _wait_for(store, 2, "rank/1")
    name = meeting.get("rank/1").decode()
    meeting.add(f"mail/{name}", 1)  # what a rank 0 left that was killed after its first call
    meeting.set(f"mail/{name}/0", "dead 0")
    _wait_for(store, 2, f"here/dead/0/{name}")
    assert _attempt([waiting, come(0, 2)]) != "dead"


def test_a_second_meeting_of_the_same_processes(come: Come) -> None:
    """Rank 1 is at its second process group while rank 2 may still be at the first."""
    first = [come(rank, 3) for rank in range(3)]
    name = _attempt(first)
    assert _attempt([come(rank, 3) for rank in (1, 0, 2)]) != name


def test_ranks_that_never_come_are_named(come: Come) -> None:
    coming = [come(rank, 4, SHORT) for rank in (0, 2)]
    with pytest.raises(ReplicateError, match=r"waited 0.5 s for all 4 ranks.* Never came: rank 1, 3\."):
        coming[0].result(timeout=60)
    with pytest.raises(ReplicateError, match=r"Rank 2 waited.* Never came: rank 1, 3\."):
        coming[1].result(timeout=60)


def test_ranks_that_do_not_come_again_are_named(come: Come) -> None:
    _attempt([come(rank, 4) for rank in range(4)])
    coming = [come(rank, 4, SHORT) for rank in (0, 2)]
    with pytest.raises(ReplicateError, match=r"Not heard of: rank 1, 3\."):
        coming[0].result(timeout=60)
    with pytest.raises(ReplicateError, match="Rank 0 is there, and its own error names"):
        coming[1].result(timeout=60)


def test_rank_0_does_not_come_again(come: Come) -> None:
    _attempt([come(rank, 2) for rank in range(2)])
    with pytest.raises(ReplicateError, match="Rank 0 was not heard of"):
        come(1, 2, SHORT).result(timeout=60)


def test_many_ranks_come_one_after_the_other(come: Come) -> None:
    _attempt([come(rank, 9) for rank in range(9)])  # so that there is something old in the way of the next ones
    coming = []
    for rank in range(9):
        coming.append(come(rank, 9))
        time.sleep(0.005)
    _attempt(coming)


@pytest.mark.parametrize(("value", "outlives"), [("True", True), ("False", False), (None, False)])
def test_only_the_launchers_own_store_is_divided(
    value: str | None, outlives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", value)
    assert store_outlives_ranks() is outlives
