"""The entry point: validate, collect, install."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core import agreement
from lightning_replicate.core.api import (
    Average,
    BucketCap,
    BufferChoice,
    IgnoredBuffers,
    Options,
    UnaveragedGradients,
)
from lightning_replicate.core.buffers import names_to_ignore
from lightning_replicate.core.channel import Channel
from lightning_replicate.core.collect import all_names, collect, is_fsdp1, slot_of, validate_parameters
from lightning_replicate.core.dtensor import is_dtensor
from lightning_replicate.core.layout import ParamSpec
from lightning_replicate.core.marks import FUNCTION_NAME
from lightning_replicate.core.state import ReplicateState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Replicate:
    """The callable behind :data:`replicate`: the function and its ``state``."""

    __name__ = __qualname__ = FUNCTION_NAME

    def __call__(
        self,
        *modules: nn.Module,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
        ignored_buffers: IgnoredBuffers = (),
        bucket_cap_mb: BucketCap = 25.0,
        reduce_dtype: torch.dtype | None = None,
        average: Average = "participants",
        comm_hook: Callable[..., Any] | None = None,
        broadcast: bool = True,
        buffers: BufferChoice = "auto",
        strict_unused: bool = False,
        unaveraged_gradients: UnaveragedGradients = "error",
    ) -> Any:
        """Trains modules data-parallel: their gradients are averaged over ranks whenever a backward reaches them.

        Nothing is wrapped. The modules keep their class, their names and their ``state_dict``; copies and pickles of
        them are plain modules. All modules of one call share buckets. A parameter belongs to the innermost call, so
        a child may be given to a call of its own, before or after its parent. Submodules that are sharded with
        ``fully_shard`` are left to it.

        Collective: ranks must make the same calls in the same order. Communicates here and in backward, and nowhere
        else. With a single rank it only marks the modules; so it does in a process without a process group, unless a
        launcher announced other processes (a model may be loaded from a checkpoint anywhere).

        Lazy modules join when they get their parameters, in their first forward, with the same values on all ranks; all
        ranks must run them in the same step for the first time.

        Args:
            *modules: The modules to replicate.
            mesh: Device mesh of the ranks that average together: 1-D, or ``("replicate", "shard")`` over all ranks, the
                mesh that ``fully_shard`` takes for the rest of the model. Default: all ranks.
            process_group: The same as a process group; give one of the two.
            ignored_modules: Submodules to leave alone, with all that is in them.
            ignored_params: Parameters to leave alone.
            ignored_buffers: Buffers that are each rank's own, a queue for instance, and may have another shape on each:
                the buffers themselves, or their names and globs (``*`` stays within one part of a dotted name). Names
                are those of the module's ``named_buffers()``, and begin with ``[0].``, ``[1].`` and so on where several
                modules are given. They stay ignored by name if they are assigned anew, and buffers that come later are
                ignored if a name or glob means them. Goes before globs and callables of ``buffers``.
            bucket_cap_mb: Gradients are sent in buckets of about this size, in MiB. The first is at most 1 MiB.
                ``"auto"`` measures in the first three rounds when gradients arrive and what messages cost, cuts where
                the round would end first, and keeps that cut if the next twelve rounds show it to be faster (on CPUs;
                elsewhere it is 25).
            reduce_dtype: Data type in which gradients travel, ``torch.bfloat16`` for instance. Default: their own.
            average: What the sum of the ranks' gradients is divided by. ``"participants"``: the number of ranks that
                had a backward in this round. ``"world"``: the number of ranks. ``"sum"``: one. ``"weighted"``: the
                sum of the weights set with :meth:`ReplicateState.set_weight`, with each gradient multiplied by its
                rank's weight.
            comm_hook: A DDP communication hook ``hook(state, bucket) -> Future``, or the pair ``(state, hook)``. It
                gets the undivided bucket and divides itself. Without a state it gets the process group.
            broadcast: Whether parameters and buffers take the values of the first rank now. Whether ranks hold the
                same parameters is checked in any case.
            buffers: Which buffers follow the first rank later on, and when: ``"auto"``, ``"step"``, ``"epoch"``,
                ``"start"``, names (globs) or a callable ``(name, buffer) -> bool``. See
                :mod:`lightning_replicate.core.buffers`.
            strict_unused: Whether a backward that leaves a parameter without a gradient, on any rank, raises on all
                ranks with the names, at its end. Costs a message in every round.
            unaveraged_gradients: What happens when an optimizer is about to step with a gradient that was not averaged:
                ``"error"`` with the parameter's name, ``"warn"``, or ``"allow"``, for loops in which each rank is meant
                to step by itself.

        Returns:
            What was given: the module, or a tuple if there were several.

        Raises:
            RuntimeError: If other processes were launched and ``torch.distributed`` is not initialized.
            TypeError: If something other than modules is given, or ``comm_hook`` cannot be called.
            ValueError: If an option is out of range, a module is already replicated or sharded, a parameter is on the
                meta device or a ``DTensor``, or an ignored buffer is none of the modules' (a buffer, too, belongs to
                the innermost call).
            ReplicateError: On all ranks, with the first difference, if ranks hold different parameters or buffers.

        Source: the composable ``replicate`` prototype of pytorch/pytorch#87649 and what its reviewers asked for.
        """
        hook_state, hook = comm_hook if isinstance(comm_hook, tuple) else (None, comm_hook)
        options = Options(
            bucket_cap_mb=bucket_cap_mb,
            reduce_dtype=reduce_dtype,
            average=average,
            comm_hook=hook,
            comm_hook_state=hook_state,
            buffers=buffers,
            strict_unused=strict_unused,
            unaveraged_gradients=unaveraged_gradients,
        )
        apply(
            modules,
            options,
            process_group=_resolve_group(mesh, process_group),
            ignored_modules=ignored_modules,
            ignored_params=ignored_params,
            ignored_buffers=ignored_buffers,
            broadcast=broadcast,
        )
        return modules[0] if len(modules) == 1 else modules

    def state(self, module: nn.Module) -> ReplicateState:
        """The state of the ``replicate()`` call that this module was given to.

        Raises:
            ValueError: If the module was not given to :func:`replicate`.
        """
        state = find_state(module)
        if state is not None:
            return state
        raise ValueError(
            f"replicate() was not applied to this module ({type(module).__name__}). Ask for the state of a module that"
            f" was given to replicate() itself, not of a child or parent of it."
        )

    def __repr__(self) -> str:
        return "<function replicate>"


replicate = _Replicate()


class _Mark:
    """What torch's registry keeps on a marked module."""

    state: ReplicateState


def _make_mark() -> Any:
    # torch records the function's name, and `fully_shard` looks for "replicate"
    @_private.composable_contract()(state_cls=_Mark)
    def replicate(modules: list[nn.Module]) -> list[nn.Module]:
        return modules

    return replicate


_mark = _make_mark()


def find_state(module: nn.Module) -> ReplicateState | None:
    """The state of the call that this module was given to, or ``None``."""
    if FUNCTION_NAME not in _private.composable_registry(module):
        return None
    mark = _mark.state(module)
    return None if mark is None else mark.state  # None: torch's own `replicate`


def apply(
    modules: Sequence[nn.Module],
    options: Options,
    *,
    process_group: dist.ProcessGroup | None,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    ignored_buffers: IgnoredBuffers = (),
    broadcast: bool = True,
    names: dict[nn.Module, str] | None = None,
    partition: Callable[[nn.Parameter], int] | None = None,
) -> ReplicateState:
    """What :func:`replicate` does, with two more choices for code that knows more about the model.

    Args:
        modules: The modules to replicate.
        options: How gradients travel.
        process_group: The ranks that average together; ``None`` for a process on its own.
        ignored_modules: Submodules to leave alone.
        ignored_params: Parameters to leave alone.
        ignored_buffers: Buffers to leave alone, by ``names`` if these are given. Then some may lie elsewhere.
        broadcast: Whether values are equalized now.
        names: The modules' names, for reports. Default: empty for one module, their positions for several.
        partition: Gives each parameter the number of its group; groups reduce independently of each other.

    Returns:
        The state that was put on the modules.
    """
    roots = _roots(modules)
    for module in roots:
        former = find_state(module)
        if former is not None and not former.active:  # marked in a process of its own: nothing to undo
            former.remove()
    ignored_modules, ignored_params = list(ignored_modules), list(ignored_params)
    _validate(roots, ignored_modules, ignored_params)
    prefixes = [
        names[module] if names is not None else ("" if len(roots) == 1 else f"[{index}]")
        for index, module in enumerate(roots)
    ]
    params = collect(roots, prefixes, ignored_modules, ignored_params)
    validate_parameters(params, roots)
    own_buffers = names_to_ignore(
        ignored_buffers,
        list(all_names(roots, prefixes, ignored_modules)),
        options.buffers,
        all_here=names is None,
    )
    groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        groups.setdefault(0 if partition is None else partition(param), []).append((name, param))
    state = ReplicateState()
    state.install(
        roots,
        prefixes,
        [groups[number] for number in sorted(groups)] or [[]],
        process_group,
        options,
        ignored_modules=ignored_modules,
        ignored_params=ignored_params,
        ignored_buffers=own_buffers,
        broadcast=broadcast,
    )
    _mark(roots)
    _mark.state(roots[0]).state = state  # one mark for all modules of the call
    state.refresh_parents()
    return state


def states_in(root: nn.Module) -> list[ReplicateState]:
    """The states of all calls on the module and its submodules, in the order of the modules."""
    found = (find_state(module) for module in root.modules())
    return list({id(state): state for state in found if state is not None}.values())


def equalize(
    root: nn.Module,
    *,
    local: Iterable[torch.Tensor],
    process_group: dist.ProcessGroup,
) -> None:
    """Gives what no ``replicate()`` call manages the first rank's values: frozen teachers, loose buffers.

    Collective.

    Args:
        root: The model.
        local: Parameters and buffers to leave alone.
        process_group: The ranks that become equal.

    Raises:
        ReplicateError: On all ranks, if they hold different parameters or buffers.
    """
    if dist.get_world_size(process_group) == 1:
        return
    walked = {module for state in states_in(root) for module in state.managed_modules()}
    keep = set(local)
    rest: dict[str, torch.Tensor] = {}
    for name, module in root.named_modules():
        own: dict[str, torch.Tensor | None] = dict(_private.parameters_of(module))
        if module not in walked:
            own.update(_private.buffers_of(module))
        for key, tensor in own.items():
            if tensor is None or nn.parameter.is_lazy(tensor):
                continue
            if tensor in keep or is_dtensor(tensor) or slot_of(tensor) is not None:
                continue
            rest[f"{name}.{key}" if name else key] = tensor
    channel = Channel.of(process_group)
    specs = [ParamSpec.of(name, tensor) for name, tensor in rest.items()]
    agreement.require_same_specs(specs, "not replicated", channel.control)
    on_cpu = [tensor for tensor in rest.values() if tensor.device.type == "cpu"]  # nccl could not send these
    agreement.broadcast_from_first(on_cpu, channel.control)
    others = [tensor for tensor in rest.values() if tensor.device.type != "cpu"]
    agreement.broadcast_from_first(others, channel.gradients)


def _resolve_group(mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        if mesh is None and process_group is None and _launched_alone():
            return None
        raise RuntimeError(
            "replicate() needs an initialized default process group: call `torch.distributed.init_process_group()`"
            " before it, or let `Trainer(strategy='replicate')` do both."
        )
    if mesh is not None and process_group is not None:
        raise ValueError("Give either `mesh` or `process_group`, not both.")
    if mesh is not None:
        if mesh.ndim == 1:
            process_group = mesh.get_group()
        elif mesh.mesh_dim_names != ("replicate", "shard") or mesh.size() != dist.get_world_size():
            raise ValueError(
                f"`mesh` must have one dimension, the ranks that average together, or the dimensions ('replicate',"
                f" 'shard') over all ranks, as `fully_shard` takes them; got {mesh.ndim}, {mesh.mesh_dim_names}. Take"
                f" the one to replicate over, for instance `mesh['replicate']`, or flatten it."
            )
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("This rank is not a member of the process group that was given to replicate().")
    return group


def _launched_alone() -> bool:
    """Whether no launcher announced other processes (torchrun, SLURM, MPI)."""
    sizes = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return all(os.environ.get(name, "1") == "1" for name in sizes)


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The given modules without those that lie inside another one."""
    if not modules:
        raise TypeError("replicate() needs at least one module.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"replicate() takes modules, got {type(module).__name__}.")
    inside = {child for module in modules for child in module.modules() if child is not module}
    return list(dict.fromkeys(module for module in modules if module not in inside))


def _validate(
    roots: Sequence[nn.Module], ignored_modules: Sequence[nn.Module], ignored_params: Sequence[nn.Parameter]
) -> None:
    for module in ignored_modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"`ignored_modules` takes modules, got {type(module).__name__}.")
    for param in ignored_params:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"`ignored_params` takes parameters, got {type(param).__name__}.")
    for module in roots:
        registry = _private.composable_registry(module)
        if FUNCTION_NAME in registry:
            raise ValueError(
                f"replicate() was already applied to this module ({type(module).__name__}). Take it off first with"
                f" `replicate.state(module).remove()`."
            )
        if is_fsdp1(module):
            raise ValueError(
                "A module wrapped with FullyShardedDataParallel cannot be replicated, it reduces its gradients itself."
                " Give replicate() a parent of it, or another module."
            )
        if "fully_shard" in registry:
            raise ValueError(
                f"This module ({type(module).__name__}) is already sharded by `fully_shard`. Choose one of them for"
                f" this module; children of it may have the other."
            )
