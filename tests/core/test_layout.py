"""Planning: no ranks needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_replicate.core.layout import assign_buckets, flat_layout, is_dense, view_like


def _assign(tensors: list[torch.Tensor], caps: list[int], **options: list[bool]) -> list[list[int]]:
    return assign_buckets([t.nbytes for t in tensors], [t.dtype for t in tensors], caps, **options)


F, D = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("sizes", "dtypes", "caps", "expected"),
    [
        ([100, 200, 100, 50], [F, F, F, F], [400], [[0], [1], [2], [3]]),
        ([50, 25, 50, 25, 50, 25], [F, D, F, D, F, D], [400], [[0, 2], [1, 3], [4], [5]]),
        ([10, 10, 10, 10], [F, F, F, F], [40, 80], [[0], [1, 2], [3]]),
        ([50, 25, 50, 25, 50, 25], [F, D, F, D, F, D], [200, 400], [[0], [1], [2, 4], [3, 5]]),
        ([], [], [1], []),
        ([1000, 1, 1], [F, F, F], [8], [[0], [1, 2]]),
    ],
    ids=["each-full", "two-kinds", "growing-caps", "growing-caps-two-kinds", "nothing", "larger-than-a-bucket"],
)
def test_d54_bucket_assignment(sizes: list[int], dtypes: list[torch.dtype], caps: list[int], expected: object) -> None:
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    assert _assign(tensors, caps) == expected


def test_buckets_come_in_the_order_in_which_they_become_complete() -> None:
    # the float bucket opens first and is complete last
    tensors = [torch.empty(1, dtype=F), torch.empty(100, dtype=D), torch.empty(100, dtype=F)]
    assert _assign(tensors, [400]) == [[1], [0, 2]]


def test_a_tensor_may_ask_for_a_bucket_of_its_own() -> None:
    tensors = [torch.empty(1) for _ in range(3)]
    assert _assign(tensors, [400], apart=[False, True, False]) == [[1], [0, 2]]


def test_gradients_start_aligned_and_do_not_overlap() -> None:
    layout = flat_layout([1, 5, 0, 4], element_size=4)
    assert layout.offsets == (0, 4, 12, 12)
    assert layout.numel == 16
    assert flat_layout([1, 1], element_size=2).offsets == (0, 8)
    assert flat_layout([1, 1], element_size=16).offsets == (0, 1)


_WEIGHTS = {
    "row-major": torch.empty(3, 4),
    "transposed": torch.empty(3, 4).t(),
    "channels-last": torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "1x1 channels-last": torch.empty(8, 4, 1, 1).to(memory_format=torch.channels_last),
    "depthwise": torch.empty(8, 1, 3, 3).to(memory_format=torch.channels_last),
    "scalar": torch.empty(()),
    "size-one dimensions": torch.empty(1, 5, 1),
}


@pytest.mark.parametrize("name", _WEIGHTS)
def test_views_keep_shape_and_strides(name: str) -> None:
    weight = _WEIGHTS[name]
    flat = torch.arange(200.0)
    view = view_like(flat, 7, weight)
    assert (view.shape, view.stride()) == (weight.shape, weight.stride())
    assert sorted(view.reshape(-1).tolist()) == [7.0 + i for i in range(weight.numel())]
    view.zero_()
    assert flat.count_nonzero() == 200 - weight.numel() - 1  # arange starts with one zero


def test_memory_with_gaps_gets_a_row_major_view() -> None:
    weight = torch.empty(4, 6)[:, ::2]
    assert not is_dense(weight)
    assert view_like(torch.empty(20), 2, weight).stride() == (3, 1)
    assert view_like(torch.empty(20), 20, torch.empty(0, 3)).shape == (0, 3)
    assert not is_dense(nn.Parameter(torch.empty(1).expand(3)))
