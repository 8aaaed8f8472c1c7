"""Ranks that torchrun starts anew find each other, and go on from the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("elastic.py"))
TIMEOUT = 200  # seconds, of which an attempt takes about five
EPOCHS = 5

pytestmark = pytest.mark.slow


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(*arguments: object) -> subprocess.Popen[str]:
    launched = {"LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)],
        env={**{key: value for key, value in os.environ.items() if key not in launched}, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(*agents: subprocess.Popen[str]) -> None:
    """All must succeed. None of them, nor of their ranks, stays."""
    deadline = time.monotonic() + TIMEOUT
    try:
        for agent in agents:
            out, _ = agent.communicate(timeout=max(deadline - time.monotonic(), 1))
            assert agent.returncode == 0, out
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)  # ends its ranks, too
                try:
                    agent.communicate(timeout=40)
                except subprocess.TimeoutExpired:
                    agent.kill()
                    agent.communicate()


def _run(folder: Path, kills: int, *options: object) -> None:
    folder.mkdir()
    _finish(_start(*options, "--nproc-per-node=2", SCRIPT, folder, "replicate", EPOCHS, kills))


def _results(folder: Path, world_size: int) -> list[dict[str, object]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _attempts(folder: Path, rank: int) -> list[int]:
    return [int(step) for step in (folder / f"attempts{rank}.txt").read_text().split()]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_are_started_anew_again_and_again(rendezvous: str, tmp_path: Path) -> None:
    options = {"static": ("--master-port", _free_port()), "c10d": ("--standalone",)}[rendezvous]
    _run(tmp_path / "whole", 0, *options)
    _run(tmp_path / "killed", 3, *options, "--max-restarts=3")
    for rank in range(2):
        assert _attempts(tmp_path / "killed", rank) == [0, 2, 4, 6]  # from the last checkpoint, at the first try
    assert _results(tmp_path / "killed", 2) == _results(tmp_path / "whole", 2)
    assert len({str(result) for result in _results(tmp_path / "whole", 2)}) == 1


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_nodes_are_started_anew(rendezvous: str, tmp_path: Path) -> None:
    """Each agent notices by itself that its ranks failed, one before the other."""
    port = _free_port()
    common = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.5")
    agents = []
    for node in range(2):
        if rendezvous == "static":
            options = ("--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={node}")
        else:
            options = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
        agents.append(_start(*common, *options, SCRIPT, tmp_path, "replicate", EPOCHS, 2))
    _finish(*agents)
    for rank in range(2):
        assert _attempts(tmp_path, rank) == [0, 2, 4]
    assert len({str(result) for result in _results(tmp_path, 2)}) == 1
