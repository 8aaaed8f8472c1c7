"""Plain types shared by every layer of the core: options, plans, statistics and errors. Imports nothing local."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args

import torch

Average = Literal["participants", "world", "sum", "weighted"]
"""What a gradient is divided by: the ranks that took part, all ranks, one, or the sum of the ranks' weights."""

BufferChoice = Union[Literal["auto", "step", "epoch", "start"], Iterable[str], Callable[[str, torch.Tensor], bool]]
"""Which buffers follow rank 0 after set-up, and when. See :class:`~lightning_replicate.core.buffers.BufferSync`."""

UnaveragedGradients = Literal["error", "warn", "allow"]
"""What happens when an optimizer is about to step a replicated parameter with a gradient that no round averaged."""

IgnoredBuffers = Union[str, torch.Tensor, Iterable[Union[str, torch.Tensor]]]
"""Buffers that are each rank's own: names, globs, or the buffers themselves."""

_AVERAGES = get_args(Average)
_BUFFER_SCHEDULES = ("auto", "step", "epoch", "start")
_MIB = 1024 * 1024


BucketCap = Union[float, Literal["auto"]]
"""Size of a bucket in MiB, or ``"auto"``."""

_DEFAULT_CAP_MIB = 25.0


class ReplicateError(RuntimeError):
    """Ranks disagree, or a round of gradient averaging could not be finished.

    Attributes:
        from_another_rank: Whether another rank's error is the cause.
    """

    from_another_rank: bool = False


@dataclass(frozen=True)
class Options:
    """How the parameters of one ``replicate()`` call travel.

    Attributes:
        bucket_cap_mb: Size at which a bucket is closed, in MiB; or ``"auto"``, see
            :mod:`lightning_replicate.core.planning`.
        reduce_dtype: Data type on the wire; ``None`` keeps the gradient's own.
        average: What the sum over ranks is divided by.
        comm_hook: DDP communication hook ``hook(state, bucket) -> Future``, or ``None``.
        comm_hook_state: First argument of ``comm_hook``.
        buffers: Which buffers follow rank 0, and when.
        strict_unused: Whether a parameter without a gradient is an error.
        unaveraged_gradients: What happens when an optimizer is about to step with a gradient that was not averaged.
    """

    bucket_cap_mb: BucketCap = 25.0
    reduce_dtype: torch.dtype | None = None
    average: Average = "participants"
    comm_hook: Callable[..., Any] | None = None
    comm_hook_state: Any = None
    buffers: BufferChoice = "auto"
    strict_unused: bool = False
    unaveraged_gradients: UnaveragedGradients = "error"

    def __post_init__(self) -> None:
        cap = self.bucket_cap_mb
        number = isinstance(cap, (int, float)) and not isinstance(cap, bool)
        if cap != "auto" and not (number and math.isfinite(cap) and cap > 0):
            raise ValueError(f"`bucket_cap_mb` must be a positive number of MiB, or 'auto', got {cap!r}.")
        if self.average not in _AVERAGES:
            raise ValueError(f"`average` must be one of {', '.join(_AVERAGES)}, got {self.average!r}.")
        if self.unaveraged_gradients not in get_args(UnaveragedGradients):
            allowed = ", ".join(get_args(UnaveragedGradients))
            raise ValueError(f"`unaveraged_gradients` must be one of {allowed}, got {self.unaveraged_gradients!r}.")
        if self.reduce_dtype is not None and not (
            isinstance(self.reduce_dtype, torch.dtype) and self.reduce_dtype.is_floating_point
        ):
            raise ValueError(f"`reduce_dtype` must be a floating-point torch.dtype, got {self.reduce_dtype!r}.")
        if self.comm_hook is not None and not callable(self.comm_hook):
            raise TypeError(f"`comm_hook` must be callable, got {type(self.comm_hook).__name__}.")
        if self.comm_hook is not None and self.reduce_dtype is not None:
            raise ValueError("Give either `comm_hook` or `reduce_dtype`: a hook decides itself what travels.")
        if self.comm_hook is not None and self.average == "sum":
            raise ValueError("A `comm_hook` divides by the world size itself, so `average='sum'` cannot be kept.")
        if isinstance(self.buffers, str) and self.buffers not in _BUFFER_SCHEDULES:
            raise ValueError(
                f"`buffers` must be one of {', '.join(_BUFFER_SCHEDULES)}, a list of names or a callable,"
                f" got {self.buffers!r}."
            )
        if not isinstance(self.buffers, str) and not callable(self.buffers):
            object.__setattr__(self, "buffers", tuple(self.buffers))  # it is read more than once

    @property
    def plans_buckets(self) -> bool:
        """Whether buckets are planned from measurements."""
        return self.bucket_cap_mb == "auto"

    @property
    def bucket_caps(self) -> tuple[int, ...]:
        """Bucket limits in bytes. The first bucket is small, so that communication starts early in backward."""
        mib = _DEFAULT_CAP_MIB if self.bucket_cap_mb == "auto" else self.bucket_cap_mb
        cap = max(1, int(mib * _MIB))
        return (min(_MIB, cap), cap)


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of a :class:`Plan`.

    Attributes:
        parameters: Names, in the order in which they lie in the bucket.
        dtype: Data type of every gradient in it.
        device: Device of every gradient in it.
        nbytes: Size of the gradients in bytes, without flags and padding.
    """

    parameters: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What one group reduces: its buckets in launch order.

    Attributes:
        buckets: The buckets, in the order in which they are launched.
        world_size: Number of ranks that average together.
        frozen: Names of managed parameters that do not require gradients and so are in no bucket.
        idle: Names of parameters that no rank has used for many rounds. They are in no bucket and cost nothing, until a
            rank uses them.
    """

    buckets: tuple[BucketPlan, ...]
    world_size: int
    frozen: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @classmethod
    def joined(cls, plans: Sequence[Plan], world_size: int) -> Plan:
        """Several groups' plans as one."""
        return cls(
            buckets=tuple(bucket for plan in plans for bucket in plan.buckets),
            world_size=world_size,
            frozen=tuple(name for plan in plans for name in plan.frozen),
            idle=tuple(name for plan in plans for name in plan.idle),
        )

    @property
    def nbytes(self) -> int:
        """Size of all gradients in bytes."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all replicated parameters, in launch order."""
        return tuple(name for bucket in self.buckets for name in bucket.parameters)

    def __str__(self) -> str:
        head = (
            f"{_counted(self.parameters, 'parameter')} in {_counted(self.buckets, 'bucket')},"
            f" {self.nbytes / _MIB:.2f} MiB, averaged over {_counted(range(self.world_size), 'rank')}"
        )
        if self.frozen:
            head += f"; {len(self.frozen)} frozen"
        if self.idle:
            head += f"; {len(self.idle)} idle"
        lines = [head]
        for index, bucket in enumerate(self.buckets):
            shown = ", ".join(bucket.parameters[:3]) + (", ..." if len(bucket.parameters) > 3 else "")
            lines.append(
                f"  bucket {index}: {bucket.nbytes / _MIB:8.3f} MiB  {str(bucket.dtype).removeprefix('torch.')}"
                f"  {bucket.device}  {_counted(bucket.parameters, 'parameter')} ({shown})"
            )
        return "\n".join(lines)


def _counted(things: Sequence[Any], noun: str) -> str:
    return f"{len(things)} {noun}" if len(things) == 1 else f"{len(things)} {noun}s"


@dataclass(frozen=True)
class RoundStats:
    """What one group's last round sent. Counted on the host; reading it never waits for the device.

    Attributes:
        number: How many rounds this group has closed, this one included.
        nbytes: Bytes handed to collectives on the gradient group, flags included.
        collectives: Collectives started on the gradient group.
        early: Buckets launched while backward was running.
        late: Buckets launched when backward ended.
        missed: Names of the parameters for which this rank had no gradient.
        participants: How many ranks took part. ``None`` where that is not known without waiting for the device, or
            ranks weigh differently.
    """

    number: int
    nbytes: int
    collectives: int
    early: int
    late: int
    missed: tuple[str, ...]
    participants: int | None = None
