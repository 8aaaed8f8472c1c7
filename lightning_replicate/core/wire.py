"""How a bucket travels: in which data type, through which hook, and what the sum over ranks is divided by.

Gradients are divided by the world size before they are summed, so that half-precision sums do not overflow. Where
fewer ranks took part, or ranks weigh differently, the sum is multiplied by ``world size / sum of weights`` afterwards.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_replicate.core.api import Options
from lightning_replicate.core.bucket import Bucket
from lightning_replicate.core.sparse import SparseBucket

# Largest integer up to which every sum of ones is exact; wider types never run out of ranks.
_EXACT_COUNT = {torch.bfloat16: 256, torch.float16: 2048}


class HookBucket:
    """What a DDP communication hook sees of a bucket: the interface of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, last: bool) -> None:
        self._bucket = bucket
        self._last = last
        self._buffer = bucket.payload

    def index(self) -> int:
        """The bucket's number: its position in the first layout, a new one for a bucket with other parameters."""
        return self._bucket.hook_index

    def is_last(self) -> bool:
        """Whether this bucket is the last of the round."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, 1-D, not divided by the world size."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that the hook works on."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, one view into the buffer for each parameter."""
        return [slot.view for slot in self._bucket.slots if slot.view is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of :meth:`gradients`."""
        return [slot.param for slot in self._bucket.slots]


class _InFlight(NamedTuple):
    """What was started for one bucket."""

    works: list[Any]
    future: Any  # of a communication hook
    wire_tensor: torch.Tensor | None  # what travels, where it is not the buffer itself


class Round(NamedTuple):
    """What this rank says about the round in the tail of each bucket.

    Attributes:
        weight: How much this rank counts in the average.
        signal: Whether this rank asks for a new layout.
        abort: Whether this rank gives the round up.
    """

    weight: float
    signal: bool = False
    abort: bool = False


class Wire:
    """Moves the buckets of one group over one process group.

    Args:
        process_group: Carries gradients and nothing else.
        options: The options of the ``replicate()`` call.

    Attributes:
        divide_factor: What the sum is divided by, whatever ``average`` says; ``None`` to follow ``average``.
    """

    def __init__(self, process_group: dist.ProcessGroup, options: Options) -> None:
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.divide_factor: float | None = None
        self.options = options
        self._pending: dict[Bucket, _InFlight] = {}

    @property
    def adds_up(self) -> bool:
        """Whether earlier rounds' gradients must be kept apart: any average but the mean would change them again."""
        return self.divide_factor is not None or self.options.average in ("sum", "weighted")

    @property
    def divides_by_weights(self) -> bool:
        """Whether the divisor depends on what ranks did in the round."""
        return self.divide_factor is None and self.options.average in ("participants", "weighted")

    def _scale(self, weight: float) -> float:
        """Factor for the gradients before they are summed."""
        if weight == 0:
            return 0.0
        if self.divide_factor is not None:
            return 1.0 / self.divide_factor
        if self.options.average == "sum" or self.options.comm_hook is not None:
            return 1.0
        return 1.0 / self.world_size

    def tail_apart(self, dtype: torch.dtype) -> bool:
        """Whether flags must not share the payload's collective: a hook, a weight or a data type would spoil them."""
        if self.options.comm_hook is not None:
            return True
        exact = [_EXACT_COUNT[kind] for kind in (self.options.reduce_dtype, dtype) if kind in _EXACT_COUNT]
        return bool(exact) and (self.options.average == "weighted" or self.world_size > min(exact))

    def _dtype_on_the_wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which data type gradients of this one travel."""
        reduce_dtype = self.options.reduce_dtype
        return dtype if reduce_dtype is None or dtype.is_complex else reduce_dtype

    def nbytes(self, param: torch.Tensor) -> int:
        """How many bytes the parameter's gradient takes on the wire."""
        return param.numel() * self._dtype_on_the_wire(param.dtype).itemsize

    def launch(self, bucket: Bucket | SparseBucket, said: Round, last: bool) -> tuple[int, int, bool]:
        """Fills the bucket and starts its reduction.

        Args:
            bucket: The bucket.
            said: What this rank says about the round.
            last: Whether this is the last bucket of the group.

        Returns:
            Bytes handed to collectives, the number of collectives, and whether a gradient was found to be sparse.
        """
        scale = self._scale(said.weight)
        if isinstance(bucket, SparseBucket):
            return bucket.launch(self.process_group, scale, *said, self.adds_up), 1, False
        found_sparse = bucket.fill(scale, said.weight, signal=said.signal, abort=said.abort, add_up=self.adds_up)
        works: list[Any] = []
        future: Any = None
        sent = bucket.payload
        wire_tensor: torch.Tensor | None = None
        hook = self.options.comm_hook
        if hook is not None:
            state = self.options.comm_hook_state
            future = hook(self.process_group if state is None else state, HookBucket(bucket, last))
            if not hasattr(future, "wait") or not hasattr(future, "value"):
                raise RuntimeError(f"A communication hook must return a torch.futures.Future, got {type(future)}.")
            if bucket.device.type == "cpu":
                # a hook may go on communicating in callbacks, which run on threads there: only one bucket at a time
                # gives all ranks the same order of collectives
                with suppress(Exception):
                    future.wait()  # raises again in finish()
        else:
            sent = bucket.flat
            dtype = self._dtype_on_the_wire(bucket.dtype)
            if dtype != bucket.dtype:
                sent = wire_tensor = sent.to(dtype)
            works.append(self._all_reduce(sent))
        nbytes, collectives = sent.nbytes, 1
        if self.tail_apart(bucket.dtype):
            works.append(self._all_reduce(bucket.tail))
            nbytes, collectives = nbytes + bucket.tail.nbytes, 2
        self._pending[bucket] = _InFlight(works, future, wire_tensor)
        bucket.launched = True
        return nbytes, collectives, found_sparse

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        if tensor.is_complex():  # not every backend sums complex numbers
            tensor = torch.view_as_real(tensor)
        return dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.process_group, async_op=True)

    def send_for_timing(self, message: torch.Tensor) -> None:
        """Sends a message like a bucket, and waits for it. Collective."""
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.process_group)

    @torch.no_grad()
    def finish(self, bucket: Bucket | SparseBucket) -> tuple[int, int]:
        """Waits for the bucket and turns the sum into the average.

        On a GPU this makes the current stream wait, not the host; a sparse bucket makes the host wait.

        Returns:
            Bytes and number of the collectives that this took.
        """
        if isinstance(bucket, SparseBucket):
            nbytes = bucket.finish(self.process_group, self.divides_by_weights)
            return nbytes, 2 if nbytes else 0
        works, future, wire_tensor = self._pending.pop(bucket)
        result = None if future is None else future.wait()
        for work in works:
            work.wait()
        if result is not None:
            result = result[0] if isinstance(result, (list, tuple)) else result
            if result.data_ptr() != bucket.payload.data_ptr():
                bucket.payload.copy_(result.view_as(bucket.payload))
        if wire_tensor is not None:
            bucket.flat.copy_(wire_tensor)
        if self.divides_by_weights:
            self._divide_by_weights(bucket)
        return 0, 0

    def _divide_by_weights(self, bucket: Bucket) -> None:
        weight = bucket.weight
        if bucket.device.type == "cpu":
            read = weight.item()
            if read > 0 and read != self.world_size:
                bucket.payload.mul_(self.world_size / read)
            return
        # without a read: where all ranks took part the factor is exactly one
        total = weight.double() if weight.dtype == torch.float64 else weight.float()
        factor = total.new_full((), self.world_size).div_(total.clamp_min(1e-30))  # without weights all is zero
        payload = bucket.payload
        if payload.dtype in _EXACT_COUNT:  # a half-precision factor would lose digits
            payload.copy_(payload.float().mul_(factor))
        else:
            payload.mul_(factor)
