"""What one ``replicate()`` call owns: its modules, its groups of parameters, its hooks and its switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import broadcast_from_first
from lightning_replicate.core.api import Options, Plan, RoundStats
from lightning_replicate.core.bucket import Slot
from lightning_replicate.core.buffers import BufferSync
from lightning_replicate.core.channel import Channel
from lightning_replicate.core.collect import Watch, managed_modules, own_parameters, slot_of, validate_parameters
from lightning_replicate.core.collect import slots as slots_by_param
from lightning_replicate.core.marks import FUNCTION_NAME, ForwardHook, PlainCopy
from lightning_replicate.core.reducer import Reducer


class ReplicateState:
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
        self._options = Options()
        self._broadcast = True
        self.channel: Channel | None = None
        self._reducers: list[Reducer] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._buffers: BufferSync | None = None
        self._buffers_round = -1
        self._structure_changed = False
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
                self._reducers.append(reducer)
            for reducer in self._reducers:
                reducer.agree(broadcast=False)
            self._buffers = BufferSync(options.buffers, self._walk, self.channel.gradients)
            self._buffers.equalize_new(self.channel.control, broadcast=broadcast)
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
        self._watch.look(self.managed_modules())
        for parent in parents:
            parent.refresh()

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
            slots_by_param[id(slot.param)] = slot
        return list(losers)

    def _after_round(self) -> None:
        self._structure_changed = False  # the layout was followed at the end of the round
        # once a round, however many of this call's groups took part
        assert self.channel is not None and self._buffers is not None
        if self._buffers_round != self.channel.closed_rounds:
            self._buffers_round = self.channel.closed_rounds
            self._buffers.after_round()

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

    def _walk(self) -> list[tuple[str, nn.Module]]:
        return [
            found
            for module, prefix in zip(self.modules, self._prefixes, strict=True)
            for found in managed_modules(module, prefix, self._ignored_modules)
        ]

    # ---- following the model ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Notices parameters that were added, replaced or taken away since last time. Local and cheap."""
        if not self._watch.changed():
            return
        self._structure_changed = True
        self._watch.look(self.managed_modules())
        known = {id(slot.param): slot for reducer in self._reducers for slot in reducer.slots}
        current = dict(self._parameters())
        new = [(name, param) for name, param in current.items() if id(param) not in known and slot_of(param) is None]
        present = {id(param) for param in current.values()}
        for reducer in self._reducers:
            gone = [slot for slot in reducer.slots if id(slot.param) not in present]
            if gone:
                reducer.drop(gone)
        validate_parameters(new, self.modules)
        first = self._reducers[0]
        slots = [Slot(name, param, first) for name, param in new]
        slots_by_param.update((id(slot.param), slot) for slot in slots)
        first.manage(slots)
        if self._buffers is not None:
            self._buffers.rescan()

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
        if self._buffers is not None and self.channel is not None:
            self._buffers.equalize_new(self.channel.control, broadcast=self._broadcast)

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
        if not self.active or _private.current_graph_task_id() != -1:
            return
        self.validate()
        self.follow()
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

    @contextmanager
    def round(self) -> Iterator[None]:
        """Makes sure that one round is closed, whether or not this rank comes to a backward inside.

        A rank that has no backward, or one that reaches no replicated parameter, takes part with nothing when it
        leaves the block, so that the others do not wait for it.

        Example::

            with state.round():
                if batch is not None:
                    loss(model(batch)).backward()
        """
        before = self.closed_rounds
        yield
        if self.closed_rounds == before:
            self.close_round(took_part=False)

    def close_round(self, *, took_part: bool = True) -> None:
        """Takes part in one round without a backward. Collective: every rank must close a round.

        Args:
            took_part: Whether this rank counts in the average: it does if it had a loss that reached no parameter.
        """
        if self.active and self.requires_gradient_sync:
            assert self.channel is not None
            self.channel.close_without_backward(took_part=took_part)

    @property
    def closed_rounds(self) -> int:
        """How many rounds were closed on this process group, by any group."""
        return 0 if self.channel is None else self.channel.closed_rounds

    def set_weight(self, weight: float, *, scale: float = 1.0) -> None:
        """Sets how much this rank's next losses count: their number of samples or tokens, say. Holds until set again.

        Each loss is taken for a mean over its samples. A round's gradient is the sum over ranks and accumulated
        backwards of weight times gradient, divided by the sum of all weights: that of one process on the whole batch.

        Args:
            weight: A number that is not negative.
            scale: Undoes a division of the loss by somebody else (an accumulation loop that divides by its length).

        Raises:
            ValueError: If the weight is negative, or ``average`` is not ``"weighted"``.
        """
        if self._options.average != "weighted":
            raise ValueError(f"A weight needs replicate(average='weighted'); this call uses {self._options.average!r}.")
        if not weight >= 0:
            raise ValueError(f"A weight must be a number that is not negative, got {weight!r}.")
        for reducer in self._reducers:
            reducer.set_weight(float(weight), scale)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divides the sum over ranks by this number, whatever ``average`` says; for loops that divide by themselves.

        Args:
            factor: A positive number; ``None`` follows ``average`` again.

        Raises:
            ValueError: If the factor is not positive, or a communication hook divides already.
        """
        if self._options.comm_hook is not None:
            raise ValueError("A `comm_hook` divides by the world size itself, so there is no other divide factor.")
        if factor is not None and not factor > 0:
            raise ValueError(f"A gradient divide factor must be positive, got {factor!r}.")
        for reducer in self._reducers:
            reducer.set_divide_factor(factor)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Lets a DDP communication hook move the gradients from the next round on. Collective.

        The hook has DDP's meaning: it gets the bucket's gradients, not divided by the world size, and the value of the
        future that it returns becomes the gradients.

        Args:
            state: First argument of the hook. ``None`` gives it the process group that carries our gradients.
            hook: ``hook(state, bucket) -> Future``.

        Raises:
            TypeError: If the hook cannot be called.
            RuntimeError: If there is one already.
            ValueError: If ``reduce_dtype`` or ``average="sum"`` was chosen, which a hook cannot keep.
        """
        if self._options.comm_hook is not None:
            raise RuntimeError("A communication hook is registered already; there can be one for a replicate() call.")
        if not callable(hook):
            raise TypeError(f"A communication hook must be callable, got {type(hook).__name__}.")
        self._options = replace(self._options, comm_hook=hook, comm_hook_state=state)
        for reducer in self._reducers:
            reducer.set_options(self._options)
        self.refresh()

    @property
    def requires_gradient_sync(self) -> bool:
        """Whether backward averages gradients."""
        return all(reducer.requires_sync for reducer in self._reducers)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Switches averaging on or off, for gradient accumulation. What counts is the switch during backward.

        Args:
            requires_gradient_sync: Whether the next backward averages, along with what was accumulated before.
        """
        for reducer in self._reducers:
            reducer.requires_sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without communication inside the block. The same on all ranks."""
        before = [reducer.requires_sync for reducer in self._reducers]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for reducer, requires_sync in zip(self._reducers, before, strict=True):
                reducer.requires_sync = requires_sync

    def sync_buffers(self) -> None:
        """Gives all ranks rank 0's buffers that the ``buffers`` option synchronizes when they are read. Collective.

        Call it before an evaluation whose result should not depend on the rank, and at the end of training.
        """
        if self._buffers is not None:
            self._buffers.before_reading()

    def reset(self) -> None:
        """Takes the place of a backward that raised: the round is void, on all ranks, and the next one starts clean.

        Call it once on a rank whose backward (or the forward before it) raised and which goes on. The other ranks'
        backward raises :class:`~lightning_replicate.ReplicateError`; they may call it, too, and go on. On a GPU with
        a single group they do not notice, and all ranks must fail together.
        """
        if self.channel is not None:
            self.channel.reset()

    # ---- what a person looks at -------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What is reduced: bucket by bucket, with parameter names, data types and bytes."""
        plans = [reducer.plan() for reducer in self._reducers]
        return Plan(
            buckets=tuple(chain.from_iterable(plan.buckets for plan in plans)),
            world_size=self.world_size,
            frozen=tuple(chain.from_iterable(plan.frozen for plan in plans)),
        )

    @property
    def last_round(self) -> RoundStats | None:
        """What the last round sent; of the first group if the call made several. ``None`` before the first round."""
        return self._reducers[0].last_round if self._reducers else None

    @property
    def groups(self) -> tuple[Reducer, ...]:
        """The groups of parameters that reduce together."""
        return tuple(self._reducers)

    # ---- the end ----------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Takes everything off the modules again: hooks, buckets, the mark. Gradients stay, as ordinary tensors.

        Call it on all ranks.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self.modules:
            module.__dict__.pop("__getstate__", None)
            _private.unmark_composable(module, FUNCTION_NAME)
        self._forget()
        self.modules = ()
        self.active = False

    def _forget(self) -> None:
        for reducer in self._reducers:
            for slot in reducer.slots:
                if slot_of(slot.param) is slot:
                    del slots_by_param[id(slot.param)]
            reducer.release()
            reducer.channel.remove(reducer)
        self._reducers = []
        self.channel = None
        self._buffers = None
