"""Which submodules and parameters a user means: names, globs, types or a callable."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Union

from torch import nn

Pattern = Union[str, type[nn.Module], Callable[[str, nn.Module], bool]]
"""A name or glob (``"trunk.layers.*"``), a module class, or ``(name, module) -> bool``."""

Patterns = Union[Pattern, Sequence[Pattern]]


@dataclass(frozen=True)
class Selection:
    """What patterns matched, by full name, in the model's order.

    Attributes:
        modules: Matched modules, usually without those inside another matched one.
        params: Matched parameters that lie in none of ``modules``.
    """

    modules: dict[str, nn.Module]
    params: dict[str, nn.Parameter]

    def all_parameters(self) -> set[nn.Parameter]:
        """Every parameter that the selection covers."""
        covered = {param for module in self.modules.values() for param in module.parameters()}
        return covered | set(self.params.values())


def select(root: nn.Module, patterns: Patterns, option: str, *, nested: bool = False) -> Selection:
    """Finds what patterns match.

    In a glob, ``*`` stands for any characters within one part of a dotted name, so that ``"layers.*"`` matches
    ``layers.0`` and not ``layers.0.linear``. A name or glob may also match parameters.

    Args:
        root: The model.
        patterns: One pattern or several.
        option: Name of the option that the patterns were given for, for messages.
        nested: Whether modules inside another matched one are wanted, too.

    Raises:
        ValueError: If a pattern matches nothing; names that come near are shown.
        TypeError: If a pattern is of another kind.
    """
    modules = {name: module for name, module in root.named_modules() if name}
    params = dict(root.named_parameters(remove_duplicate=False))
    hit_modules: dict[str, nn.Module] = {}
    hit_params: dict[str, nn.Parameter] = {}
    for pattern in _as_list(patterns, option):
        found_modules = [name for name, module in modules.items() if _matches(pattern, name, module)]
        found_params = [name for name in params if isinstance(pattern, str) and _matches_name(pattern, name)]
        if not found_modules and not found_params:
            raise ValueError(_nothing_matched(pattern, option, [*modules, *params]))
        hit_modules.update((name, modules[name]) for name in found_modules)
        hit_params.update((name, params[name]) for name in found_params)
    inside = {child for module in hit_modules.values() for child in module.modules() if child is not module}
    matched = {name: module for name, module in modules.items() if name in hit_modules}
    roots = {name: module for name, module in matched.items() if nested or module not in inside}
    covered = {param for module in roots.values() for param in module.parameters()}
    loose = {name: param for name, param in params.items() if name in hit_params and param not in covered}
    return Selection(roots, loose)


def select_existing(root: nn.Module, patterns: Patterns, option: str) -> Selection:
    """The same where patterns may match nothing yet: before ``configure_model`` has built everything."""
    modules: dict[str, nn.Module] = {}
    params: dict[str, nn.Parameter] = {}
    for pattern in _as_list(patterns, option):
        try:
            found = select(root, pattern, option)
        except ValueError:
            continue
        modules.update(found.modules)
        params.update(found.params)
    return Selection(modules, params)


def _as_list(patterns: Patterns, option: str) -> list[Pattern]:
    listed = [patterns] if isinstance(patterns, (str, type)) or callable(patterns) else list(patterns)
    for pattern in listed:
        if isinstance(pattern, type):
            if not issubclass(pattern, nn.Module):
                raise TypeError(f"`{option}` takes module classes, got {pattern.__name__}.")
        elif not isinstance(pattern, str) and not callable(pattern):
            raise TypeError(f"`{option}` takes names, globs, module classes or callables, got {pattern!r}.")
    return listed


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return _matches_name(pattern, name)
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(name, module))


def _matches_name(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _nothing_matched(pattern: Pattern, option: str, names: Iterable[str]) -> str:
    if not isinstance(pattern, str):
        return f"`{option}`: {getattr(pattern, '__name__', pattern)} matches no submodule of the model."
    near = difflib.get_close_matches(pattern, list(names), n=4, cutoff=0.4)
    hint = f" Near it are: {', '.join(map(repr, near))}." if near else ""
    return f"`{option}`: {pattern!r} matches no submodule or parameter of the model.{hint}"
