"""One machine, torchrun, two nodes: started in every way, all ranks end with equal weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).with_name("launched.py"))
TIMEOUT = 150  # seconds

pytestmark = pytest.mark.slow


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _launch(*commands: list[str], environments: Any = None) -> None:
    """Runs commands at the same time; all must succeed."""
    environments = environments or [{}] * len(commands)
    base = {key: value for key, value in os.environ.items() if key not in {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"}}
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**base, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        for process in running:
            out, _ = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, out
    finally:
        for process in running:
            process.kill()
            process.wait()


def _check(folder: Path, world_size: int, per_node: int) -> None:
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    assert len({rank["weights"] for rank in found}) == 1
    for rank, report in enumerate(found):
        assert report["rank"] == rank
        assert (report["node_rank"], report["local_rank"]) == divmod(rank, per_node)
        assert report["world_size"] == world_size
        assert report["steps"] == 12 // world_size  # the sampler gave each rank its share


def _torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options, SCRIPT]


@pytest.mark.parametrize("strategy", ["replicate", "replicate_spawn", "replicate_fork"])
def test_one_machine(strategy: str, tmp_path: Path) -> None:
    _launch([SCRIPT, str(tmp_path), strategy, "2", "1"])
    _check(tmp_path, 2, 2)
    if strategy == "replicate" and Path("/proc/self/task").exists():  # the others end without the interpreter's end
        # a thread of a process group that outlives the exit hooks may abort the process after all went well
        for rank in range(2):
            names = json.loads((tmp_path / f"threads{rank}.json").read_text())
            assert names and not [name for name in names if "gloo" in name]


def test_torchrun(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--master-port", str(_free_port()))
    _launch([*_torchrun(*options), str(tmp_path), "replicate", "2", "1"])
    _check(tmp_path, 2, 2)


def test_two_nodes_with_lightnings_environment(tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [SCRIPT, str(tmp_path), "replicate", "2", "2"]
    _launch(command, command, environments=[{**address, "NODE_RANK": str(node)} for node in range(2)])
    _check(tmp_path, 4, 2)


def test_two_nodes_with_torchrun(tmp_path: Path) -> None:
    rendezvous = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port", str(_free_port()))
    commands = [
        [*_torchrun(*rendezvous, f"--node-rank={node}"), str(tmp_path), "replicate", "2", "2"] for node in range(2)
    ]
    _launch(*commands)
    _check(tmp_path, 4, 2)


def test_r42_torchrun_and_trainer_disagree(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--master-port", str(_free_port()))
    with pytest.raises(AssertionError, match=r"(?s)devices=1|num_devices"):
        _launch([*_torchrun(*options), str(tmp_path), "replicate", "1", "1"])


def test_r43_two_jobs_on_one_machine(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    _launch(*([SCRIPT, str(folder), "replicate", "2", "1"] for folder in folders))
    for folder in folders:
        _check(folder, 2, 2)


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ("raise", "rank 1 failed: ValueError: batch 2 is no good. ("),
        ("kill", "another rank has failed, or did not come"),
    ],
)
def test_the_last_error_names_the_first(how: str, because: str) -> None:
    """Rank 0's own error ends the output, long after that of the rank that failed."""
    with pytest.raises(AssertionError) as caught:
        _launch([str(Path(__file__).with_name("failing.py")), how])
    out = str(caught.value)
    last = next(line for line in reversed(out.splitlines()) if "Error: " in line)
    assert "Rank 0 could not finish bucket 0" in last and f"because {because}" in last
    assert "GLHF" not in out and "direct cause" not in out  # the backend's advice, and its error as one more traceback
