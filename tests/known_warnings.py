"""Warnings that are not errors in this test suite, each with its reason. Everything else fails a test."""

KNOWN_WARNINGS: list[tuple[str, str, type[Warning]]] = []
