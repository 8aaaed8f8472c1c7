"""Lazy modules (``nn.LazyLinear`` and the like), whose parameters get shapes and values in their first forward.

A forward never communicates, so ranks draw these values alike: from a seed that they agreed on at set-up, whatever
their own generators are at. The parameters are the objects that an optimizer may hold already, and they join the
layout in the round that follows, like any others that come later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_replicate import _private


def uninitialized(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that these modules hold themselves and that have no values yet."""
    held = [param for module in modules for param in _private.parameters_of(module).values() if param is not None]
    return [param for param in held if nn.parameter.is_lazy(param)]


def draw_alike(modules: Iterable[nn.Module], seed: int, then: Callable[[], None]) -> list[Any]:
    """Makes lazy modules draw their first values from a seed, instead of the generator of their rank.

    Args:
        modules: All modules, in the same order on all ranks.
        seed: The same on all ranks.
        then: Called when one of them has got its parameters, before its forward.

    Returns:
        Handles that take the hooks off again.
    """
    lazy = [module for module in modules if isinstance(module, LazyModuleMixin) and uninitialized([module])]
    handles = []
    for number, module in enumerate(lazy):
        hook = _FirstForward(seed + number, then)
        handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        hook.done = handle.remove
        handles.append(handle)
    return handles


class _FirstForward:
    """The forward pre-hook of a lazy module. Inert in a copy of the module."""

    def __init__(self, seed: int | None, then: Callable[[], None]) -> None:
        self._seed = seed
        self._then = then
        self.done: Callable[[], None] = _nothing

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._seed is None:
            return
        if module.has_uninitialized_params():
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(self._seed)
                module.initialize_parameters(*args, **kwargs)  # torch's own hook comes next, and finds them there
        self.done()
        self._then()

    def __reduce__(self) -> Any:
        return (_FirstForward, (None, _nothing))


def _nothing() -> None:
    return None
