"""Sharded modules beside replicated ones: buffers, checkpointed and compiled blocks, hooks, other kinds of sharding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_replicate import ReplicateStrategy, replicate
from tests.core.helpers import assert_ranks_equal, assert_same, data
from tests.ranks import Ranks
from tests.strategy.helpers import trainer
from tests.strategy.test_mixed import Mixed, Net, assert_like, full, one_process

WORLD = 2


# ---- buffers --------------------------------------------------------------------------------------------------------


class _Counting(nn.Module):
    """A block with running statistics, a buffer that is assigned anew, a counter, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise", torch.randn(6), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.seen += len(hidden) + dist.get_rank()
        return self.norm(self.linear(hidden)) + self.noise


class _Buffered(Mixed):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net.trunk[0] = _Counting()
        self.net.trunk[1] = _Counting()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.read = [b.clone() for block in self.net.trunk[:2] for b in (block.norm.running_mean, block.noise)]


def _buffers(rank: int) -> None:
    model = _Buffered()
    trainer(ReplicateStrategy(shard="net.trunk.0"), limit_val_batches=1.0).fit(model)
    assert_ranks_equal(model.read)  # what validation saw, of the sharded block and the replicated one
    for block in model.net.trunk[:2]:
        assert_ranks_equal([block.mean, block.noise, block.norm.running_var])
        assert block.seen.item() == 5 * 3 + 5 * rank  # counters belong to their rank
    torch.manual_seed(1000)
    first = _Buffered(seed=1000)
    assert_same([model.net.trunk[0].noise], [first.net.trunk[0].noise])  # rank 0's, although it is not saved
    with torch.no_grad():  # rank 0's statistics come from rank 0's batches
        first.net.trunk[0](first.net.stem(data(0, 0, 3, 4)).relu())
    assert not torch.equal(first.net.trunk[0].mean, model.net.trunk[0].mean)


def test_t36_t48_buffers_of_both_kinds_of_modules(ranks: Ranks) -> None:
    ranks(2, _buffers)


# ---- blocks that are checkpointed, compiled, offloaded, or compute in half precision --------------------------------


class _Checkpointed(Mixed):
    reentrant = False

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.net.stem(batch).relu()
        for block in self.net.trunk:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.net.head(hidden) + self.net.loose


def _blocks(rank: int) -> None:
    reference = one_process(5, WORLD)
    model: Mixed = _Checkpointed()
    trainer(ReplicateStrategy(shard=["net.trunk.0", "net.trunk.2"])).fit(model)
    assert_like(model, reference)

    model = Mixed()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)  # Dynamo's
        for index in range(3):
            model.net.trunk[index].compile(backend="aot_eager")
        trainer(ReplicateStrategy(shard=["net.trunk.0", "net.trunk.2"])).fit(model)
    assert_like(model, reference)

    model = Mixed()
    offload = CPUOffloadPolicy(pin_memory=False)
    trainer(ReplicateStrategy(shard="net.trunk.*", offload_policy=offload)).fit(model)
    assert_like(model, reference)

    model = Mixed()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    trainer(ReplicateStrategy(shard="net.trunk.*", mp_policy=policy, reduce_dtype=torch.bfloat16)).fit(model)
    assert_like(model, reference, rtol=3e-2, atol=3e-2)


@pytest.mark.slow
def test_r48_c6_checkpointed_compiled_offloaded_and_half_precision_blocks(ranks: Ranks) -> None:
    ranks(2, _blocks)


def _hook(rank: int) -> None:
    seen: list[int] = []

    def counting_hook(group: Any, bucket: Any) -> Any:
        seen.append(sum(gradient.numel() for gradient in bucket.gradients()))
        return bf16_compress_hook(group, bucket)

    model = Mixed()
    trainer(ReplicateStrategy(shard="net.trunk.*", ddp_comm_hook=counting_hook)).fit(model)
    replicated = sum(p.numel() for p in [*model.net.stem.parameters(), *model.net.head.parameters(), model.net.loose])
    assert sum(seen) == 5 * replicated  # the sharded part is not touched
    assert_like(model, one_process(5, WORLD), rtol=2e-2, atol=2e-2)


def test_r64_a_hook_on_the_replicated_part_alone(ranks: Ranks) -> None:
    ranks(2, _hook)


def _plain(rank: int) -> None:
    model = Mixed()
    before = {name: param for name, param in model.named_parameters() if "trunk" not in name}
    replicated: dict[str, Any] = {}

    class Looks(Mixed):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step == 3:
                replicated.update((name, (p, p.grad)) for name, p in self.named_parameters() if "trunk" not in name)

    model.__class__ = Looks
    trainer(ReplicateStrategy(shard="net.trunk.*")).fit(model)
    assert {name: id(param) for name, (param, _) in replicated.items()} == {n: id(p) for n, p in before.items()}
    assert all(type(param) is nn.Parameter and type(grad) is Tensor for param, grad in replicated.values())
    # one copy of the gradients: views into one bucket
    assert len({grad.untyped_storage().data_ptr() for _, grad in replicated.values()}) == 1
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) == ("trunk" in name)


def test_t28_t33_c7_replicated_parameters_stay_plain_tensors(ranks: Ranks) -> None:
    ranks(2, _plain)


# ---- callbacks ------------------------------------------------------------------------------------------------------


class _Disagreeing(Mixed):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        better = self.trainer.current_epoch if self.trainer.global_rank else -self.trainer.current_epoch
        self.log("val_loss", float(better))


def _keeps(rank: int, folder: str) -> None:
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, save_last=True)
    run = trainer(
        ReplicateStrategy(shard="net.trunk.*"),
        max_epochs=3,
        limit_val_batches=1,
        enable_checkpointing=True,
        callbacks=[keep],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "It is recommended to use", UserWarning)
        warnings.filterwarnings("ignore", "The monitored value 'val_loss' is not the same on all ranks")
        run.fit(_Disagreeing())
    dist.barrier()
    paths: list[Any] = [None] * WORLD
    dist.all_gather_object(paths, keep.best_model_path)
    assert paths[0] == paths[1]
    assert Path(paths[0]).exists()
    assert Path(folder, "last.ckpt").exists()


def test_r34_all_ranks_keep_the_same_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _keeps, str(tmp_path))


# ---- other kinds of sharding ----------------------------------------------------------------------------------------


def _meshes(rank: int) -> None:
    def by_hand(model: Mixed) -> None:
        assert model.device_mesh.mesh_dim_names == ("replicate", "shard")
        for block in model.net.trunk:
            fully_shard(block, mesh=model.device_mesh)
        replicate(model.net, mesh=model.device_mesh)  # over all ranks

    model = Mixed(by_hand)
    trainer(ReplicateStrategy(shard_size=2)).fit(model)
    assert_like(model, one_process(5, 4))


@pytest.mark.slow
def test_r51_by_hand_on_a_mesh_of_two_dimensions(ranks: Ranks) -> None:
    ranks(4, _meshes)


def _sliced(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "tp"))
    net = replicate(nn.Linear(4, 2), mesh=mesh["dp"])
    net(data(rank, 0, 3, 4)).sum().backward()
    expected = sum(data(r, 0, 3, 4).sum(0) for r in range(WORLD)) / WORLD
    assert_same([net.weight.grad], [expected.expand(2, 4)])
    assert type(net.weight) is nn.Parameter


def test_t27_a_dimension_of_a_mesh_whose_other_dimensions_have_size_one(ranks: Ranks) -> None:
    ranks(2, _sliced)


def _tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    net = Net()
    parallelize_module(net.head, mesh["tp"], ColwiseParallel())
    assert isinstance(net.head.weight, DTensor)
    with pytest.raises(ValueError, match=r"'head.weight' is a DTensor.*tensor-parallel"):
        replicate(net)

    def by_hand(model: Mixed) -> None:
        parallelize_module(model.net.head, init_device_mesh("cpu", (WORLD,)), ColwiseParallel())

    with pytest.raises(ValueError, match=r"'net.head.weight' is a DTensor.*tensor-parallel"):
        trainer().fit(Mixed(by_hand))


def test_r50_t09_tensor_parallel_parameters_are_refused(ranks: Ranks) -> None:
    ranks(2, _tensor_parallel)


def _fsdp1(rank: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    net = Net()
    net.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 on a CPU
        net.trunk = FullyShardedDataParallel(net.trunk, device_id=torch.device("cpu"), use_orig_params=True)
        replicate(net)
        net(data(rank, 0, 3, 4)).pow(2).mean().backward()
        sum(plain(data(r, 0, 3, 4)).pow(2).mean() / WORLD for r in range(WORLD)).backward()
        assert_same([net.stem.weight.grad, net.loose.grad], [plain.stem.weight.grad, plain.loose.grad])
        with FullyShardedDataParallel.summon_full_params(net.trunk, with_grads=True):
            mine = [param.grad for param in net.trunk.parameters()]
        assert_same(mine, [param.grad for param in plain.trunk.parameters()])  # reduced once
        with pytest.raises(ValueError, match="wrapped with FullyShardedDataParallel cannot be replicated"):
            replicate(net.trunk)

        def by_hand(model: Mixed) -> None:
            model.net.trunk = FullyShardedDataParallel(model.net.trunk, device_id=torch.device("cpu"))

        with pytest.raises(ValueError, match=r"Shard them with `fully_shard`"):
            trainer().fit(Mixed(by_hand))


def test_t31_fsdp1_keeps_its_parameters(ranks: Ranks) -> None:
    ranks(2, _fsdp1)


def _seeds(rank: int) -> None:
    """Modules that are built in ``configure_model``, from each rank's own random numbers, and sharded there."""

    class Built(Mixed):
        def configure_model(self) -> None:
            self.net = Net()
            fully_shard(self.net.trunk, mesh=self.device_mesh)

        def configure_optimizers(self) -> Any:
            self.first = [value.clone() for value in full(self.parameters())]
            return super().configure_optimizers()

    model = Built()
    mine = torch.randn(1)
    trainer(max_steps=1).fit(model)
    assert_ranks_equal(model.first[:2] + full(model.net.trunk.parameters()))
    everywhere = [torch.empty(1) for _ in range(WORLD)]
    dist.all_gather(everywhere, mine)
    assert everywhere[0] != everywhere[1]
    dist.all_gather(everywhere, torch.randn(1))
    assert everywhere[0] != everywhere[1]  # ranks go on with their own random numbers


def test_r47_modules_built_and_sharded_in_configure_model_begin_equal(ranks: Ranks) -> None:
    ranks(2, _seeds)
