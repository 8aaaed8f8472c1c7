"""One group: the parameters that reduce together, their buckets, and what one round does with them.

A round is one backward pass. While it runs, gradient hooks count; buckets whose gradients are all there leave in a
fixed order. When it ends, the rest leaves, in the same order, with zeros where this rank has nothing. So what is sent
depends on the agreed layout alone. The :class:`~lightning_replicate.core.channel.Channel` drives all groups of one
process group through the same round.

Launching early is every rank's own choice, since launching late is always right. So a rank may learn on its own that
it must not launch early: in the first round of a layout, while the order of arrival is unknown, and after gradients
arrived from a nested backward, where a parameter may receive more than once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_replicate import _private
from lightning_replicate.core import agreement
from lightning_replicate.core.api import BucketPlan, Options, Plan, ReplicateError, RoundStats
from lightning_replicate.core.bucket import Bucket, Slot
from lightning_replicate.core.layout import ParamSpec, assign_buckets
from lightning_replicate.core.wire import Wire

if TYPE_CHECKING:
    from lightning_replicate.core.channel import Channel

# A parameter leaves the layout only after it was frozen for this many rounds in a row, so that code which freezes and
# unfreezes every step (Lightning's `toggle_optimizer`) does not force a new layout every step.
_FROZEN_ROUNDS = 8


class _Tally:
    """What the gradient hooks of one group note down.

    Hooks sit on tensors, where Python's garbage collector does not see them, so they may hold this and nothing that
    leads back to their parameter.
    """

    __slots__ = ("arrivals", "dirty")

    def __init__(self) -> None:
        self.dirty = False
        self.arrivals: list[int] | None = []  # numbers of slots; None once the order of arrival is agreed


class Reducer:
    """Averages the gradients of one group of parameters.

    Args:
        channel: The queue of the process group over which this group reduces.
        options: How gradients travel.
        owner: Whoever made this group.

    Attributes:
        slots: All managed parameters, frozen ones included, in registration order.
        buckets: The agreed layout, in launch order.
        requires_sync: Whether backward reduces this group.
    """

    def __init__(self, channel: Channel, options: Options, owner: Any) -> None:
        self.channel = channel
        self.options = options
        self.owner = owner
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        self.requires_sync = True
        self.next_weight: float | None = None
        self.last_round: RoundStats | None = None
        self.before_round: Callable[[], Any] = lambda: None
        self.after_round: Callable[[], Any] = lambda: None
        self.rounds = 0
        self._tally = _Tally()
        self._wire = Wire(channel.gradients, options)
        self._weight = 1.0
        self._saw_nested = False
        self._fits = False
        self._request = False
        self._seen: tuple[list[bool], list[int]] = ([], [])
        self._order: list[Slot] = []
        self._frozen: set[Slot] = set()
        self._frozen_rounds = 0
        self._numbered = 0
        self._sent = [0, 0, 0, 0]  # bytes, collectives, early, late
        self.index = channel.add(self)

    @property
    def dirty(self) -> bool:
        """Whether a gradient arrived since the last round."""
        return self._tally.dirty

    # ---- parameters -------------------------------------------------------------------------------------------

    def manage(self, slots: Iterable[Slot]) -> None:
        """Takes over parameters. They enter the layout when it is next built."""
        new = list(slots)
        for slot in new:
            slot.number = self._numbered
            self._numbered += 1
        self.slots.extend(new)
        self._order = [*reversed(new), *self._order]
        self._seen = ([], [])

    def drop(self, slots: Iterable[Slot]) -> None:
        """Lets go of parameters. Their places in the layout stay empty until it is next built."""
        gone = set(slots)
        self.slots = [slot for slot in self.slots if slot not in gone]
        self._order = [slot for slot in self._order if slot not in gone]
        for slot in gone:
            slot.stale = True
            slot.unhook()
        self._request = self._request or bool(gone)
        self._seen = ([], [])

    def follow(self) -> None:
        """Notices what the user did to the parameters since last time: frozen, unfrozen, converted, moved.

        Local and cheap; what it finds is agreed on at the end of the round.
        """
        params = [slot.param for slot in self.slots]
        seen = ([param.requires_grad for param in params], [param.data_ptr() for param in params])
        if seen == self._seen:
            return
        self._seen = seen
        fits = len(self.slots) == sum(len(bucket.slots) for bucket in self.buckets)
        for slot, trainable in zip(self.slots, seen[0], strict=True):
            if trainable:
                self._hook(slot)
            if slot.bucket is not None:
                slot.stale = not slot.bucket.holds(slot)
            fits = fits and trainable and slot.bucket is not None and not slot.stale
            if trainable and (slot.bucket is None or slot.stale):
                self._request = True
        self._fits = fits

    def _hook(self, slot: Slot) -> None:
        if not slot.hooks:
            slot.hooks.append(
                slot.param.register_post_accumulate_grad_hook(_gradient_hook(slot, self._tally, self.channel))
            )
        scale = self._wire.gradient_scale
        if scale != 1.0:
            # on the node, since a hook on the tensor would also change what `torch.autograd.grad` returns; torch makes
            # a new node when the parameter is converted
            node = torch.autograd.graph.get_gradient_edge(slot.param).node
            if node is not slot.node:
                slot.node = node
                slot.hooks.append(node.register_prehook(lambda grads: tuple(g * scale for g in grads)))

    # ---- layout -----------------------------------------------------------------------------------------------

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
        members = [slot.name for slot in self._members()]
        control = self.channel.control
        agreement.require_same_specs(specs, f"{self._describe_options()}; in the layout: {members}", control)
        fresh = [slot for slot in self._members() if slot.bucket is None or slot.stale]
        if broadcast:
            agreement.broadcast_from_first([slot.param for slot in fresh], self.channel.gradients)
        return fresh

    def build(self) -> None:
        """Makes the layout anew from the parameters as they are now. Local; the same on all ranks after agreement."""
        members = self._members()
        for slot in self.slots:
            slot.bucket = slot.view = None
            slot.stale = False
        self.buckets = self._buckets_of(members, self.options.bucket_caps)
        self._request = False
        self._frozen = set()
        self._frozen_rounds = 0
        self._seen = ([], [])
        self.follow()

    def _members(self) -> list[Slot]:
        """What belongs into the layout, in launch order: all that is trainable, or was until recently."""
        leaving = self._frozen if self._frozen_rounds >= _FROZEN_ROUNDS else set()
        return [
            slot
            for slot in self._order
            if slot.param.requires_grad or (slot.bucket is not None and slot not in leaving)
        ]

    def _buckets_of(self, slots: Sequence[Slot], caps: Sequence[int]) -> list[Bucket]:
        kinds = [(slot.param.dtype, slot.param.device) for slot in slots]
        assigned = assign_buckets([slot.param.nbytes for slot in slots], kinds, caps)
        return [
            Bucket(
                index,
                [slots[i] for i in chunk],
                tail_apart=self._wire.tail_apart(slots[chunk[0]].param.dtype),
            )
            for index, chunk in enumerate(assigned)
        ]

    def _describe_options(self) -> str:
        options = self.options
        hook = getattr(options.comm_hook, "__qualname__", options.comm_hook)
        return (
            f"bucket_cap_mb={options.bucket_cap_mb}, reduce_dtype={options.reduce_dtype},"
            f" average={options.average!r}, comm_hook={hook}"
        )

    def plan(self) -> Plan:
        """The layout as data."""
        buckets = tuple(
            BucketPlan(
                parameters=tuple(slot.name for slot in bucket.slots),
                dtype=bucket.dtype,
                device=bucket.device,
                nbytes=bucket.numel * bucket.slots[0].param.element_size(),
            )
            for bucket in self.buckets
        )
        frozen = tuple(slot.name for slot in self.slots if not slot.param.requires_grad)
        return Plan(buckets=buckets, world_size=self._wire.world_size, frozen=frozen)

    # ---- one round --------------------------------------------------------------------------------------------

    def begin(self, weight: float) -> None:
        """Opens a round.

        Args:
            weight: How much this rank counts in the average, unless the user set a weight for this step.
        """
        self.before_round()
        self.follow()
        if self.next_weight is not None:
            weight = self.next_weight
        elif self.dirty:  # an earlier backward of the window contributed
            weight = max(weight, 1.0)
        self._weight = weight
        self._sent = [0, 0, 0, 0]
        self._count_frozen_rounds()
        early = self.requires_sync and self._tally.arrivals is None and not self._saw_nested
        for bucket in self.buckets:
            bucket.begin(self._fits)
            if not early:
                bucket.missing = -1

    def _count_frozen_rounds(self) -> None:
        if self._fits:
            self._frozen_rounds = 0
            return
        frozen = {slot for slot in self.slots if slot.bucket is not None and not slot.param.requires_grad}
        still = self._frozen & frozen if self._frozen_rounds else frozen
        self._frozen = still
        self._frozen_rounds = self._frozen_rounds + 1 if still else 0
        if self._frozen_rounds >= _FROZEN_ROUNDS:
            self._request = True

    def note_nested(self) -> None:
        """Remembers that gradients came from a nested backward: no bucket of this rank leaves early any more."""
        self._saw_nested = True
        for bucket in self.buckets:
            bucket.missing = -1

    def launch(self, bucket: Bucket, *, early: bool) -> None:
        """Sends one bucket."""
        last = bucket.index == len(self.buckets) - 1
        with torch.profiler.record_function(f"replicate::launch ({bucket.slots[0].name})"):
            nbytes, collectives = self._wire.launch(bucket, self._weight, self._request, last)
        self._sent[0] += nbytes
        self._sent[1] += collectives
        self._sent[2 if early else 3] += 1

    def flush(self) -> None:
        """Sends what has not left yet, in order."""
        for bucket in self.buckets:
            if not bucket.launched:
                self.launch(bucket, early=False)

    def finish(self) -> None:
        """Waits for the buckets, hands out gradients, and follows the model where any rank asks for it.

        Raises:
            ReplicateError: If a collective failed, or ranks no longer hold the same parameters.
        """
        missed = [slot.name for bucket in self.buckets for slot in self._finish(bucket)]
        if self._anyone_requests():
            self._follow_the_model()
        elif self._tally.arrivals is not None:
            self._agree_on_order(self._tally.arrivals)
        for slot in self.slots:
            slot.used = False
        self.rounds += 1
        self._tally.dirty = False
        self.next_weight = None
        nbytes, collectives, early, late = self._sent
        self.last_round = RoundStats(self.rounds, nbytes, collectives, early, late, tuple(missed))
        self.after_round()

    def _finish(self, bucket: Bucket) -> list[Slot]:
        try:
            with torch.profiler.record_function(f"replicate::wait ({bucket.slots[0].name})"):
                self._wire.finish(bucket)
        except RuntimeError as error:
            names = ", ".join(slot.name for slot in bucket.slots[:3])
            raise ReplicateError(
                f"Rank {self.channel.rank} could not finish bucket {bucket.index} ({names}, ...) in round"
                f" {self.rounds + 1}. Another rank has failed, or did not come to the end of its backward in time."
                f" Cause: {error}"
            ) from error
        return bucket.settle()

    def _anyone_requests(self) -> bool:
        if not self.buckets or self._request:
            return self._request
        last = self.buckets[-1]
        # Ranks run the same program, so a rank that sees no change rarely has to join others who do. Reading the
        # signal costs nothing on a CPU; on a GPU it would make the host wait for the device in every round.
        return last.device.type == "cpu" and last.read_tail()[-1] > 0

    def _follow_the_model(self) -> None:
        """Agrees on a new layout, and averages in this very round what the old one had no place for."""
        with torch.profiler.record_function("replicate::layout"):
            fresh = self.agree(broadcast=True)
            for bucket in self._buckets_of(fresh, self.options.bucket_caps):
                for slot in bucket.slots:  # a hook that was not there yet could not see the gradient
                    slot.used = slot.used or slot.param.grad is not None
                self.launch(bucket, early=False)
                self._finish(bucket)
            self.build()
            self._tally.arrivals = []

    def _agree_on_order(self, arrivals: Sequence[int]) -> None:
        """Takes over the order in which gradients arrived on the first rank."""
        members = self._members()
        if not members:
            return
        positions = {slot.number: index for index, slot in enumerate(members)}
        arrived = [positions[number] for number in dict.fromkeys(arrivals) if number in positions]
        mine = list(dict.fromkeys([*arrived, *range(len(members))])) if arrived else None
        agreed = agreement.broadcast_order(mine, len(members), self.channel.control)
        self._tally.arrivals = []
        if agreed is None:
            return
        self._tally.arrivals = None
        ordered = [members[index] for index in agreed]
        if ordered != members:
            placed = set(ordered)
            self._order = ordered + [slot for slot in self._order if slot not in placed]
            self.build()

    def abandon(self) -> None:
        """Drops the round that is under way; gradients of this rank stay as they are."""
        self._wire.abandon()
        for bucket in self.buckets:
            bucket.abandon()
        for slot in self.slots:
            slot.used = False
        self._tally.dirty = False
        self.next_weight = None

    def release(self) -> None:
        """Takes all hooks off and leaves ordinary gradients."""
        for slot in self.slots:
            slot.release()
        self.slots = []
        self.buckets = []


def _gradient_hook(slot: Slot, tally: _Tally, channel: Channel) -> Callable[[torch.Tensor], None]:
    """The hook on one parameter. It runs once a parameter and backward, so it does next to nothing."""
    number = slot.number
    slot_of_hook = weakref.ref(slot)
    task_id = _private.current_graph_task_id
    del slot

    def hook(_: torch.Tensor) -> None:
        slot = slot_of_hook()
        if slot is None:
            return
        slot.used = tally.dirty = True
        if channel.task != task_id():
            channel.enter(task_id())
        if tally.arrivals is not None:
            tally.arrivals.append(number)
        bucket = slot.bucket
        if bucket is None or slot.stale:
            return
        if bucket.launched:
            raise ReplicateError(
                f"Parameter {slot.name!r} received a gradient on rank {channel.rank} after its bucket had been sent:"
                f" it is used both inside and outside of a nested backward (reentrant checkpointing) and that began"
                f" after the first step. Use `use_reentrant=False`."
            )
        if channel.nested:
            slot.reducer.note_nested()
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            channel.advance()

    return hook
