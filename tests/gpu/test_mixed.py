"""What only a GPU can show, on a single one: one process with nccl, and two gloo ranks that share it.

Run with ``python -m pytest -m gpu tests/gpu``. Nothing else in the test suite needs a GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_replicate import ReplicateStrategy, replicate
from tests.core.helpers import assert_ranks_equal, assert_same, data
from tests.ranks import Ranks
from tests.strategy.test_mixed import Mixed, Net, assert_like, one_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class OnGpu(Mixed):
    """Evaluated in the middle of training, which FSDP2 does not survive in inference mode."""

    def on_validation_epoch_end(self) -> None:
        assert not torch.is_inference_mode_enabled()


def _fit(model: Mixed, **options: Any) -> None:
    Trainer(
        accelerator="gpu",
        devices=1,
        strategy=ReplicateStrategy(shard="net.trunk.*"),
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 1,
            "val_check_interval": 2,
            **options,
        },
    ).fit(model)


def _with_nccl(case: Callable[[], None]) -> None:
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        case()


def _trains() -> None:
    for options in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):

        def adam(params: Any, options: dict[str, bool] = options) -> Any:
            return torch.optim.Adam(params, lr=0.01, **options)

        model = OnGpu(optimizer=adam)
        _fit(model)
        assert_like(model.cpu(), one_process(5, 1), rtol=1e-4, atol=1e-5)
    model = OnGpu()
    _fit(model, gradient_clip_val=0.05)
    clipped = one_process(5, 1, before_step=lambda params: torch.nn.utils.clip_grad_norm_(params, 0.05))
    assert_like(model.cpu(), clipped, rtol=1e-4, atol=1e-5)
    for precision in ("16-mixed", "bf16-mixed"):
        model = OnGpu()
        _fit(model, precision=precision)
        assert_like(model.cpu(), one_process(5, 1), rtol=5e-2, atol=5e-2)


def _nccl(rank: int) -> None:
    _with_nccl(_trains)


def test_one_process_with_nccl(ranks: Ranks) -> None:
    ranks(1, _nccl)


def _shared(rank: int) -> None:
    torch.manual_seed(0)
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    net.cuda()
    replicate(net, bucket_cap_mb=0.0002)
    side = torch.cuda.Stream()
    for step in range(3):
        plain.zero_grad()
        net.zero_grad()
        sum(plain(data(r, step, 3, 4)).pow(2).mean() / 2 for r in range(2)).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(data(rank, step, 3, 4).cuda()).pow(2).mean().backward()
        torch.cuda.current_stream().wait_stream(side)
        mine = [param.grad.cpu() for param in net.parameters()]
        assert_ranks_equal(mine)
        assert_same(mine, [param.grad for param in plain.parameters()], rtol=1e-4, atol=1e-6)


def test_two_gloo_ranks_on_one_gpu(ranks: Ranks) -> None:
    ranks(2, _shared)
