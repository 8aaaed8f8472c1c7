"""What one ``replicate()`` call owns: its modules, its groups of parameters, its hooks and its switches."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import broadcast_from_first, gather_numbers
from lightning_replicate.core.api import Options, Plan, RoundStats
from lightning_replicate.core.bucket import Slot
from lightning_replicate.core.buffers import BufferSync, buffers_in
from lightning_replicate.core.channel import Channel, any_groups
from lightning_replicate.core.collect import (
    Watch,
    managed_modules,
    own_parameters,
    ownership,
    slot_of,
    validate_parameters,
)
from lightning_replicate.core.lazy import draw_alike, uninitialized
from lightning_replicate.core.marks import FUNCTION_NAME, ForwardHook, PlainCopy
from lightning_replicate.core.reducer import Reducer
from lightning_replicate.core.stepping import watch_optimizers
from lightning_replicate.core.switches import Switches


class ReplicateState(Switches):
    """The state of one ``replicate()`` call; get it with ``replicate.state(module)``.

    Attributes:
        modules: The modules that were given, without those that lie inside another one.
        world_size: Number of ranks that average together.
        active: Whether there is anything to average: false with a single rank, where no hook is installed.
        channel: The queue that this call's groups share with all others on the same process group.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.world_size = 1
        self.active = False
        self._prefixes: tuple[str, ...] = ()
        self._ignored_modules: frozenset[nn.Module] = frozenset()
        self._ignored_params: frozenset[nn.Parameter] = frozenset()
        self._ignored_buffers: tuple[str, ...] = ()
        self._options = Options()
        self._broadcast = True
        self.channel: Channel | None = None
        self._reducers: list[Reducer] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._buffers: BufferSync | None = None
        self._buffers_round = -1
        self._structure_changed = False
        self._tentative = False
        self._parents: list[ReplicateState] = []
        self._watch = Watch()

    # ---- set-up: called by replicate() ------------------------------------------------------------------------

    def install(
        self,
        modules: Sequence[nn.Module],
        prefixes: Sequence[str],
        groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
        process_group: dist.ProcessGroup | None,
        options: Options,
        *,
        ignored_modules: Iterable[nn.Module],
        ignored_params: Iterable[nn.Parameter],
        ignored_buffers: Iterable[str],
        broadcast: bool,
    ) -> None:
        """Agrees with all ranks, equalizes values, plans buckets and installs hooks. Collective.

        Raises:
            ReplicateError: On all ranks, if they hold different parameters. Nothing is installed then.
        """
        self.modules = tuple(modules)
        self._prefixes = tuple(prefixes)
        self._ignored_modules = frozenset(ignored_modules)
        self._ignored_params = frozenset(ignored_params)
        self._ignored_buffers = tuple(ignored_buffers)
        self._options = options
        self._broadcast = broadcast
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        if process_group is None or self.world_size == 1:
            return
        self.active = True
        self.channel = Channel.of(process_group)
        try:
            for params in groups:
                reducer = Reducer(self.channel, options, owner=self)
                reducer.manage([Slot(name, param, reducer) for name, param in params])
                reducer.before_round = self.follow
                reducer.after_round = self._after_round
                reducer.broadcast = broadcast
                self._reducers.append(reducer)
            for reducer in self._reducers:
                reducer.agree(broadcast=False)
            self._buffers = BufferSync(
                options.buffers, self._walk, self.channel.gradients, self.channel.control, self._ignored_buffers
            )
            self._buffers.equalize_new(broadcast=broadcast)
        except BaseException:
            self._forget()
            raise
        parents = self._take_over(slot for reducer in self._reducers for slot in reducer.slots)
        if broadcast:
            with torch.profiler.record_function("replicate::broadcast"):
                broadcast_from_first(self.parameters(), self.channel.gradients)
        for reducer in self._reducers:
            reducer.build()
        for module in self.modules:
            self._handles.append(module.register_forward_pre_hook(ForwardHook(self)))
            module.__dict__["__getstate__"] = PlainCopy(module)
        self._await_lazy_modules()
        self._watch.look(self.managed_modules())
        self._parents = parents
        watch_optimizers(on=True)

    def _await_lazy_modules(self) -> None:
        modules = self.managed_modules()
        if uninitialized(modules):
            assert self.channel is not None
            seed = gather_numbers([torch.initial_seed() % 2**31], self.channel.control)[0][0]
            state = weakref.ref(self)  # the modules hold the hooks

            def initialized() -> None:
                alive = state()
                if alive is not None and alive.active:
                    alive.follow_lazy_modules()

            self._handles.extend(draw_alike(modules, seed, initialized))

    def follow_lazy_modules(self) -> None:
        """Takes over parameters that have just got their values, so that the coming backward finds its hooks."""
        self._watch.forget()  # they are the same objects as before
        self.follow(only_add=True)
        for reducer in self._reducers:
            reducer.follow()

    def uninitialized_parameters(self) -> list[nn.Parameter]:
        """The parameters of lazy modules that this call will average as soon as they have values."""
        return uninitialized(self.managed_modules())

    def refresh_parents(self) -> None:
        """Lets the calls on parents that lost parameters to this one plan anew. Collective."""
        for parent in self._parents:
            parent.look_again()
        self._parents = []

    def look_again(self) -> None:
        """Follows the model although it holds the same: marks on submodules came or went. Collective."""
        self._watch.forget()
        self.refresh()

    def _take_over(self, slots: Iterable[Slot]) -> list[ReplicateState]:
        """Makes these slots the owners of their parameters: the innermost call owns a parameter.

        Returns:
            The states of the calls on parents that lost parameters.
        """
        losers: dict[ReplicateState, None] = {}
        for slot in slots:
            former = slot_of(slot.param)
            if former is not None:
                losers[former.reducer.owner] = None
                former.reducer.drop([former])
            ownership.take(slot)
        return list(losers)

    def _after_round(self) -> None:
        self._structure_changed = False  # the layout was followed at the end of the round
        # once a round, however many of this call's groups took part
        assert self.channel is not None and self._buffers is not None
        if self._buffers_round != self.channel.closed_rounds:
            self._buffers_round = self.channel.closed_rounds
            self._buffers.after_round()

    @property
    def options(self) -> Options:
        """How gradients travel."""
        return self._options

    @property
    def ignored_modules(self) -> frozenset[nn.Module]:
        """The modules that the call left alone."""
        return self._ignored_modules

    @property
    def ignored_params(self) -> frozenset[nn.Parameter]:
        """The parameters that the call left alone."""
        return self._ignored_params

    @property
    def ignored_buffers(self) -> tuple[str, ...]:
        """Names and globs of the buffers that the call left alone."""
        return self._ignored_buffers

    @property
    def average(self) -> str:
        """What the sum of gradients is divided by."""
        return self._options.average

    def managed_modules(self) -> list[nn.Module]:
        """The modules whose parameters and buffers this call looks after."""
        return [module for _, module in self._walk()]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this call averages, frozen ones included."""
        if self.active:
            return [slot.param for reducer in self._reducers for slot in reducer.slots]
        return [param for _, param in self._parameters()]

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that this call looks after: all but those that it was told to ignore."""
        return [held.buffer for held in buffers_in(self._walk(), self._ignored_buffers)]

    def _walk(self) -> list[tuple[str, nn.Module]]:
        return [
            found
            for module, prefix in zip(self.modules, self._prefixes, strict=True)
            for found in managed_modules(module, prefix, self._ignored_modules)
        ]

    # ---- following the model ----------------------------------------------------------------------------------

    def follow(self, *, only_add: bool = False) -> None:
        """Notices parameters that were added, replaced or taken away since last time. Local and cheap.

        Args:
            only_add: Whether to let nothing go: during a forward other parameters may stand in for the model's own
                for a while (``torch.func.functional_call``).
        """
        if not (self._watch.changed() or self._tentative) or self._watch.in_flux():
            return
        self._structure_changed = True
        self._tentative = only_add
        known = {id(slot.param) for reducer in self._reducers for slot in reducer.slots}
        current = dict(self._parameters())
        new = [(name, param) for name, param in current.items() if id(param) not in known and self._may_take(param)]
        if not only_add:
            self._watch.look(self.managed_modules())
            self._let_go({id(param) for param in current.values()})
            if self._buffers is not None:
                self._buffers.rescan()
        validate_parameters(new, self.modules)
        first = self._reducers[0]
        slots = [Slot(name, param, first) for name, param in new]
        self._take_over(slots)
        first.manage(slots)

    def _let_go(self, present: set[int]) -> None:
        """Drops the parameters that are not present any more. They may come back, here or elsewhere."""
        for reducer in self._reducers:
            gone = [slot for slot in reducer.slots if id(slot.param) not in present]
            if gone:
                reducer.drop(gone)
            for slot in gone:
                ownership.give_up(slot)

    def _may_take(self, param: nn.Parameter) -> bool:
        """Whether nobody averages the parameter, or somebody does who no longer holds it."""
        slot = slot_of(param)
        return slot is None or all(param is not held for _, held in slot.reducer.owner._parameters())

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return own_parameters(self._walk(), self._ignored_params)

    def refresh(self) -> None:
        """Follows the model at once: new parameters and buffers take rank 0's values and enter the layout.

        Collective. Changes are noticed without it, but then at the end of the next backward, since a forward never
        communicates: call it after adding or replacing modules, so that the first step already uses equal weights.

        Raises:
            ReplicateError: On all ranks, if they hold different parameters.
        """
        if not self.active:
            return
        self.follow()
        for reducer in self._reducers:
            reducer.agree(broadcast=self._broadcast)
            reducer.build()
        self._structure_changed = False
        if self._buffers is not None:
            self._buffers.equalize_new(broadcast=self._broadcast)

    @property
    def has_new_parameters(self) -> bool:
        """Whether parameters were added, replaced or taken away since the layout was agreed."""
        if self.active:
            self.follow()
        return self._structure_changed

    # ---- around a step ----------------------------------------------------------------------------------------

    def pre_forward(self) -> None:
        """Looks at the model before it is used, so that parameters which just became trainable are hooked.

        Runs as a forward pre-hook of the marked modules. Never communicates.

        Raises:
            ValueError: If ``fully_shard`` was applied to a marked module, too.
        """
        if not self.active or not torch.is_grad_enabled() or _private.current_graph_task_id() != -1:
            return
        self.validate()
        self.follow(only_add=True)
        for reducer in self._reducers:
            reducer.follow()

    def validate(self) -> None:
        """Checks that nobody else took the marked modules over.

        Raises:
            ValueError: If ``fully_shard`` was applied to a marked module, too.
        """
        for module in self.modules:
            if "fully_shard" in _private.composable_registry(module):
                raise ValueError(
                    f"`fully_shard` and `replicate` were both applied to the same module ({type(module).__name__})."
                    f" Choose one of them for this module; children of it may have the other."
                )

    # ---- what a person looks at -------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What is reduced: bucket by bucket, with parameter names, data types and bytes."""
        return Plan.joined([reducer.plan() for reducer in self._reducers], self.world_size)

    @property
    def last_round(self) -> RoundStats | None:
        """What the last round sent; of the first group if the call made several. ``None`` before the first round."""
        return self._reducers[0].last_round if self._reducers else None

    @property
    def groups(self) -> tuple[Reducer, ...]:
        """The groups of parameters that reduce together."""
        return tuple(self._reducers)

    # ---- the end ----------------------------------------------------------------------------------------------

    def remove(self, *, give_back: bool = True) -> None:
        """Takes everything off the modules again: hooks, buckets, the mark. Gradients stay, as ordinary tensors.

        Call it on all ranks.

        Args:
            give_back: Whether calls on parents take over what this call averaged, which is collective.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self.modules:
            module.__dict__.pop("__getstate__", None)
            _private.unmark_composable(module, FUNCTION_NAME)
        channel, modules = self.channel, set(self.modules)
        self._forget()
        self.modules = ()
        self.active = False
        if channel is not None and give_back:
            for parent in channel.owners():  # what this call owned belongs to calls on parents again
                if any(child in modules for root in parent.modules for child in root.modules()):
                    parent.look_again()

    def _forget(self) -> None:
        for reducer in self._reducers:
            for slot in reducer.slots:
                ownership.give_up(slot)
            reducer.release()
            reducer.channel.remove(reducer)
        watch_optimizers(on=any_groups())
        self._reducers = []
        self.channel = None
        self._buffers = None
