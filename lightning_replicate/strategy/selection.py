"""Which submodules, parameters and buffers a user means: names, globs, types or a callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Union

import torch
from torch import nn

from lightning_replicate.core.names import matches_name, nothing_matched

Pattern = Union[str, type[nn.Module], Callable[[str, nn.Module], bool]]
"""A name or glob (``"trunk.layers.*"``), a module class, or ``(name, module) -> bool``."""

Patterns = Union[Pattern, Sequence[Pattern]]


@dataclass(frozen=True)
class Selection:
    """What patterns matched, by full name, in the model's order.

    Attributes:
        modules: Matched modules, usually without those inside another matched one.
        params: Matched parameters that lie in none of ``modules``.
        buffers: Matched buffers that lie in none of ``modules``, if they were asked for, under each of their names.
        names: The names and globs among the patterns, if buffers were asked for: more may match later.
    """

    modules: dict[str, nn.Module]
    params: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def all_parameters(self) -> set[nn.Parameter]:
        """Every parameter that the selection covers."""
        covered = {param for module in self.modules.values() for param in module.parameters()}
        return covered | set(self.params.values())

    def all_tensors(self) -> set[torch.Tensor]:
        """Every parameter and buffer that the selection covers."""
        covered = {buffer for module in self.modules.values() for buffer in module.buffers()}
        return self.all_parameters() | covered | set(self.buffers.values())

    def buffer_names(self) -> tuple[str, ...]:
        """Names and globs of all buffers outside of ``modules`` that the selection covers, now and later."""
        return (*self.names, *self.buffers)


def select(
    root: nn.Module, patterns: Patterns, option: str, *, nested: bool = False, buffers: bool = False
) -> Selection:
    """Finds what patterns match.

    In a glob, ``*`` stands for any characters within one part of a dotted name, so that ``"layers.*"`` matches
    ``layers.0`` and not ``layers.0.linear``. A name or glob may also match parameters, and buffers where these are
    wanted.

    Args:
        root: The model.
        patterns: One pattern or several.
        option: Name of the option that the patterns were given for, for messages.
        nested: Whether modules inside another matched one are wanted, too.
        buffers: Whether buffers are wanted, too.

    Raises:
        ValueError: If a pattern matches nothing; names that come near are shown.
        TypeError: If a pattern is of another kind.
    """
    modules = {name: module for name, module in root.named_modules() if name}
    params = dict(root.named_parameters(remove_duplicate=False))
    held = dict(root.named_buffers(remove_duplicate=False)) if buffers else {}
    kinds = "submodule, parameter or buffer of the model" if buffers else "submodule or parameter of the model"
    listed = _as_list(patterns, option)
    hit_modules: dict[str, nn.Module] = {}
    hit_params: dict[str, nn.Parameter] = {}
    hit_buffers: set[torch.Tensor] = set()
    for pattern in listed:
        found_modules = [name for name, module in modules.items() if _matches(pattern, name, module)]
        found_params = [name for name in params if isinstance(pattern, str) and matches_name(pattern, name)]
        found_buffers = [name for name in held if isinstance(pattern, str) and matches_name(pattern, name)]
        if not found_modules and not found_params and not found_buffers:
            if isinstance(pattern, str):
                raise ValueError(nothing_matched(pattern, option, kinds, [*modules, *params, *held]))
            raise ValueError(f"`{option}`: {getattr(pattern, '__name__', pattern)} matches no submodule of the model.")
        hit_modules.update((name, modules[name]) for name in found_modules)
        hit_params.update((name, params[name]) for name in found_params)
        hit_buffers.update(held[name] for name in found_buffers)
    inside = {child for module in hit_modules.values() for child in module.modules() if child is not module}
    matched = {name: module for name, module in modules.items() if name in hit_modules}
    roots = {name: module for name, module in matched.items() if nested or module not in inside}
    covered = {tensor for module in roots.values() for tensor in (*module.parameters(), *module.buffers())}
    loose = {name: param for name, param in params.items() if name in hit_params and param not in covered}
    loose_buffers = {name: held[name] for name in held if held[name] in hit_buffers - covered}
    names = tuple(pattern for pattern in listed if buffers and isinstance(pattern, str))
    return Selection(roots, loose, loose_buffers, names)


def select_existing(root: nn.Module, patterns: Patterns, option: str) -> Selection:
    """Modules and parameters where patterns may match nothing yet: before ``configure_model`` has built everything."""
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
        return matches_name(pattern, name)
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(name, module))
