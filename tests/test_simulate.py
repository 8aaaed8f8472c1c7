"""The model behind ``simulate.py``: values by hand, and what must hold for any profile. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replicate.core.planning import MessageCost

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module")
def simulate() -> Iterator[Any]:
    """The module, which is no part of a package and imports ``work`` from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("simulate", BENCHMARKS / "simulate.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "simulate", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("work", None)


def three(simulate: Any) -> Any:
    """Gradients of 1, 2 and 1 MiB that arrive 1, 2 and 4 seconds after the start of backward, which takes 5."""
    return simulate.Profile("by hand", 3.0, 5.0, 1.0, (1.0, 2.0, 4.0), (MIB, 2 * MIB, MIB))


def test_all_reduce_by_hand(simulate: Any) -> None:
    link = simulate.Link(alpha=0.5, beta=0.01)
    assert simulate.all_reduce_seconds(100, 2, link, "ring") == pytest.approx(2 * 0.5 + 100 * 0.01)
    assert simulate.all_reduce_seconds(100, 4, link, "ring") == pytest.approx(6 * 0.5 + 1.5 * 100 * 0.01)
    assert simulate.all_reduce_seconds(100, 2, link, "tree") == pytest.approx(2 * 0.5 + 2 * 100 * 0.01)
    assert simulate.all_reduce_seconds(100, 5, link, "tree") == pytest.approx(6 * 0.5 + 2 * 100 * 0.01)
    for algorithm in simulate.ALGORITHMS:
        assert simulate.all_reduce_seconds(100, 1, link, algorithm) == 0


def test_exposed_time_by_hand(simulate: Any) -> None:
    profile, cost = three(simulate), MessageCost(0.5, 1 / MIB)
    assert simulate.plan_of("ddp", profile, cost) == simulate.plan_of("ours", profile, cost) == [[0], [1, 2]]
    # 1 MiB from 1.0 to 2.5; 3 MiB from 4.0 to 7.5, where backward ends at 5.0
    assert simulate.predict(profile, "ours", cost) == simulate.Prediction(9 + 2.5, 2.5, 2)
    # 1 MiB from 1.0 to 2.5; 2 MiB from 2.5 to 5.0; 1 MiB from 5.0 to 6.5
    assert simulate.plan_of("ours 1 MiB", profile, cost) == [[0], [1], [2]]
    assert simulate.predict(profile, "ours 1 MiB", cost) == simulate.Prediction(9 + 1.5, 1.5, 3)
    # 3 MiB from 2.0 to 5.5 and 1 MiB to 7.0 is worse than the three above
    assert simulate.predict(profile, "ours auto", cost).exposed == 1.5
    # half the bytes of the default's plan: from 1.0 to 2.0, and from 4.0 to 6.0
    assert simulate.predict(profile, "ours bf16", cost).exposed == 1.0


def test_one_rank_waits_for_nobody(simulate: Any) -> None:
    late = simulate.Profile("late", 3.0, 5.0, 1.0, (5.0,), (MIB,))
    alone = simulate.message_cost(1, simulate.Link(1.0, 1.0), "ring")
    assert [simulate.predict(late, way, alone).step for way in simulate.WAYS] == [late.step] * len(simulate.WAYS)


def test_ways_without_a_plan(simulate: Any) -> None:
    for way in ("none", "ours hook", "ddp auto"):
        with pytest.raises(ValueError, match="No plan is known"):
            simulate.plan_of(way, three(simulate), MessageCost(0.5, 0.0))


@given(
    gradients=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40 * MIB)), min_size=1, max_size=40),
    ranks=st.integers(1, 4096),
    link=st.tuples(st.floats(1e-7, 1e-2), st.floats(0, 1e-7)),
)
def test_auto_is_never_worse(simulate: Any, gradients: list[Any], ranks: int, link: tuple[float, float]) -> None:
    arrivals, nbytes = sorted(time for time, _ in gradients), [size for _, size in gradients]
    profile = simulate.Profile("any", 1.0, 1.0, 0.1, tuple(arrivals), tuple(nbytes))
    for algorithm in simulate.ALGORITHMS:
        cost = simulate.message_cost(ranks, simulate.Link(*link), algorithm)
        planned = simulate.predict(profile, "ours auto", cost).step
        assert planned <= simulate.predict(profile, "ours", cost).step * (1 + 1e-9)


def test_efficiency_falls_with_ranks(simulate: Any) -> None:
    link = simulate.Link(0.01, 0.0)  # latency only
    costs = [simulate.message_cost(2**power, link, "ring") for power in range(9, 13)]
    steps = [simulate.predict(three(simulate), "ours", cost).step for cost in costs]
    assert all(fewer < more for fewer, more in pairwise(steps))


def test_profile_of_a_work(simulate: Any, tmp_path: Path) -> None:
    profile = simulate.measure("not idle", 1)
    assert sum(profile.nbytes) == 4 * 5 * (1024 * 1024 + 1024)
    assert list(profile.arrivals) == sorted(profile.arrivals) and 0 <= profile.arrivals[-1] <= profile.backward
    (tmp_path / "profile.json").write_text(json.dumps(simulate.asdict(profile)))
    assert simulate.Profile.load(tmp_path / "profile.json") == profile


def test_validation(simulate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile is twice as fast as the rank that was measured; 4 hosts, 8 Mbit/s."""
    profile, measured = tmp_path / "profile.json", tmp_path / "measured.json"
    profile.write_text(json.dumps(simulate.asdict(three(simulate).scaled(4.5))))
    times = {"none": [8.0, 9.0, 10.0], "ddp": [11.5], "ours 1 MiB": [15.0], "ours hook": [9.0]}
    measured.write_text(json.dumps({"8x4": {"by hand": times}, "9": {"by hand": {"none": [1.0], "ddp": [1.0]}}}))
    cost = f"0.5,{1 / MIB}"
    simulate.main(["validate", str(profile), str(measured), "--mbit", "8", "--cost", cost])
    _, head, _, _, ddp, one, hook = capsys.readouterr().out.splitlines()
    assert head == "8 Mbit/s, 4 hosts, by hand: 9000 ms of computation"
    assert "= 1.00 within 15 %" in ddp and "= 0.70 off" in one and "No plan is known" in hook
    simulate.main(["validate", str(profile), str(measured), "--mbit", "8x4", "--alpha", "0.25"])
    # 6 messages of latency; 1.5 bytes, with headers, for each byte at a microsecond
    assert "a message takes 1500.00 ms and 1568.37 ns" in capsys.readouterr().out
