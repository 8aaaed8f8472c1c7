"""One group's round.

A round is one backward pass. While it runs, gradient hooks count; buckets whose gradients are all there leave in a
fixed order. When it ends, the rest leaves, in the same order, with zeros where this rank has nothing. So what is sent
depends on the agreed layout alone. The :class:`~lightning_replicate.core.channel.Channel` drives all groups of one
process group through the same round.

Launching early is every rank's own choice, since launching late is always right. So a rank may learn on its own that
it must not launch early: in the first round of a layout, while the order of arrival is unknown, and after gradients
arrived from a nested backward, where a parameter may receive more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from lightning_replicate.core import agreement
from lightning_replicate.core.api import Options, ReplicateError, RoundStats
from lightning_replicate.core.bucket import NEVER, Bucket, Slot, Totals
from lightning_replicate.core.failures import consequence, is_from_another_rank
from lightning_replicate.core.group import Group
from lightning_replicate.core.hooks import Tally, gradient_hook, keep_apart_hook
from lightning_replicate.core.planning import Arrivals
from lightning_replicate.core.sparse import SparseBucket
from lightning_replicate.core.wire import Round

if TYPE_CHECKING:
    from lightning_replicate.core.channel import Channel


class Reducer(Group):
    """Averages the gradients of one group of parameters.

    Args:
        channel: The queue of the process group over which this group reduces.
        options: How gradients travel.
        owner: Whoever made this group.

    Attributes:
        requires_sync: Whether backward reduces this group.
        weight: How much this rank's next losses count, for ``average="weighted"``.
        rounds: How many rounds this group has closed.
        last_round: What the last of them sent.
        stepped: Whether an optimizer has stepped some of the parameters since then.
    """

    def __init__(self, channel: Channel, options: Options, owner: Any) -> None:
        super().__init__(channel, options, owner, channel.add(self), self._hook_parameter)
        self.channel = channel
        self.requires_sync = True
        self.broadcast = True  # whether parameters that enter the layout take the first rank's values
        self.weight = 1.0
        self.rounds = 0
        self.last_round: RoundStats | None = None
        self.before_round: Callable[[], Any] = lambda: None
        self.after_round: Callable[[], Any] = lambda: None
        self._tally = Tally()
        self._saw_nested = False
        self._window = 0.0  # weight of the backwards since the last round
        self._said = Round(1.0)
        self._sent = [0, 0, 0, 0]  # bytes, collectives, early, late
        self._missed: list[Slot] = []
        self._participants: int | None = None
        self.stepped = True
        self._bare: set[Slot] = set()  # for which no round since that step had a gradient
        self._arrivals: Arrivals | None = None  # what a plan of buckets is made from, until it is made
        self._look_at_arrivals()
        self._unread: Callable[[], Totals] | None = None  # the last round's totals, while nobody waited for them

    @property
    def dirty(self) -> bool:
        """Whether a gradient arrived since the last round."""
        return self._tally.dirty

    def set_weight(self, weight: float, scale: float = 1.0) -> None:
        """Sets the weight of this rank's next losses.

        Args:
            weight: Their weight.
            scale: What undoes a division of the loss that somebody else makes.
        """
        self.weight = weight
        self._tally.scale = weight * scale

    def set_divide_factor(self, factor: float | None) -> None:
        """Sets what sums are divided by; ``None`` follows ``average``."""
        self.wire.divide_factor = factor
        self._tally.keeps_apart = self.wire.adds_up
        self.look_again()

    def _hook_parameter(self, slot: Slot) -> None:
        if not slot.hooks:
            hook = gradient_hook(slot, self._tally, self.channel)
            slot.hooks.append(slot.param.register_post_accumulate_grad_hook(hook))
        if slot.param.is_cuda:
            # a kept node keeps its stream, so that all gradients arrive on the one of set-up, on which buckets leave;
            # nodes that forwards make anew would be on the streams of these forwards
            slot.accumulator = torch.autograd.graph.get_gradient_edge(slot.param).node
        if self.wire.adds_up:
            self._tally.keeps_apart = True
            # on the node, since a hook on the tensor would also change what `torch.autograd.grad` returns; torch makes
            # a new node when the parameter is converted
            node = torch.autograd.graph.get_gradient_edge(slot.param).node
            if node is not slot.node:
                slot.node = node
                slot.hooks.append(node.register_prehook(keep_apart_hook(slot, self._tally)))

    # ---- while backward runs ----------------------------------------------------------------------------------

    def enter(self, task: int) -> None:
        """A gradient of this group arrived from another graph task than the last one.

        Raises:
            ReplicateError: If the round of an earlier backward is still open, because that backward raised.
        """
        self._tally.dirty = True
        if self.channel.task != task:
            self.channel.enter(task)
        if self.channel.nested:
            self.note_nested()
        self._tally.task = task

    @property
    def had_backward(self) -> bool:
        """Whether a backward of this rank was counted since the last round."""
        return self._window > 0

    def note_backward(self) -> None:
        """Counts one backward of this rank in the window that the next round closes."""
        self._window += self.weight if self.options.average == "weighted" else 1.0

    def begin(self, *, abort: bool = False) -> None:
        """Opens a round.

        Args:
            abort: Whether this rank takes part only to tell the others that it gave up.
        """
        self._hear_the_last_round()
        if self._trial is not None:
            self._trial.start(self._tally.dirty)
        self.before_round()
        self.follow()
        self.count_frozen_rounds()
        weight = self._window if self.options.average == "weighted" else min(self._window, 1.0)
        if self.options.average == "world":
            weight = 1.0  # every rank counts, and holds its share of earlier rounds
        self._said = Round(0.0 if abort else weight, self.wants_layout, abort)
        self._sent = [0, 0, 0, 0]
        early = self.requires_sync and self._tally.arrivals is None and not self._saw_nested
        for bucket in self.buckets:
            bucket.begin(self.fits)
            if not early:
                bucket.missing = NEVER
        if self._idle:
            self.hold_last()  # a gradient of one of them may arrive until backward ends

    def hold_last(self) -> None:
        """Keeps the last bucket back until backward ends, so that a rank which fails before can say so in it."""
        if self.buckets:
            self.buckets[-1].missing = NEVER

    def note_nested(self) -> None:
        """Remembers that gradients came from a nested backward: no bucket of this rank leaves early any more."""
        self._saw_nested = True
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.missing = NEVER

    def note_outside(self) -> None:
        """A gradient arrived that has no place in the layout: asks for a new one in this very round."""
        self.wants_layout = True
        if self.buckets and not self.buckets[-1].launched:  # else the others hear of it in the next round
            self._said = self._said._replace(signal=True)

    def launch(self, bucket: Bucket | SparseBucket, *, early: bool) -> None:
        """Sends one bucket."""
        last = bucket.index == len(self.buckets) - 1
        with torch.profiler.record_function(f"replicate::launch ({bucket.slots[0].name})"):
            nbytes, collectives, found_sparse = self.wire.launch(bucket, self._said, last)
        if found_sparse:
            self.wants_layout = True
            self._said = self._said._replace(signal=True)
        bucket.missing = 0
        self._sent[0] += nbytes
        self._sent[1] += collectives
        self._sent[2 if early else 3] += 1

    # ---- the end of the round ---------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Lets the rest of the round say that this rank gave it up."""
        self._said = Round(0.0, self.wants_layout, True)

    def flush(self) -> None:
        """Sends what has not left yet, in order."""
        for bucket in self.buckets:
            if not bucket.launched:
                self.launch(bucket, early=False)

    def finish(self) -> bool:
        """Waits for the buckets, hands out gradients, and follows the model where any rank asks for it.

        Returns:
            Whether some rank gave the round up.

        Raises:
            ReplicateError: If a collective failed, or ranks no longer hold the same parameters.
        """
        self._missed = [slot for bucket in self.buckets for slot in self._finish(bucket)]
        self._participants = None
        idle = [slot for bucket in self.buckets for slot in bucket.idle]
        self.count_idle_rounds(idle)
        self._bare = set(idle) if self.stepped else self._bare.intersection(idle)
        self.stepped = False
        signal, abort = self._read_totals()
        if not abort:
            if signal:
                self._follow_the_model()
            elif self._tally.arrivals is not None:
                self._agree_on_order(self._tally.arrivals)
            elif self._trial is not None:
                self.try_plan(self._trial)
        self.rounds += 1
        if self._idle:
            missed = {*self._missed, *self._idle}
            self._missed = [slot for slot in self.slots if slot in missed]
        names = tuple(slot.name for slot in self._missed)
        self.forget_window()
        nbytes, collectives, early, late = self._sent
        self.last_round = RoundStats(self.rounds, nbytes, collectives, early, late, names, self._participants)
        if not abort:
            self.after_round()
        return abort

    def forget_window(self) -> None:
        """Starts a new window of backwards."""
        for slot in self.slots:
            slot.used = False
        self._tally.dirty = False
        self._window = 0.0

    # ---- around the optimizer's step --------------------------------------------------------------------------

    def offer(self, chosen: Set[torch.Tensor] | None) -> None:
        """Makes gradients that came from no backward part of what this rank gives to the next round.

        Args:
            chosen: The parameters whose gradients are meant; ``None`` for all.
        """
        for slot in self.slots:
            param = slot.param
            if param.grad is None or (chosen is not None and param not in chosen):
                continue
            if not slot.used and self._tally.scale != 1.0:  # else it was weighed when it arrived
                param.grad = param.grad * self._tally.scale
            slot.used = self._tally.dirty = True

    @property
    def without_average(self) -> Set[Slot]:
        """For which no rank had a gradient in a round since the last step, or that are idle for long. Mostly empty."""
        return self._bare | self._idle

    @property
    def last_weight(self) -> float:
        """How much this rank counted in the last round."""
        return self._said.weight

    def _finish(self, bucket: Bucket | SparseBucket) -> list[Slot]:
        try:
            with torch.profiler.record_function(f"replicate::wait ({bucket.slots[0].name})"):
                nbytes, collectives = self.wire.finish(bucket)
        except RuntimeError as error:
            names = ", ".join(slot.name for slot in bucket.slots[:3]) + (", ..." if len(bucket.slots) > 3 else "")
            what = (
                f"Rank {self.channel.rank} could not finish bucket {bucket.index} ({names}) in round {self.rounds + 1}"
            )
            raise consequence(what, error) from (None if is_from_another_rank(error) else error)
        self._sent[0] += nbytes
        self._sent[1] += collectives
        return bucket.settle(self.wire.adds_up)

    def _read_totals(self) -> tuple[bool, bool]:
        """Whether any rank asks for a new layout, and whether any gave up."""
        if not self.buckets:  # no tail to say it in
            wants_layout, abort = agreement.union([self.wants_layout, self._said.abort], self.channel.control)
            return wants_layout, abort
        last = self.buckets[-1]
        if self.reads_at_once(last):
            totals = last.read_totals()
            self._participants = None if self.options.average == "weighted" else round(totals.weight)
            return totals.signal > 0, totals.abort > 0
        self._unread = last.read_totals_later()
        return self._said.signal, self._said.abort

    def reads_at_once(self, bucket: Bucket | SparseBucket) -> bool:
        """Whether to read what other ranks say at the end of the round in which they say it.

        On a CPU that costs nothing. On a GPU it would make the host wait for the device in every round. Ranks run the
        same program, so a rank that has nothing to say itself reads it at the start of the next round, when the copy
        has long arrived. The ranks that did say something wait for it until then.
        """
        return bucket.device.type == "cpu" or self._tally.arrivals is not None or bool(self._idle)

    def _hear_the_last_round(self) -> None:
        """Joins ranks that asked for a new layout, or gave up, in a round whose totals were not read at once.

        Raises:
            ReplicateError: If a rank gave up, or ranks no longer hold the same parameters.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        totals = unread()
        if totals.abort > 0 and not self._said.abort:
            agreement.gather_flags([False], self.channel.control)
            raise ReplicateError(
                f"Another rank gave the last round up, so the gradients of rank {self.channel.rank} were not averages"
                f" in the step that it took after that."
            )
        if totals.signal > 0 and not self._said.signal:
            self.agree(broadcast=self.broadcast)
            self._look_at_arrivals()
            self.build()

    def _follow_the_model(self) -> None:
        """Agrees on a new layout, and averages in this very round what the old one had no place for."""
        with torch.profiler.record_function("replicate::layout"):
            fresh = set(self.agree(broadcast=self.broadcast))
            self._missed = [slot for slot in self._missed if slot not in fresh]
            second_pass = [slot for slot in self.members() if slot in fresh]
            for slot in second_pass:
                self._prepare_second_pass(slot)
            self._bare = self._bare - fresh
            for bucket in self.buckets_of(second_pass):
                self.launch(bucket, early=False)
                self._missed += self._finish(bucket)
                self._bare |= set(bucket.idle)
            self._look_at_arrivals()
            self.build()

    def _prepare_second_pass(self, slot: Slot) -> None:
        param = slot.param
        if slot in self._woken:
            return  # its hook was there
        if not slot.sparse:
            # a hook that was not there yet could not see the gradient
            slot.used = slot.used or (param.grad is not None and self._said.weight > 0)
            return
        # Where the gradient was sparse on some ranks and dense on others, the dense part is averaged already. It must
        # stay in, once: as a part that all ranks hold, or kept apart.
        if param.grad is not None and param.grad is slot.view:
            slot.base, param.grad = param.grad.clone(), None
        if slot.base is not None and not self.wire.adds_up:
            param.grad = slot.base if param.grad is None else slot.base + param.grad
            slot.base = None

    def _agree_on_order(self, arrivals: Sequence[int]) -> None:
        """Takes over the order in which gradients arrived on the first rank."""
        members = self.members()
        if not members:
            return
        positions = {slot.number: index for index, slot in enumerate(members)}
        arrived = [positions[number] for number in dict.fromkeys(arrivals) if number in positions]
        mine = list(dict.fromkeys([*arrived, *range(len(members))])) if arrived else None
        agreed = agreement.broadcast_order(mine, len(members), self.channel.control)
        times, self._tally.times = self._tally.times, None
        self._tally.arrivals = None if agreed is not None else []
        if agreed is not None:
            self.reorder([members[index] for index in agreed])
        if self._arrivals is not None and times is not None:
            if agreed is not None:
                self._arrivals.note(arrivals, times)
            if self._arrivals.enough:
                self.plan_buckets(self._arrivals)
                self._arrivals = None
            else:
                self._tally.arrivals, self._tally.times = [], []

    # ---- bucket_cap_mb="auto" ---------------------------------------------------------------------------------

    def _look_at_arrivals(self) -> None:
        """Notes in which order gradients arrive in the next round; and when, in the next rounds, to plan buckets."""
        self._tally.arrivals = []
        self._boundaries, self._trial = [], None
        if self.options.plans_buckets:
            self._arrivals, self._tally.times = Arrivals(), []

    def adopt_order(self, names: Sequence[str]) -> None:
        """Takes over the order that an earlier run agreed on, if it holds the same parameters. On all ranks alike."""
        members = {slot.name: slot for slot in self.members()}
        if members.keys() == set(names):
            self.reorder([members[name] for name in names])
            self._tally.arrivals = None

    def complain_of_unused(self) -> str | None:
        """With ``strict_unused``: which parameters had no gradient, and on which ranks. Collective, as the option is.

        Returns:
            A message, the same on all ranks, or ``None`` if every rank had all gradients.
        """
        members = self.members() if self.options.strict_unused else []
        if not members:
            return None
        missed = set(self._missed)
        idle_here = {slot.name: slot in missed and slot.param.requires_grad for slot in members}
        idle = agreement.ranks_with(idle_here, self.channel.control)
        if not idle:
            return None
        listed = "; ".join(f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in sorted(idle.items()))
        return (
            f"strict_unused: {len(idle)} parameters received no gradient in round {self.rounds}: {listed}. Use them in"
            f" the loss, freeze them with `requires_grad_(False)`, or allow it with `strict_unused=False`."
        )

    def release(self) -> None:
        """Takes all hooks off and leaves ordinary gradients."""
        for slot in self.slots:
            slot.release()
        self.slots = []
        self.buckets = []
        self.look_again()
