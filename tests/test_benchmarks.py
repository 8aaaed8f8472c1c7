"""The benchmark runs, and what can be counted is what it should be. No time is asserted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replicate import replicate
from tests.core.helpers import data
from tests.ranks import Ranks

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", script, *arguments]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not run" not in done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_short_run_of_the_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    short = ("--peers", "none", "ddp tuned unused", "--turns", "2", "--turn", "0.01")
    _run("run.py", "idle", "gan", *short, "--out", str(out))
    results = json.loads(out.read_text())
    assert results.keys() == {"idle", "gan"}
    for work, peers in results.items():
        assert peers.keys() == {"ours", "none", "ddp tuned unused"}
        for found in peers.values():
            assert len(found["seconds"]) == 2
        ours = peers["ours"]
        # an idle branch, a sixth of its model, sends nothing; of a GAN each turn sends its own player, and no more
        assert ours["bytes"] < 1.01 * ours["model_bytes"] * (5 / 6 if work == "idle" else 1)
        assert ours["gradient_bytes"] < 1.01 * ours["model_bytes"]  # one copy of the gradients


@pytest.mark.slow
def test_a_short_run_under_the_trainer(tmp_path: Path) -> None:
    out = tmp_path / "trainer.json"
    printed = _run("trainer.py", "tiny", "--turns", "2", "--steps", "12", "--out", str(out))
    assert printed.count("ours / it") == 4
    assert all(len(times) == 2 for times in json.loads(out.read_text())["tiny"].values())


@pytest.mark.slow
def test_r68_memory_is_the_gradients_once_and_a_bucket(tmp_path: Path) -> None:
    """R68: stock DDP holds the gradients twice."""
    short = ("--turns", "2", "--turn", "0.1")
    printed = _run("growth.py", "idle", "memory", "--peers", "ours", "ddp", *short, "--out", str(tmp_path / "out.json"))
    assert "with an idle branch / the same model without it" in printed
    beside = {peer: float(share) for peer, share in re.findall(r"memory of ([\w ]+?) +at most ([\d.]+) x", printed)}
    model = 4 * 5 * (2048 * 2048 + 2048)
    bucket = 25 * 2**20 + 4 * 2048 * 2048  # a bucket is closed by the parameter that fills it
    assert 1.0 <= beside["ours"] < 1.0 + bucket / model + 0.05
    assert beside["ddp"] > 1.9


def _counts(rank: int) -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)])
    replicate(net)
    batch = data(rank, 0, 3, 4)
    for _ in range(3):
        net.zero_grad()
        net(batch).sum().backward()
    net.zero_grad()
    loss = net(batch).sum()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    assert 400 <= calls < 400 * 2, calls  # the hook, and what is done once a round
    last = replicate.state(net).last_round
    assert last is not None
    assert last.collectives == 1


def _bytes(rank: int) -> None:
    """Adapters: nine tenths of the parameters are frozen, and cost nothing on the wire."""
    net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 33))
    net[0].requires_grad_(False)
    replicate(net)
    net(torch.randn(2, 300)).sum().backward()
    last = replicate.state(net).last_round
    assert last is not None
    trainable = sum(param.nbytes for param in net[1].parameters())
    assert trainable <= last.nbytes < 1.01 * trainable


def test_python_calls_for_each_parameter(ranks: Ranks) -> None:
    ranks(2, _counts)


def test_frozen_parameters_cost_no_bytes(ranks: Ranks) -> None:
    ranks(2, _bytes)
