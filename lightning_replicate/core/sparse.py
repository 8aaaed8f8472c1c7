"""A bucket of one parameter whose gradients are sparse, like those of ``nn.Embedding(sparse=True)``.

Ranks touch different rows, so they first tell each other how many, then gather rows and values, and add them up in the
same order. The result stays sparse, and is coalesced. If any rank's gradient is dense (the parameter has another use),
the result is dense on all ranks. A header of a few numbers takes the place of a dense bucket's tail.

Reading the header makes the host wait for the device, since the sizes of what follows depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_replicate.core.bucket import NEVER, Slot, Totals

_PRESENT, _ROWS, _DENSE, _WEIGHT, _SIGNAL, _ABORT, _SIZE = range(7)


class SparseBucket:
    """One parameter and its sparse gradient. Has the interface of :class:`~lightning_replicate.core.bucket.Bucket`.

    Attributes:
        index: Position in the launch order.
        slots: The parameter, alone in a list.
        missing: Zero when the gradient is there.
        launched: Whether its header left in this round.
    """

    def __init__(self, index: int, slot: Slot) -> None:
        self.index = index
        self.slots = [slot]
        self.dtype = slot.param.dtype
        self.device = slot.param.device
        self.missing = NEVER
        self.launched = False
        self.idle: list[Slot] = []
        self._old: torch.Tensor | None = None
        self._local: torch.Tensor | None = None
        self._headers: list[torch.Tensor] = []
        self._work: Any = None
        self._totals = Totals()
        self._found_use = False
        slot.place(self)

    def holds(self, slot: Slot) -> bool:
        """Whether the slot's parameter, as it is now, still fits its place."""
        return slot.sparse and slot.fits(self.dtype, self.device)

    def begin(self, fits: bool) -> None:
        """Starts a round; see :meth:`Bucket.begin`."""
        slot = self.slots[0]
        self.launched = False
        self.missing = 1 if fits or (slot.param.requires_grad and not slot.stale) else NEVER

    @torch.no_grad()
    def launch(
        self, group: dist.ProcessGroup, scale: float, weight: float, signal: bool, abort: bool, add_up: bool
    ) -> int:
        """Takes this rank's contribution and sends its header.

        Args:
            group: The process group.
            scale: Factor for the gradient.
            weight: How much this rank counts; with 0 it contributes nothing.
            signal: Whether this rank asks for a new layout.
            abort: Whether this rank gives the round up.
            add_up: Whether earlier rounds' gradients are kept apart; see :meth:`Bucket.fill`.

        Returns:
            Bytes sent.
        """
        slot = self.slots[0]
        grad = None if slot.stale else slot.param.grad
        self._old = None if slot.used else grad
        present = slot.used and grad is not None
        gives = grad is not None and weight > 0 and (present or not add_up)
        dense = grad is not None and grad.layout is torch.strided
        self._local = None
        if gives:
            assert grad is not None
            coalesced = (grad.to_sparse(1) if dense else grad).coalesce()
            self._local = _sparse(coalesced.indices(), coalesced.values() * scale, coalesced.shape)
        rows = 0 if self._local is None else self._local.indices().shape[1]
        numbers = [0.0] * _SIZE
        numbers[_PRESENT], numbers[_ROWS], numbers[_DENSE] = float(present), float(rows), float(dense)
        numbers[_WEIGHT], numbers[_SIGNAL], numbers[_ABORT] = weight, float(signal), float(abort)
        header = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self._headers = [torch.empty_like(header) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._headers, header, group=group, async_op=True)
        self.launched = True
        return header.nbytes

    @torch.no_grad()
    def finish(self, group: dist.ProcessGroup, divide_by_weights: bool) -> int:
        """Gathers rows and values, and hands out their sum.

        Returns:
            Bytes sent.
        """
        self._work.wait()
        table = torch.stack(self._headers).cpu()
        world_size = table.shape[0]
        totals = table.sum(0)
        self._totals = Totals(totals[_WEIGHT].item(), totals[_SIGNAL].item(), totals[_ABORT].item())
        self._found_use = totals[_PRESENT].item() > 0
        slot = self.slots[0]
        self.idle = [] if self._found_use or self._totals.weight == 0 else [slot]
        counts = [int(count) for count in table[:, _ROWS].tolist()]
        most = max(counts)
        if not self._found_use or most == 0:
            if self._found_use:
                slot.param.grad = slot.param.grad if slot.param.grad is not None else self._empty()
            return 0
        local = self._local if self._local is not None else self._empty()
        indices = local.indices().new_zeros((local.indices().shape[0], most))
        values = local.values().new_zeros((most, *local.values().shape[1:]))
        indices[:, : local.indices().shape[1]] = local.indices()
        values[: local.values().shape[0]] = local.values()
        all_indices = [torch.empty_like(indices) for _ in range(world_size)]
        all_values = [torch.empty_like(values) for _ in range(world_size)]
        dist.all_gather(all_indices, indices, group=group)
        dist.all_gather(all_values, values, group=group)
        rows_of_all = torch.cat([i[:, :count] for i, count in zip(all_indices, counts, strict=True)], dim=1)
        values_of_all = torch.cat([v[:count] for v, count in zip(all_values, counts, strict=True)])
        total = _sparse(rows_of_all, values_of_all, slot.param.shape, is_coalesced=False).coalesce()
        if divide_by_weights and self._totals.weight not in (0, world_size):
            total = total * (world_size / self._totals.weight)
        slot.param.grad = total.to_dense() if totals[_DENSE] > 0 else total
        return indices.nbytes + values.nbytes

    def _empty(self) -> torch.Tensor:
        param = self.slots[0].param
        indices = torch.zeros((1, 0), dtype=torch.int64, device=self.device)
        values = torch.zeros((0, *param.shape[1:]), dtype=self.dtype, device=self.device)
        return _sparse(indices, values, param.shape)

    @torch.no_grad()
    def settle(self, add_up: bool) -> list[Slot]:
        """Puts earlier rounds' gradients back where they were kept apart.

        Returns:
            The slot, if this rank had no gradient for it.
        """
        slot = self.slots[0]
        missed = [] if slot.used and self._old is None and self._local is not None else [slot]
        earlier = slot.base if slot.base is not None else self._old
        if add_up and earlier is not None and self._found_use:
            assert slot.param.grad is not None
            grad = slot.param.grad  # torch adds sparse to dense, and not the other way round
            slot.param.grad = grad + earlier if earlier.is_sparse else earlier + grad
        slot.base = self._local = self._old = None
        self.launched = False
        self.missing = NEVER
        return missed

    def read_totals(self) -> Totals:
        """The sums over ranks of weight, signal and abort."""
        return self._totals

    def read_totals_later(self) -> Callable[[], Totals]:
        """The same; the header is on the host already."""
        totals = self._totals
        return lambda: totals


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool = True) -> torch.Tensor:
    # what goes in comes from sparse tensors of this very shape, so torch need not check it again
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
