"""Which modules and parameters a ``replicate()`` call manages, and who owns a parameter."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.bucket import Slot
from lightning_replicate.core.dtensor import is_dtensor
from lightning_replicate.core.marks import FUNCTION_NAME


class _Ownership:
    """Which slot averages a parameter.

    Attributes:
        changes: How often that has changed, for whoever remembers the answer.
    """

    def __init__(self) -> None:
        self.changes = 0
        # by the id of the parameter, which a slot keeps alive
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

    def take(self, slot: Slot) -> None:
        """Makes the slot the one that averages its parameter."""
        self._slots[id(slot.param)] = slot
        self.changes += 1

    def give_up(self, slot: Slot) -> None:
        """Leaves the parameter to nobody, if it is the slot's."""
        if slot_of(slot.param) is slot:
            del self._slots[id(slot.param)]
            self.changes += 1

    def find(self, param: torch.Tensor) -> Slot | None:
        """The slot that averages this parameter, or ``None``."""
        return self._slots.get(id(param))


ownership = _Ownership()
slot_of = ownership.find


def managed_modules(root: nn.Module, prefix: str, ignored: Iterable[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Walks the modules that a ``replicate()`` call on ``root`` manages, each once, with its name.

    Leaves out ignored subtrees, and those that another composable function owns: a child of its own ``replicate()``
    call, or one sharded by ``fully_shard`` or ``FullyShardedDataParallel``.
    """
    seen = set(ignored)

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        yield name, module
        for key, child in _private.children_of(module).items():
            if child is not None and not _has_another_owner(child):
                yield from walk(child, f"{name}.{key}" if name else key)

    yield from walk(root, prefix)


def all_names(
    roots: Iterable[nn.Module], prefixes: Iterable[str], ignored: Iterable[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """The managed modules under each of their names: a module may be held in several places."""
    ignored = set(ignored)
    for root, prefix in zip(roots, prefixes, strict=True):
        managed = {module for _, module in managed_modules(root, prefix, ignored)}
        for name, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            if module in managed:
                yield name, module


def _has_another_owner(module: nn.Module) -> bool:
    owned = _private.composable_registry(module).keys() & {FUNCTION_NAME, "fully_shard"}
    return bool(owned) or is_fsdp1(module)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether this is a module of ``FullyShardedDataParallel``, which reduces its parameters itself."""
    # by name: importing the class takes long, and who has one has imported it
    return any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__)


class Watch:
    """Notices parameters and submodules that come, go, or are replaced. Cheap enough for every step."""

    def __init__(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._values: list[Any] = []

    def look(self, modules: Iterable[nn.Module]) -> None:
        """Remembers what these modules hold now."""
        both = (_private.parameters_of, _private.children_of)
        self._dicts = [held_by(module) for module in modules for held_by in both]
        self._values = self._now()

    def forget(self) -> None:
        """Makes the next question whether something changed be answered with yes."""
        self._values = [None, *self._values]

    def in_flux(self) -> bool:
        """Whether tensors that are no parameters stand in their place, as in ``torch.func.functional_call``."""
        return any(isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) for value in self._now())

    def changed(self) -> bool:
        """Whether they hold something else by now."""
        now = self._now()
        return len(now) != len(self._values) or not all(map(operator.is_, now, self._values))

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))


def own_parameters(
    modules: Iterable[tuple[str, nn.Module]], ignored: Iterable[nn.Parameter] = ()
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that these modules hold themselves, each once, with their names; not those without values yet."""
    seen = set(ignored)
    for prefix, module in modules:
        for key, param in _private.parameters_of(module).items():
            if param is not None and param not in seen and not nn.parameter.is_lazy(param):
                seen.add(param)
                yield (f"{prefix}.{key}" if prefix else key), param


def collect(
    roots: Sequence[nn.Module],
    prefixes: Sequence[str],
    ignored_modules: Sequence[nn.Module],
    ignored_params: Sequence[nn.Parameter],
) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this call: each once, and none that a call on another module already averages.

    A parameter of a call on a parent is taken over: the innermost call owns it.
    """
    taken: set[nn.Parameter] = set(ignored_params)
    taken.update(param for module in ignored_modules for param in module.parameters())
    found: list[tuple[str, nn.Parameter]] = []
    for root, prefix in zip(roots, prefixes, strict=True):
        for name, param in own_parameters(managed_modules(root, prefix, ignored_modules), taken):
            taken.add(param)
            slot = slot_of(param)
            if slot is None or _lies_inside(root, slot.reducer.owner.modules):
                found.append((name, param))
    return found


def _lies_inside(module: nn.Module, parents: Iterable[nn.Module]) -> bool:
    return any(child is module for parent in parents for child in parent.modules())


def validate_parameters(params: Iterable[tuple[str, nn.Parameter]], modules: Sequence[nn.Module]) -> None:
    """Checks that parameters are of a kind that can be replicated.

    Raises:
        ValueError: If one is on the meta device, a DTensor, or has an optimizer that runs in backward.
    """
    for name, param in params:
        if _private.has_optimizer_in_backward(param):
            raise ValueError(
                f"Parameter {name!r} has an optimizer that runs in backward, which steps before gradients are averaged."
                f" Step the optimizer after backward, or leave the parameter out with `ignored_params`."
            )
        if param.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and holds no values. Give the module memory first"
                f" (`module.to_empty(device=...)`, then its initialization)."
            )
        if is_dtensor(param):
            owners = ", ".join(type(module).__name__ for module in modules)
            raise ValueError(
                f"Parameter {name!r} is a DTensor: a parent of it was sharded with `fully_shard`, or it is tensor-"
                f"parallel, and so it cannot be replicated by replicate() on {owners}. Call replicate() on the child"
                f" before `fully_shard` on its parent, or leave it out with `ignored_modules`."
            )
