"""What communication hooks have learned survives in a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_replicate import ReplicateStrategy
from tests.core.helpers import assert_ranks_equal, assert_same, mlp
from tests.ranks import Ranks
from tests.strategy.helpers import Small, trainer


class _Wide(Small):
    """With matrices that are large enough to be compressed."""

    steps = 4

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 40, 30)


def _power() -> ReplicateStrategy:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    # several buckets, whose order changes after the first round
    return ReplicateStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook, bucket_cap_mb=0.001)


def _fit(strategy: Any, epochs: int, path: str | None = None) -> Any:
    run = trainer(strategy, max_epochs=epochs)
    model = _Wide()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's optimizers that average use what torch deprecates
        run.fit(model, ckpt_path=path, weights_only=True if path else None)
    return run, model


def _power_sgd(rank: int, folder: str) -> None:
    path = f"{folder}/power.ckpt"
    run, _ = _fit(_power(), 2)
    run.save_checkpoint(path)
    _, unbroken = _fit(_power(), 4)
    _, resumed = _fit(_power(), 4, path)
    assert_ranks_equal(list(resumed.parameters()))
    assert_same(list(resumed.parameters()), list(unbroken.parameters()), rtol=0, atol=0)
    if rank == 0:  # a run that forgets the residuals comes out elsewhere
        content = torch.load(path, weights_only=True)
        assert any(
            torch.any(error)
            for error in content["lightning_replicate"]["comm_hooks"][1][0]["state"]["error_dict"].values()
        )
        del content["lightning_replicate"]
        torch.save(content, f"{folder}/forgetful.ckpt")
    dist.barrier()
    _, forgetful = _fit(_power(), 4, f"{folder}/forgetful.ckpt")
    assert not torch.equal(forgetful.net[0].weight, unbroken.net[0].weight)


def _other_world(rank: int, folder: str) -> None:
    _, resumed = _fit(_power(), 4, f"{folder}/power.ckpt")
    assert_ranks_equal(list(resumed.parameters()))


@pytest.mark.slow
def test_r64_power_sgd_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _power_sgd, str(tmp_path))
    ranks(3, _other_world, str(tmp_path))
    ranks(1, _other_world, str(tmp_path))


def _local_sgd(rank: int, folder: str) -> None:
    def strategy() -> ReplicateStrategy:
        state = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
        return ReplicateStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=4)

    path = f"{folder}/local.ckpt"
    run, _ = _fit(strategy(), 1)  # steps 0 and 1 reduce, step 2 averages parameters, step 3 is local
    run.save_checkpoint(path)
    run, _ = _fit(strategy(), 2, path)
    assert run.strategy._model_averager.step == 8
    assert run.strategy._options.comm_hook_state.iter >= 2  # it did not begin with gradients again


def test_r65_post_local_sgd_goes_on_counting(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _local_sgd, str(tmp_path))
