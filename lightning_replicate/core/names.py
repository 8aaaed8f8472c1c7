"""Dotted names and globs: how parts of a model are meant, and what is said where a name means nothing."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable


def matches_name(pattern: str, name: str) -> bool:
    """Whether a name or glob means this name.

    In a glob, ``*`` stands for any characters within one part of a dotted name, so that ``"layers.*"`` means
    ``layers.0`` and not ``layers.0.linear``. A part that is equal is meant, whatever characters are in it.
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(
        mine == theirs or fnmatch.fnmatchcase(theirs, mine) for mine, theirs in zip(wanted, parts, strict=True)
    )


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the names or globs means this name."""
    return any(matches_name(pattern, name) for pattern in patterns)


def nothing_matched(pattern: str, option: str, kinds: str, names: Iterable[str]) -> str:
    """The message for a name or glob that means nothing, with names that come near.

    Args:
        pattern: The name or glob.
        option: Name of the option that it was given for.
        kinds: What it could have meant.
        names: All names that there are.
    """
    near = difflib.get_close_matches(pattern, list(names), n=4, cutoff=0.4)
    hint = f" Near it are: {', '.join(map(repr, near))}." if near else ""
    return f"`{option}`: {pattern!r} matches no {kinds}.{hint}"
