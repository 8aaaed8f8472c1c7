"""Fixtures shared by all tests, and the rule that warnings are errors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.known_warnings import KNOWN_WARNINGS
from tests.ranks import Ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for action, message, category in KNOWN_WARNINGS:
        config.addinivalue_line("filterwarnings", f"{action}:{message}:{category.__module__}.{category.__qualname__}")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Lightning's launcher leaves variables behind that tell later processes that they were launched by it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a function on N gloo ranks: ``ranks(2, case, *args)``."""
    pool = Ranks()
    yield pool
    pool.stop()
