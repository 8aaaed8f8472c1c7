"""The examples do what they say."""

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
        [sys.executable, "-W", "ignore", *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits() -> None:
    out = _run("digits.py")
    assert re.search(r"replicated: 14 parameters in 1 buckets, 0\.22 MiB, averaged over 2 ranks", out)
    accuracy = re.search(r"test accuracy: (0\.\d+)", out)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
    weights = re.search(r"ranks' weights: (\w+), (\w+) \(equal\)", out)
    assert weights is not None
    assert weights[1] == weights[2]
