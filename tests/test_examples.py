"""The examples do what they say: each exits with an error if the ranks differ or the model did not learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights = re.search(r"ranks' weights: (\w+), (\w+) \(equal\)", done.stdout)
    assert weights is not None, done.stdout
    assert weights[1] == weights[2]
    return done.stdout


def test_digits() -> None:
    out = _run("digits.py")
    assert "replicated: 14 parameters in 1 bucket, 0.22 MiB, averaged over 2 ranks" in out
    accuracy = re.search(r"test accuracy: (0\.\d+|1\.0+)", out)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97


def test_r07_gan() -> None:
    out = _run("gan.py")
    moved = re.search(r"bytes of a turn: critic (\d+), generator (\d+)", out)
    assert moved is not None
    critic, generator = int(moved[1]), int(moved[2])
    weights = 4 * (64 * 128 + 128 + 128 * 128 + 128 + 128 + 1)
    assert weights <= critic < weights + 256  # the critic's turn moves the critic, and nothing else
    assert generator > critic  # the generator's goes through both


def test_r23_finetune() -> None:
    out = _run("finetune.py")
    sent = [int(count) for count in re.findall(r"epoch \d+: \d+ parameters, (\d+) bytes", out)]
    assert len(sent) == 14
    assert sent[0] == sent[1] == 4 * (1024 * 10 + 10)  # the head alone
    assert sent[-1] > sent[0]


def test_r28_skipped_steps() -> None:
    out = _run("skipped_steps.py")
    skipped = re.search(r"batches skipped by each rank: \[(\d+), (\d+)\]", out)
    assert skipped is not None
    assert int(skipped[1]) > 0
    assert int(skipped[2]) > 0


def test_r30_uneven_stream() -> None:
    out = _run("uneven_stream.py")
    assert re.search(r"stop: batches of each rank in an epoch \[14, 14\]", out)
    assert re.search(r"join: batches of each rank in an epoch \[14, 29\]", out)


def test_r47_mixed() -> None:
    out = _run("mixed.py")
    held, whole = map(int, re.search(r"(\d+) of (\d+) parameters in each process", out).groups())  # type: ignore[union-attr]
    assert held < 0.6 * whole  # half of the layers, and all of the rest
    losses = re.search(r"in one process: test loss (\d\.\d+), an epoch later (\d\.\d+)", out)
    assert losses is not None
    trained = re.search(r"parameters in each process, test loss (\d\.\d+)", out)
    assert trained is not None
    assert float(losses[1]) == pytest.approx(float(trained[1]), abs=2e-3)
    assert float(losses[2]) < float(losses[1]) + 0.05
