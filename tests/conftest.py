"""Fixtures shared by all tests, and the rule that warnings are errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.known_warnings import KNOWN_WARNINGS
from tests.ranks import Ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for action, message, category in KNOWN_WARNINGS:
        config.addinivalue_line("filterwarnings", f"{action}:{message}:{category.__module__}.{category.__qualname__}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a function on N gloo ranks: ``ranks(2, case, *args)``."""
    pool = Ranks()
    yield pool
    pool.stop()
