"""From parameters to buckets. Pure planning: no tensor is moved and nothing is communicated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

# Each gradient starts at a multiple of this many bytes: vectorized kernels, foreach optimizers among them, fall
# back to a slower path for a tensor that does not.
_ALIGNMENT = 16


@dataclass(frozen=True)
class ParamSpec:
    """What ranks must agree on for one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> ParamSpec:
        """Reads the specification off a parameter."""
        return cls(
            name=name,
            shape=tuple(param.shape),
            stride=tuple(param.stride()),
            dtype=param.dtype,
            device_type=param.device.type,
            requires_grad=param.requires_grad,
        )

    def differences(self, other: ParamSpec) -> list[str]:
        """Names of the fields in which the two differ."""
        fields = ("name", "shape", "dtype", "stride", "requires_grad", "device_type")
        return [field for field in fields if getattr(self, field) != getattr(other, field)]


@dataclass(frozen=True)
class FlatLayout:
    """Where the gradients of one bucket lie in its flat buffer, in elements."""

    offsets: tuple[int, ...]
    numel: int


def assign_buckets(
    nbytes: Sequence[int], kinds: Sequence[Hashable], caps: Sequence[int], *, apart: Sequence[bool] | None = None
) -> list[list[int]]:
    """Groups tensors into buckets by size, the way DDP's reducer does.

    Tensors are taken in order. Each kind (data type and device) fills one bucket at a time and closes it when its
    size reaches the limit; a kind's first bucket uses ``caps[0]``, its second ``caps[1]``, and the last limit repeats.

    Args:
        nbytes: Size of each tensor in bytes.
        kinds: What may not be mixed in one bucket, for each tensor.
        caps: Limits in bytes.
        apart: Marks tensors that get a bucket of their own.

    Returns:
        Indices, bucket by bucket, ordered by the last tensor of each bucket: the order in which buckets become
        complete when tensors arrive in the given order.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    closed_of_kind: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for index, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        if apart is not None and apart[index]:
            buckets.append([index])
            continue
        open_buckets.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + size
        nth = closed_of_kind.get(kind, 0)
        if sizes[kind] >= caps[min(nth, len(caps) - 1)]:
            buckets.append(open_buckets.pop(kind))
            sizes[kind] = 0
            closed_of_kind[kind] = nth + 1
    buckets.extend(open_buckets.values())
    return sorted(buckets, key=lambda bucket: bucket[-1])


def flat_layout(numels: Sequence[int], element_size: int) -> FlatLayout:
    """Places gradients one after another, each aligned.

    Args:
        numels: Number of elements of each gradient.
        element_size: Bytes of one element.
    """
    step = max(1, _ALIGNMENT // element_size)
    offsets = []
    end = 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // step) * step
    return FlatLayout(tuple(offsets), end)


def view_like(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """A view into ``flat`` with the parameter's shape and, where its memory has no gaps, its strides.

    Autograd accumulates into gradients that have the parameter's strides without a copy, so the view keeps them
    (channels-last weights get channels-last gradients).
    """
    numel = param.numel()
    if not is_dense(param):
        return flat[offset : offset + numel].view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset() + offset)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0
