"""What sits on a marked module itself: a hook that looks at it before each forward, and a way to copy it without us."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError

FUNCTION_NAME = "replicate"
"""The name under which torch's composable registry knows us; ``fully_shard`` looks for exactly this one."""


class State(Protocol):
    """What a hook needs to know of the state that put it on its module."""

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    def pre_forward(self) -> None: ...


class ForwardHook:
    """The forward pre-hook of a marked module. Inert in a copy of the module."""

    def __init__(self, state: State | None) -> None:
        self._state: Callable[[], State | None] = weakref.ref(state) if state is not None else _nothing

    @_private.not_compiled
    def __call__(self, module: nn.Module, _: Any) -> None:
        state = self._state()
        if state is not None and any(module is own for own in state.modules):
            state.pre_forward()

    def __reduce__(self) -> Any:
        return (ForwardHook, (None,))


def _nothing() -> None:
    return None


class PlainCopy:
    """Gives copies and pickles of a marked module a state in which replicate() was never called.

    Installed as ``__getstate__`` on the module itself, which is where both ``copy`` and ``pickle`` look it up, so that
    the module's class stays what it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        module = self._module()
        if module is None:
            raise ReplicateError("The state of a replicated module was asked for after the module was gone.")
        own = getattr(type(module), "__getstate__", None)
        state = module.__dict__ if own is None else own(module)
        if not isinstance(state, dict):
            return state
        plain = _private.without_composable(state, FUNCTION_NAME)
        plain.pop("__getstate__", None)
        hooks = _private.forward_pre_hooks_of(module)
        plain["_forward_pre_hooks"] = type(hooks)(
            (key, hook) for key, hook in hooks.items() if not isinstance(hook, ForwardHook)
        )
        return plain
