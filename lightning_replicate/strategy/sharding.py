"""Which submodules are sharded with FSDP2, how, and what must hold before a shard is cut.

``fully_shard`` does not make ranks equal: each rank would keep its own part of its own values. So everything is made
equal first, in :func:`shard` for what the strategy shards, in :func:`equal_start` around ``configure_model`` for what
the user shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.dtensor import is_dtensor
from lightning_replicate.core.replicate import apply, equalize
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy.selection import Pattern, Patterns, Selection, select

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ShardPatterns = Union[Patterns, Mapping[Any, Mapping[str, Any]]]
"""What to shard: patterns, or a mapping from pattern to arguments of ``fully_shard`` for what it matches."""


@dataclass(frozen=True)
class ShardPolicy:
    """What is sharded, and how.

    Attributes:
        patterns: What to shard.
        options: Arguments of ``fully_shard`` for everything that is matched.
    """

    patterns: ShardPatterns = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def select(self, root: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
        """Finds the modules, children before parents, each with its arguments. A later pattern overrides.

        Raises:
            ValueError: If a pattern matches nothing, or a parameter.
        """
        found: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        for pattern, options in self._each():
            selection = select(root, pattern, "shard", nested=True)
            if selection.params:
                raise ValueError(f"`shard` takes modules; {next(iter(selection.params))!r} is a parameter.")
            for name, module in selection.modules.items():
                found[name] = (module, {**self.options, **options})
        order = {name: number for number, (name, _) in enumerate(root.named_modules())}
        return dict(sorted(found.items(), key=lambda item: -order[item[0]]))  # parents come first in the model's order

    def _each(self) -> Iterator[tuple[Pattern | Patterns, Mapping[str, Any]]]:
        if isinstance(self.patterns, Mapping):
            yield from self.patterns.items()
        elif self.patterns != ():
            yield self.patterns, {}


def sharded_modules(root: nn.Module) -> dict[str, Any]:
    """The modules to which ``fully_shard`` was applied, by name."""
    return {
        name: module for name, module in root.named_modules() if "fully_shard" in _private.composable_registry(module)
    }


def has_sharded_parameters(root: nn.Module) -> bool:
    """Whether any parameter is a ``DTensor``."""
    return any(is_dtensor(param) for param in root.parameters())


def shard(
    root: nn.Module, policy: ShardPolicy, mesh: DeviceMesh, *, local: Selection, replicated: Selection | None
) -> None:
    """Makes ranks equal and shards what the policy chooses. Collective. What is sharded already stays as it is.

    Args:
        root: The model.
        policy: What to shard, and how.
        mesh: All data-parallel ranks.
        local: What stays each rank's own. Within sharded modules it is left alone.
        replicated: What was chosen to be replicated, if anything was. Within sharded modules it is left alone.

    Raises:
        ValueError: If choices contradict each other, or a parameter has two owners.
        ReplicateError: On all ranks, if they hold different parameters.
    """
    from torch.distributed.fsdp import fully_shard

    chosen = policy.select(root)
    todo = {name: found for name, found in chosen.items() if name not in sharded_modules(root)}
    if not todo:
        return
    others = [local] if replicated is None else [local, replicated]
    _require_one_choice(chosen, others)
    for name in () if replicated is None else replicated.params:
        if _owner(name, chosen):
            raise ValueError(
                f"Parameter {name!r} is to be replicated within module {_owner(name, chosen)!r}, which is to be"
                f" sharded. Only a module with all its parameters can be replicated there."
            )
    _require_one_owner(root, chosen)
    make_equal(root, local.all_tensors())
    left_alone = {param for selection in others for param in selection.all_parameters()}
    for module, options in todo.values():
        fully_shard(module, mesh=mesh, ignored_params=left_alone & set(module.parameters()), **options)


def make_equal(root: nn.Module, local: Iterable[torch.Tensor]) -> None:
    """Gives all parameters and buffers that are neither local nor sharded rank 0's values. Collective."""
    group = dist.group.WORLD
    assert group is not None
    equalize(root, local=local, process_group=group)


def _require_one_choice(sharded: Mapping[str, Any], others: Sequence[Selection]) -> None:
    for selection in others:
        for name in selection.modules.keys() & sharded.keys():
            raise ValueError(f"Module {name!r} is to be sharded, and to be replicated or local. Choose one of them.")


def _require_one_owner(root: nn.Module, sharded: Mapping[str, Any]) -> None:
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        owner = _owner(name, sharded)
        former_name, former = owners.setdefault(param, (name, owner))
        if former != owner:
            raise ValueError(_two_owners(former_name, former, name, owner))


def _owner(name: str, sharded: Iterable[str]) -> str:
    """The innermost sharded module around the parameter of this name; empty if there is none."""
    return max((module for module in sharded if name.startswith(f"{module}.")), key=len, default="")


def _two_owners(name: str, owner: str, other_name: str, other_owner: str) -> str:
    def of(name: str, owner: str) -> str:
        return f"{name!r} (" + (f"sharded with {owner!r}" if owner else "not sharded") + ")"

    return (
        f"One parameter is shared by {of(name, owner)} and {of(other_name, other_owner)}. Both must have the same"
        f" owner: shard a module that holds both, or neither."
    )


@contextmanager
def equal_start(root: nn.Module, local: Selection) -> Iterator[None]:
    """Makes parameters equal before ``configure_model`` may shard, and gives all the same random numbers in it.

    Collective. Afterwards each rank goes on with its own random numbers. Buffers become equal later, since
    ``configure_model`` may say which ones are each rank's own: ``replicate(..., ignored_buffers=...)``.

    Args:
        root: The model.
        local: What stays each rank's own, as far as it is there already.

    Raises:
        ValueError: If it sharded one of two modules that share a parameter.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    shared = [tied for tied in names.values() if len(tied) > 1]
    if not any(param.is_meta or nn.parameter.is_lazy(param) for param in names):
        make_equal(root, local.all_parameters() | set(root.buffers()))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
        dist.broadcast_object_list(states, src=0)
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state)
        yield
    now = dict(root.named_parameters(remove_duplicate=False))
    sharded = sharded_modules(root)
    for first, *others in shared:
        for other in others:
            if first in now and other in now and now[first] is not now[other]:
                raise ValueError(_two_owners(first, _owner(first, sharded), other, _owner(other, sharded)))


class ByHand:
    """What ``configure_model`` marked and sharded, so that it need not run, and shard, a second time.

    Lightning runs it for every entry point. Marks of ``replicate()`` go when a fit ends, shards stay.
    """

    _of: WeakKeyDictionary[nn.Module, list[tuple[Any, ...]]] = WeakKeyDictionary()

    @classmethod
    def remember(cls, root: nn.Module, states: Iterable[ReplicateState]) -> None:
        """Notes the calls that were made on a model that has sharded modules."""
        names: dict[Any, str] = {module: name for name, module in root.named_modules()}
        names.update((param, name) for name, param in root.named_parameters())
        cls._of[root] = [  # by name, since what refers to the model would keep it for ever
            (
                [names[module] for module in state.modules],
                state.options,
                [names[module] for module in state.ignored_modules],
                [names[param] for param in state.ignored_params if param in names],  # others were sharded since
                state.ignored_buffers,
            )
            for state in states
        ]

    @classmethod
    def mark_again(cls, root: nn.Module) -> None:
        """Makes the same calls of ``replicate()`` again. Collective."""
        for names, options, ignored_modules, ignored_params, ignored_buffers in cls._of.get(root, ()):
            apply(  # without `names`: those of buffers are as they were in the user's call
                [root.get_submodule(name) for name in names],
                options,
                process_group=dist.group.WORLD,
                ignored_modules=[root.get_submodule(name) for name in ignored_modules],
                ignored_params=[root.get_parameter(name) for name in ignored_params],
                ignored_buffers=ignored_buffers,
            )

    @classmethod
    def knows(cls, root: nn.Module) -> bool:
        """Whether ``configure_model`` has done its work on this model."""
        return root in cls._of


def prepare(modules: Iterable[Any]) -> None:
    """Lets sharded modules cope with ranks that use different parameters of a group.

    Without it FSDP2 sends only what has a gradient: it sums gradients of different parameters into each other where
    sizes are equal, without a word.
    """
    for module in modules:
        switch: Callable[..., None] | None = getattr(module, "set_reduce_scatter_unused_params", None)
        if switch is not None:
            switch(True, recurse=False)


def move_plain(root: nn.Module, device: torch.device) -> None:
    """Moves all but sharded parameters, which are where their policy wants them."""
    for module in root.modules():
        for param in _private.parameters_of(module).values():
            if param is not None and not is_dtensor(param) and param.device != device:
                param.data = param.data.to(device)
        buffers = _private.buffers_of(module)
        buffers.update({key: buffer if buffer is None else buffer.to(device) for key, buffer in buffers.items()})
