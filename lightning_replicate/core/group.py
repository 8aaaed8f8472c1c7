"""The parameters that reduce together, and the layout of buckets that all ranks agreed on for them.

A group follows the model: what the user does to parameters (freezes, converts, replaces) is noticed locally, and agreed
on by all ranks in :meth:`Group.agree` before :meth:`Group.build` makes a new layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate.core import agreement
from lightning_replicate.core.api import BucketPlan, Options, Plan
from lightning_replicate.core.bucket import Bucket, Slot
from lightning_replicate.core.layout import ParamSpec, assign_buckets
from lightning_replicate.core.planning import Arrivals, MessageCost, Trial, cut
from lightning_replicate.core.sparse import SparseBucket
from lightning_replicate.core.wire import Wire

# A parameter leaves the layout only after it was frozen for this many rounds in a row, so that code which freezes and
# unfreezes every step (Lightning's `toggle_optimizer`) does not force a new layout every step.
_FROZEN_ROUNDS = 8

# A parameter for which no rank had a gradient in this many rounds in a row leaves the layout, so that it costs no
# bytes. It comes back in the round in which a rank has one. That takes a new layout, so there is more patience with it
# the next time.
_IDLE_ROUNDS = 32
_MORE_PATIENCE = 4


class ProcessGroups(Protocol):
    """What a group needs to know of its channel."""

    gradients: dist.ProcessGroup
    control: dist.ProcessGroup
    hook_buckets: dict[tuple[str, ...], int]


class Group:
    """Some parameters and their agreed layout.

    Args:
        groups: The process groups over which they reduce and agree.
        options: How gradients travel.
        owner: Whoever made this group.
        index: Its number on its process groups.
        hook: Puts the gradient hooks on a parameter; called again when its memory changed.

    Attributes:
        slots: All managed parameters, frozen ones included, in registration order.
        buckets: The agreed layout, in launch order.
        fits: Whether every parameter is trainable and in its place.
        wants_layout: Whether this rank saw a change that needs a new layout.
    """

    def __init__(
        self, groups: ProcessGroups, options: Options, owner: Any, index: int, hook: Callable[[Slot], None]
    ) -> None:
        self.index = index
        self.options = options
        self.owner = owner
        self.slots: list[Slot] = []
        self.buckets: list[Bucket | SparseBucket] = []
        self.fits = False
        self.wants_layout = False
        self.wire = Wire(groups.gradients, options)
        self._groups = groups
        self._hook = hook
        self._params: list[nn.Parameter] = []
        self._seen: tuple[list[bool], list[int]] = ([], [])
        self._order: list[Slot] = []
        self._frozen: set[Slot] = set()
        self._frozen_rounds = 0
        self._idle: set[Slot] = set()  # trainable, and not in the layout
        self._woken: set[Slot] = set()  # what came back at the last agreement
        self._idle_rounds: dict[Slot, int] = {}
        self._patience: dict[Slot, int] = {}
        self._numbered = 0
        self._boundaries: list[int] = []  # how many parameters each bucket holds, where that was planned
        self._trial: Trial | None = None  # of a plan

    def set_options(self, options: Options) -> None:
        """Changes how gradients travel. The layout must be built anew."""
        self.options = options
        self.wire.options = options

    # ---- following the model ----------------------------------------------------------------------------------

    def manage(self, slots: Iterable[Slot]) -> None:
        """Takes over parameters. They enter the layout when it is next built."""
        new = list(slots)
        for slot in new:
            slot.number = self._numbered
            self._numbered += 1
        self.slots.extend(new)
        self._order = [*reversed(new), *self._order]
        self.look_again()

    def drop(self, slots: Iterable[Slot]) -> None:
        """Lets go of parameters. Their places in the layout stay empty until it is next built."""
        gone = set(slots)
        self.slots = [slot for slot in self.slots if slot not in gone]
        self._order = [slot for slot in self._order if slot not in gone]
        self._idle -= gone
        self._idle_rounds = {slot: rounds for slot, rounds in self._idle_rounds.items() if slot not in gone}
        for slot in gone:
            slot.stale = True
            slot.unhook()
            slot.keep_gradient()
        self.wants_layout = self.wants_layout or any(slot.bucket is not None for slot in gone)
        self.look_again()

    def look_again(self) -> None:
        """Makes the next :meth:`follow` look at every parameter."""
        self._seen = ([], [])
        self._params = [slot.param for slot in self.slots]

    def follow(self) -> None:
        """Notices what the user did to the parameters since last time: frozen, unfrozen, converted, moved.

        Local and cheap; what it finds is agreed on at the end of the round.
        """
        params = self._params
        seen = ([param.requires_grad for param in params], list(map(torch.Tensor.data_ptr, params)))
        if seen == self._seen and not self.wire.adds_up:  # hooks on nodes can be lost where nothing else changes
            return
        self._seen = seen
        fits = len(self.slots) == sum(len(bucket.slots) for bucket in self.buckets) + len(self._idle)
        for slot, trainable in zip(self.slots, seen[0], strict=True):
            if trainable:
                self._hook(slot)
            if slot.bucket is not None:
                slot.stale = not slot.bucket.holds(slot)
            placed = (slot.bucket is not None and not slot.stale) or slot in self._idle
            fits = fits and trainable and placed
            self.wants_layout = self.wants_layout or (trainable and not placed)
        self.fits = fits

    def count_frozen_rounds(self) -> None:
        """Notices parameters that stay frozen. Called once a round."""
        if self.fits:
            self._frozen_rounds = 0
            return
        frozen = {slot for slot in self.slots if slot.bucket is not None and not slot.param.requires_grad}
        still = self._frozen & frozen if self._frozen_rounds else frozen
        self._frozen = still
        self._frozen_rounds = self._frozen_rounds + 1 if still else 0
        self.wants_layout = self.wants_layout or self._frozen_rounds >= _FROZEN_ROUNDS

    def count_idle_rounds(self, idle: Iterable[Slot]) -> None:
        """Notices parameters that nobody uses. Called once a round.

        Args:
            idle: For which no rank had a gradient in this round. The same on all ranks, and so is what follows from it.
        """
        self._idle_rounds = {slot: self._idle_rounds.get(slot, 0) + 1 for slot in idle}
        if self._idle_rounds and self._leaving():
            self.wants_layout = True

    def _leaving(self) -> set[Slot]:
        """Parameters in the layout that were idle for long enough to leave it; not if nothing would stay."""
        if self.options.comm_hook is not None or self.options.strict_unused:
            return set()  # hooks keep state by bucket; and who forbids idle parameters wants to hear of them
        found = {
            slot
            for slot, rounds in self._idle_rounds.items()
            if rounds >= self._patience.get(slot, _IDLE_ROUNDS) and not slot.sparse
        }
        return found if any(slot not in found for bucket in self.buckets for slot in bucket.slots) else set()

    def _agree_on_idle(self, control: dist.ProcessGroup) -> None:
        """Lets parameters come back into the layout for which a rank has a gradient, and others leave. Collective."""
        leaving = self._leaving()
        asked = [slot for slot in self.slots if slot in self._idle or slot in leaving]
        used: set[Slot] = set()
        if asked:
            table = agreement.union([slot.used for slot in asked], control)
            used = {slot for slot, wanted in zip(asked, table, strict=True) if wanted}
        self._woken = self._idle & used
        for slot in self._woken:
            self._patience[slot] = _MORE_PATIENCE * self._patience.get(slot, _IDLE_ROUNDS)
        self._idle = (self._idle | leaving) - used
        self._idle_rounds = {}
        if not self.members():  # the rest was frozen; and ranks ask for a new layout in the tail of a bucket
            self._woken |= self._idle
            self._idle = set()

    # ---- the layout -------------------------------------------------------------------------------------------

    def agree(self, *, broadcast: bool) -> list[Slot]:
        """Compares all ranks' parameters, then equalizes those that are new to the layout.

        Collective. Builds nothing.

        Args:
            broadcast: Whether new parameters take the first rank's values.

        Returns:
            The slots that are not in the layout, or not any more in the right place.

        Raises:
            ReplicateError: On all ranks, if they hold different parameters.
        """
        self.follow()
        specs = [ParamSpec.of(slot.name, slot.param) for slot in self.slots]
        members = [slot.name for slot in self.members()]
        control = self._groups.control
        agreement.require_same_specs(specs, f"{self._describe_options()}; in the layout: {members}", control)
        for slot in self.slots:
            grad = slot.param.grad
            if slot.bucket is None and grad is not None and grad.layout is not torch.strided:
                slot.sparse = True  # filling its bucket would have found it
        if self.slots:
            # a rank that did not run a layer does not know that its gradients are sparse
            for slot, sparse in zip(self.slots, agreement.union([s.sparse for s in self.slots], control), strict=True):
                slot.stale = slot.stale or sparse != slot.sparse
                slot.sparse = sparse
        self._agree_on_idle(control)
        fresh = [slot for slot in self.members() if slot.bucket is None or slot.stale]
        if broadcast:
            values = [slot.param for slot in fresh if slot not in self._woken]  # those were equal all the time
            agreement.broadcast_from_first(values, self._groups.gradients, unseen_by_autograd=True)
        return fresh

    def build(self) -> None:
        """Makes the layout anew from the parameters as they are now. Local; the same on all ranks after agreement."""
        members = self.members()
        for slot in self.slots:
            slot.bucket = slot.view = None
            slot.stale = False
        self.buckets = self.buckets_of(members)
        self.wants_layout = False
        self._frozen = set()
        self._frozen_rounds = 0
        self.look_again()
        self.follow()

    def reorder(self, members: Sequence[Slot]) -> None:
        """Builds the layout in another order of its members."""
        if list(members) == self.members():
            return
        placed = set(members)
        self._order = [*members, *(slot for slot in self._order if slot not in placed)]
        self.build()

    def plan_buckets(self, arrivals: Arrivals) -> None:
        """Begins to try the first rank's plan of buckets (``bucket_cap_mb="auto"``). Collective.

        Args:
            arrivals: When gradients arrived on this rank.
        """
        members = self.members()
        if any(slot.param.device.type != "cpu" for slot in members):
            return  # the host's clock does not tell when a device has a gradient
        cost = self._measure_messages()
        sizes = [self.wire.nbytes(slot.param) for slot in members]
        counts = cut(arrivals.typical([slot.number for slot in members]), sizes, cost)
        padded = [*counts, *[0] * (len(members) - len(counts))]
        agreed = agreement.broadcast_order(padded, len(members), self._groups.control)
        plan = [count for count in agreed or () if count > 0]
        if plan != [len(bucket.slots) for bucket in self.buckets]:
            self._trial = Trial(plan)

    def try_plan(self, trial: Trial) -> None:
        """Counts a round of the trial; takes over the plan for its second half, and for good if it wins. Collective."""
        trial.end()
        if trial.wants_plan:
            self._boundaries = trial.plan
            self.build()
        elif trial.is_over:
            self._trial = None
            if agreement.broadcast_order([int(trial.wins)], 1, self._groups.control) != [1]:
                self._boundaries = []
                self.build()

    def _measure_messages(self) -> MessageCost:
        """Times messages on the process group of the gradients. Collective; takes some messages of 2 MiB."""
        measured = []
        for nbytes in (256, 2 * 1024 * 1024):  # the small one is all latency, also where a link lets bursts through
            message = torch.zeros(nbytes, dtype=torch.uint8)
            times = []
            for _ in range(5):
                agreement.union([False], self._groups.control)  # begin together
                start = perf_counter()
                self.wire.send_for_timing(message)
                times.append(perf_counter() - start)
            measured.append((nbytes, median(times)))
        return MessageCost.fit(measured[0], measured[1])

    def members(self) -> list[Slot]:
        """What belongs into the layout, in launch order: all that is trainable, or was until recently, and in use."""
        leaving = self._frozen if self._frozen_rounds >= _FROZEN_ROUNDS else set()
        return [
            slot
            for slot in self._order
            if slot not in self._idle
            and (slot.param.requires_grad or (slot.bucket is not None and slot not in leaving))
        ]

    def buckets_of(self, slots: Sequence[Slot]) -> list[Bucket | SparseBucket]:
        """Packs parameters into new buckets."""
        kinds = [(slot.param.dtype, slot.param.device) for slot in slots]
        apart = [slot.sparse for slot in slots]
        if sum(self._boundaries) == len(slots) and len(set(kinds)) == 1 and not any(apart):
            ends = list(accumulate(self._boundaries))
            assigned = [list(range(end - count, end)) for end, count in zip(ends, self._boundaries, strict=True)]
        else:
            sizes = [slot.param.nbytes for slot in slots]
            assigned = assign_buckets(sizes, kinds, self.options.bucket_caps, apart=apart)
        buckets: list[Bucket | SparseBucket] = []
        for index, chunk in enumerate(assigned):
            packed = [slots[i] for i in chunk]
            if packed[0].sparse:
                buckets.append(SparseBucket(index, packed[0]))
            else:
                tail_apart = self.wire.tail_apart(packed[0].param.dtype)
                bucket = Bucket(index, packed, tail_apart=tail_apart)
                bucket.hook_index = self._number_for_hooks(packed)
                buckets.append(bucket)
        return buckets

    def _number_for_hooks(self, slots: Sequence[Slot]) -> int:
        """The number under which a communication hook knows a bucket of these parameters: never that of another one."""
        if self.options.comm_hook is None:
            return -1
        known = self._groups.hook_buckets
        key = (str(self.index), *(f"{slot.name} {tuple(slot.param.shape)}" for slot in slots))
        return known.setdefault(key, max(known.values(), default=-1) + 1)

    def _describe_options(self) -> str:
        options = self.options
        hook = getattr(options.comm_hook, "__qualname__", options.comm_hook)
        return (
            f"bucket_cap_mb={options.bucket_cap_mb}, reduce_dtype={options.reduce_dtype},"
            f" average={options.average!r}, comm_hook={hook}, strict_unused={options.strict_unused},"
            f" unaveraged_gradients={options.unaveraged_gradients!r}"
        )

    def plan(self) -> Plan:
        """The layout as data."""
        buckets = tuple(
            BucketPlan(
                parameters=tuple(slot.name for slot in bucket.slots),
                dtype=bucket.dtype,
                device=bucket.device,
                nbytes=sum(slot.param.nbytes for slot in bucket.slots),
            )
            for bucket in self.buckets
        )
        frozen = tuple(slot.name for slot in self.slots if not slot.param.requires_grad)
        idle = tuple(slot.name for slot in self.slots if slot in self._idle and slot.param.requires_grad)
        return Plan(buckets=buckets, world_size=self.wire.world_size, frozen=frozen, idle=idle)
