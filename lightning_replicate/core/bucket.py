"""One bucket: a flat buffer that holds the gradients of some parameters, and flags that say who contributed.

The buffer is ``[gradients | one flag a parameter | weight | signal | abort]``. A flag is 1 where this rank has a
gradient; the weight says how much this rank counts in the average; the signal asks all ranks for a new layout after the
round; abort tells them that this rank gave the round up. All of it is summed over ranks in one collective. Where the
wire is lossy, the part behind the gradients (the *tail*) is a tensor of its own and travels apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.layout import flat_layout, view_like

if TYPE_CHECKING:
    from lightning_replicate.core.reducer import Reducer

# Below this mean number of elements a parameter, one batched copy and one multiplication of the whole buffer beat a
# scaling copy for each parameter.
_BATCHED_COPY_BELOW = 16384


class Totals(NamedTuple):
    """What a bucket's tail says besides flags, summed over ranks."""

    weight: float = 0.0
    signal: float = 0.0
    abort: float = 0.0


_TAIL_EXTRA = len(Totals._fields)
_WEIGHT = -_TAIL_EXTRA

NEVER = 1 << 60
"""How many gradients are missing from a bucket that must not leave before backward ends: more than will ever come."""


class Slot:
    """One managed parameter: where its gradient goes and what happened to it since the last round.

    Attributes:
        name: Full name, for reports.
        param: The parameter.
        number: Its number within the group, never used again.
        bucket: Its bucket in the agreed layout; ``None`` if it is not in the layout.
        view: Its gradient in the bucket's buffer; ``None`` until the buffer is allocated.
        shape: Shape and strides for which it has its place in the layout.
        used: Whether it received a gradient since the last round.
        stale: Whether the parameter no longer fits its place (other data type, device or shape).
        sparse: Whether its gradients are sparse.
        base: The gradient of earlier rounds, where that is kept apart.
        node: The autograd node that accumulates its gradient, where that one is hooked, too.
        accumulator: The same node where it is only kept, on GPUs.
        hooks: Handles of the hooks on the parameter; empty while it was never trainable.
    """

    __slots__ = (
        "__weakref__",
        "_reducer",
        "accumulator",
        "base",
        "bucket",
        "hooks",
        "name",
        "node",
        "number",
        "param",
        "shape",
        "sparse",
        "stale",
        "used",
        "view",
    )

    def __init__(self, name: str, param: nn.Parameter, reducer: Reducer) -> None:
        self.name = name
        self.param = param
        self._reducer = weakref.ref(reducer)
        self.bucket: Any = None  # Bucket or SparseBucket
        self.view: torch.Tensor | None = None
        self.number = -1
        self.used = False
        self.stale = False
        self.sparse = False
        self.base: torch.Tensor | None = None
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.node: torch.autograd.graph.Node | None = None
        self.accumulator: torch.autograd.graph.Node | None = None
        self.shape: tuple[torch.Size, tuple[int, ...]] | None = None

    @property
    def reducer(self) -> Reducer:
        """The group that averages the parameter."""
        reducer = self._reducer()
        assert reducer is not None, "a slot does not outlive its reducer"
        return reducer

    def place(self, bucket: Any) -> None:
        """Gives the slot its place in a layout."""
        self.bucket = bucket
        self.view = None
        self.stale = False
        self.shape = (self.param.shape, self.param.stride())

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the parameter, as it is now, still fits its place in a bucket of this kind."""
        param = self.param
        return param.dtype == dtype and param.device == device and self.shape == (param.shape, param.stride())

    def unhook(self) -> None:
        """Takes the hooks off the parameter."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.node = self.accumulator = None

    def release(self) -> None:
        """Takes the hooks off and leaves the gradient as an ordinary tensor."""
        self.unhook()
        self.keep_gradient()
        self.bucket = self.view = None

    def keep_gradient(self) -> None:
        """Takes the gradient out of the bucket, whose memory others will write to."""
        if self.view is not None and self.param.grad is self.view:
            self.param.grad = self.view.clone()


class Bucket:
    """A flat buffer and the slots whose gradients lie in it.

    Attributes:
        index: Position in the launch order.
        slots: The parameters, in the order in which their gradients lie in the buffer.
        missing: Trainable parameters that have not received their gradient in this round; :data:`NEVER` for a bucket
            in which nothing is trainable, or that must not leave early.
        launched: Whether it left in this round.
        absent: Slots for which this rank had no gradient, each with its old gradient if that must be put back.
        idle: Slots for which no rank had a gradient in the last round, although some rank took part: the same ones on
            all ranks.
    """

    def __init__(self, index: int, slots: Sequence[Slot], *, tail_apart: bool) -> None:
        first = slots[0].param
        self.index = index
        self.hook_index = -1
        self.slots = list(slots)
        self.dtype = first.dtype
        self.device = first.device
        self.missing = NEVER
        self.launched = False
        self.absent: list[tuple[Slot, torch.Tensor | None]] = []
        self.idle: list[Slot] = []
        numels = [slot.param.numel() for slot in slots]
        self._layout = flat_layout(numels, first.element_size())
        self._batched = sum(numels) < _BATCHED_COPY_BELOW * len(slots)
        self._tail_apart = tail_apart
        self._flat: torch.Tensor | None = None
        self._tail: torch.Tensor | None = None
        self._tail_if_full: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []
        for slot in slots:
            slot.place(self)

    def holds(self, slot: Slot) -> bool:
        """Whether the slot's parameter, as it is now, still fits its place."""
        return not slot.sparse and slot.fits(self.dtype, self.device)

    @property
    def flat(self) -> torch.Tensor:
        """The whole buffer; allocated when first needed, so that set-up costs no memory."""
        if self._flat is None:
            self._allocate()
        assert self._flat is not None
        return self._flat

    @property
    def payload(self) -> torch.Tensor:
        """The gradients as one 1-D tensor, with padding."""
        return self.flat[: self._layout.numel]

    @property
    def tail(self) -> torch.Tensor:
        """``[flags | weight | signal | abort]``, part of :attr:`flat` unless it travels apart."""
        if self._tail is None:
            self._allocate()
        assert self._tail is not None
        return self._tail

    def _allocate(self) -> None:
        tail_numel = len(self.slots) + _TAIL_EXTRA
        payload = self._layout.numel
        if self._tail_apart:
            self._flat = torch.zeros(payload, dtype=self.dtype, device=self.device)
            self._tail = torch.zeros(tail_numel, dtype=torch.float32, device=self.device)
        else:
            self._flat = torch.zeros(payload + tail_numel, dtype=self.dtype, device=self.device)
            self._tail = self._flat[payload:]
        self._tail_if_full = torch.ones_like(self._tail)
        self._tail_if_full[_WEIGHT + 1 :] = 0
        for slot, offset in zip(self.slots, self._layout.offsets, strict=True):
            slot.view = view_like(self._flat, offset, slot.param)
            self._views.append(slot.view)
        self._addresses = [view.data_ptr() for view in self._views]

    def begin(self, fits: bool) -> None:
        """Starts a round.

        Args:
            fits: Whether every parameter is trainable and fits its place: the common case, which needs no loop.
        """
        self.launched = False
        if fits:
            self.missing = len(self.slots)
        else:
            self.missing = sum(slot.param.requires_grad and not slot.stale for slot in self.slots) or NEVER

    @torch.no_grad()
    def fill(self, scale: float, weight: float, *, signal: bool, abort: bool, add_up: bool) -> bool:
        """Puts this rank's contribution into the buffer and makes the gradients views of it.

        Args:
            scale: Factor for the gradients.
            weight: How much this rank counts; with 0 it contributes zeros.
            signal: Whether this rank asks for a new layout.
            abort: Whether this rank gives the round up.
            add_up: Whether the gradients of earlier rounds are kept apart and added to the result. If not, what a
                parameter contributes is its whole ``.grad``, earlier rounds included: those parts are the same on all
                ranks, and their mean is themselves.

        Returns:
            Whether a gradient turned out to be sparse: it has no place here, and its slot is stale from now on.
        """
        payload = self.payload  # allocates
        self.absent = []
        found_sparse = False
        copies: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        present: list[torch.Tensor] = []
        empty: list[torch.Tensor] = []
        if list(map(torch.Tensor.data_ptr, self._views)) != self._addresses:
            self._renew_views()
        for slot, view in zip(self.slots, self._views, strict=True):
            param = slot.param
            grad = param.grad
            if slot.used and grad is not None and grad.layout is torch.strided and not slot.stale:
                if grad is view:
                    present.append(view)
                else:  # the common case: this loop runs once for each parameter and step
                    param.grad = view
                    copies.append(grad)
                    targets.append(view)
                continue
            if grad is not None and grad.layout is not torch.strided and not slot.stale:
                slot.sparse = slot.stale = found_sparse = True
            if grad is None or slot.stale:
                self._require_nobody_took(slot)
                self.absent.append((slot, None))
                empty.append(view)
            elif add_up:
                self.absent.append((slot, grad.clone() if grad is view else grad))
                empty.append(view)
            elif grad is view:
                self.absent.append((slot, view.clone()))
                present.append(view)
            else:
                self.absent.append((slot, None))
                copies.append(grad)
                targets.append(view)
        self._write_tail(weight, signal or found_sparse, abort)
        if weight == 0:
            payload.zero_()
            return found_sparse
        if empty:
            _private.foreach_zero(empty)
        if self._batched or scale == 1.0:
            if copies:
                _private.foreach_copy(targets, copies)
            if scale != 1.0:
                payload.mul_(scale)
            return found_sparse
        for grad, view in zip(copies, targets, strict=True):
            torch.mul(grad, scale, out=view)
        for view in present:
            view.mul_(scale)
        return found_sparse

    @staticmethod
    def _require_nobody_took(slot: Slot) -> None:
        """An optimizer that runs in backward has used up the local gradient: ranks would drift apart."""
        if slot.used and slot.param.grad is None and _private.has_optimizer_in_backward(slot.param):
            raise NotImplementedError(
                f"Parameter {slot.name!r} has an optimizer that runs in backward, which steps before gradients are"
                f" averaged. Step the optimizer after backward, or leave the parameter out of replicate()."
            )

    def _renew_views(self) -> None:
        """`Module.half()` and the like put new memory under a gradient and keep the object: makes new views."""
        assert self._flat is not None
        self._views = [
            view if view.data_ptr() == address else view_like(self._flat, offset, slot.param)
            for slot, view, address, offset in zip(
                self.slots, self._views, self._addresses, self._layout.offsets, strict=True
            )
        ]
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.view = view

    def _write_tail(self, weight: float, signal: bool, abort: bool) -> None:
        tail = self.tail  # allocates
        if not self.absent and weight == 1.0 and not signal and not abort:
            assert self._tail_if_full is not None
            tail.copy_(self._tail_if_full)
            return
        absent = {slot for slot, _ in self.absent}
        values = [0.0 if slot in absent else 1.0 for slot in self.slots]
        numbers = torch.tensor([*values, weight, float(signal), float(abort)], dtype=tail.dtype)
        tail.copy_(numbers, non_blocking=True)

    @torch.no_grad()
    def settle(self, add_up: bool) -> list[Slot]:
        """After the reduction: decides what the parameters get for which this rank had no gradient.

        Reads the flags from the device only if there is such a parameter.

        Args:
            add_up: Whether the gradients of earlier rounds were kept apart; see :meth:`fill`.

        Returns:
            The slots for which this rank had no gradient.
        """
        self.launched = False
        self.missing = NEVER
        self.idle = []
        if add_up:
            for slot in self.slots:
                if slot.base is not None and slot.view is not None and not slot.stale:
                    slot.view.add_(slot.base)
                    slot.base = None
        if not self.absent:
            return []
        flags = self._read()
        counts = Totals(*flags[_WEIGHT:]).weight > 0
        absent = dict(self.absent)
        for slot, flag in zip(self.slots, flags, strict=False):
            if slot not in absent:
                continue
            if flag == 0 and counts:
                self.idle.append(slot)
            view, old = slot.view, absent[slot]
            assert view is not None
            if slot.stale:
                if slot.sparse and flag > 0:  # dense on another rank: this much of the average is known
                    slot.base = view.clone()
            elif flag > 0:
                if add_up and old is not None:
                    view.add_(old)
                slot.param.grad = view
            elif old is not None and slot.param.grad is view:
                view.copy_(old)
        self.absent = []
        return list(absent)

    def read_totals(self) -> Totals:
        """The sums over ranks of weight, signal and abort. Waits for the device."""
        return Totals(*self._read()[_WEIGHT:])

    def read_totals_later(self) -> Callable[[], Totals]:
        """Starts to copy the totals to the host. Calling the result waits for that copy, and for nothing else."""
        numbers = self.tail[_WEIGHT:]
        numbers = (numbers.real if numbers.is_complex() else numbers).float()
        if self.device.type != "cuda":
            kept = numbers.clone()
            return lambda: Totals(*kept.tolist())
        host = torch.empty(_TAIL_EXTRA, pin_memory=True).copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> Totals:
            copied.synchronize()
            return Totals(*host.tolist())

        return read

    @property
    def weight(self) -> torch.Tensor:
        """The sum of the ranks' weights, without waiting for the device."""
        weight = self.tail[_WEIGHT]
        return weight.real if weight.is_complex() else weight

    def _read(self) -> list[float]:
        tail = self.tail
        return (tail.real if tail.is_complex() else tail).tolist()
