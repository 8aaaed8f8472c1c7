"""Clipping, loss scaling, optimizers, accumulation and skipped steps where some modules are sharded."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_replicate import (
    ReplicateError,
    ReplicateStrategy,
    clip_grad_norm_,
    clip_grad_value_,
    grad_norm,
    replicate,
    total_grad_norm,
)
from tests.core.helpers import assert_ranks_equal, assert_same, data
from tests.ranks import Ranks
from tests.strategy.helpers import trainer
from tests.strategy.test_inputs import _Uneven
from tests.strategy.test_mixed import Mixed, Net, assert_like, full, one_process

WORLD = 2
SHARD: dict[str, Any] = {"shard": ["net.trunk.*"]}


def fit(model: Mixed, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    path = options.pop("ckpt_path", None)
    run = trainer(ReplicateStrategy(**SHARD, **(arguments or {})), **options)
    run.fit(model, ckpt_path=path, weights_only=True if path else None)
    return run


# ---- clipping -------------------------------------------------------------------------------------------------------


class ByHook(Mixed):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Manual(Mixed):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def _clipping(rank: int) -> None:
    def sgd(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1)

    by_norm = one_process(5, WORLD, sgd, before_step=lambda params: nn.utils.clip_grad_norm_(params, 0.05))
    by_value = one_process(5, WORLD, sgd, before_step=lambda params: nn.utils.clip_grad_value_(params, 0.01))
    model = Mixed(optimizer=sgd)
    fit(model, gradient_clip_val=0.05)
    assert_like(model, by_norm)
    model = Mixed(optimizer=sgd)
    fit(model, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    assert_like(model, by_value)
    for kind in (ByHook, Manual):
        model = kind(optimizer=sgd)
        run = fit(model)
        assert_like(model, by_norm)
    assert "clip_grad_by_norm" not in vars(run.strategy.precision_plugin)


def test_r53_t22_clipping_through_the_trainer(ranks: Ranks) -> None:
    ranks(2, _clipping)


def _norms(rank: int) -> None:
    """Two meshes, plain parameters, and one without a gradient, against one process."""
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    # the same ranks twice, as two meshes that torch does not take for equal
    first, second = (init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,)) for name in ("one", "two"))
    fully_shard(model.trunk[0], mesh=first)
    fully_shard(model.trunk[1], mesh=second)
    replicate(model)
    for net in (plain, model):
        net.requires_grad_(True)
        net.extra = nn.Parameter(torch.ones(2))
    sum(plain(data(r, 0, 3, 4)).pow(2).mean() / WORLD for r in range(WORLD)).backward()
    model(data(rank, 0, 3, 4)).pow(2).mean().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in plain.parameters()]
    mine = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        for foreach in (None, True, False):
            for net, kept in ((plain, grads), (model, mine)):
                for param, grad in zip(net.parameters(), kept, strict=True):
                    param.grad = None if grad is None else grad.clone()
            assert total_grad_norm(model.parameters(), norm_type, foreach=foreach).item() == pytest.approx(
                nn.utils.get_total_norm([g for g in grads if g is not None], norm_type).item()
            )
            norm = clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
            assert_same([norm], [expected])
            assert_ranks_equal([norm])
            assert_same(
                full(p.grad for p in model.parameters() if p.grad is not None),
                [p.grad for p in plain.parameters() if p.grad is not None],
            )
    clip_grad_value_(model.parameters(), 0.001)
    assert max(float(g.abs().max()) for g in full(p.grad for p in model.parameters() if p.grad is not None)) == (
        pytest.approx(0.001)
    )
    if rank == 1:
        model.trunk[0][0].weight.grad.to_local().fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 of the gradients is inf"):
        clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def test_r53_t23_t24_norms_of_all_orders_over_several_meshes(ranks: Ranks) -> None:
    ranks(2, _norms)


class Logged(Mixed):
    """Lightning's own ``grad_norm`` cannot read sharded gradients."""

    steps = 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = {key: float(value) for key, value in grad_norm(self, 2).items()}


def _logged(rank: int) -> None:
    reference = one_process(1, WORLD)  # its last gradients stay
    expected = {key: float(value) for key, value in lightning_grad_norm(reference, 2).items()}
    model = Logged()
    fit(model)
    assert model.norms == pytest.approx(expected)


def test_r53_logged_gradient_norms(ranks: Ranks) -> None:
    ranks(2, _logged)


# ---- precision ------------------------------------------------------------------------------------------------------


class Overflowing(Mixed):
    """An overflow: in rank 1's part of a shard alone, or in a replicated gradient."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(**options)
        self.where = where
        self.scales: list[float] = []

    def on_after_backward(self) -> None:
        grad = {"shard": self.net.trunk[0][0].weight, "replicated": self.net.head.weight}[self.where].grad
        if self.global_step == 2 and self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            part = grad.to_local() if self.where == "shard" else grad
            if self.trainer.global_rank == 1 or self.where == "replicated":  # an average is the same everywhere
                part.fill_(math.inf)

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _scaled(rank: int, fused: bool, folder: str) -> None:
    def adam(params: Any) -> Any:
        return torch.optim.Adam(params, lr=0.005, eps=1e-3, fused=fused)

    for where in ("shard", "replicated"):
        model = Overflowing(where, optimizer=adam)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run = fit(model, precision=None, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        assert model.scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        everywhere: list[Any] = [None] * WORLD
        dist.all_gather_object(everywhere, model.scales)
        assert everywhere[0] == everywhere[1]
        # fp16 in forward and backward: the steps around the one that is skipped, to half precision
        reference = one_process(
            5,
            WORLD,
            lambda params: torch.optim.Adam(params, lr=0.005, eps=1e-3),
            losses=lambda m, r, step: None if step == 2 else m.loss(data(r, step, 3, 4)),
        )
        assert_like(model, reference, rtol=2e-2, atol=2e-3)
        assert "_unscale_grads_" not in vars(run.precision_plugin.scaler)
        run.save_checkpoint(f"{folder}/scaled.ckpt")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        again = Overflowing(where, optimizer=adam)
        fit(
            again,
            ckpt_path=f"{folder}/scaled.ckpt",
            max_epochs=2,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        )
        assert again.scales[0] == 512.0


@pytest.mark.parametrize("fused", [False, True])
def test_r54_t25_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, fused: bool, tmp_path: Path) -> None:
    ranks(2, _scaled, fused, str(tmp_path))


def _precisions(rank: int) -> None:
    reference = one_process(5, WORLD)
    for precision, tolerance in (("bf16-mixed", 3e-2), ("bf16-true", 6e-2), ("32-true", 1e-5), ("64-true", 1e-5)):
        model = Mixed()
        fit(model, precision=precision)
        values = [value.float() for value in full(model.parameters())]
        assert_ranks_equal(values)
        assert_same(values, [p.detach() for p in reference.parameters()], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_r54_precisions(ranks: Ranks) -> None:
    ranks(2, _precisions)


# ---- optimizers -----------------------------------------------------------------------------------------------------


class Grouped(Mixed):
    """Two parameter groups with a schedule for each, both over both kinds of parameters."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 0.02},
            {"params": [p for n, p in named.items() if not n.endswith("bias")], "lr": 0.01, "weight_decay": 0.1},
        ]
        optimizer = self.kind(groups, **self.options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 0.8**n])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _optimizers(rank: int) -> None:
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
    ):
        torch.manual_seed(0)
        plain = Grouped(kind, **options)
        plain.net.load_state_dict(one_process(0, WORLD).net.state_dict())
        (optimizer,), (configured,) = plain.configure_optimizers()
        schedule = configured["scheduler"]
        for step in range(5):
            optimizer.zero_grad()
            sum(plain.loss(data(r, step, 3, 4)) / WORLD for r in range(WORLD)).backward()
            optimizer.step()
            schedule.step()
        # torch 2.13 has no fused SGD over sharded parameters, with or without others beside them
        fused = [] if kind is torch.optim.SGD else [{"fused": True}]
        for how in ({}, {"foreach": True}, {"foreach": False}, *fused):
            model = Grouped(kind, **options, **how)
            run = fit(model)
            assert_like(model, plain)
            (used,) = run.optimizers
            assert [len(group["params"]) for group in used.param_groups] == [
                len(group["params"]) for group in optimizer.param_groups
            ]
            assert [group["lr"] for group in used.param_groups] == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.slow
def test_r53_optimizers_over_both_kinds_in_each_group(ranks: Ranks) -> None:
    ranks(2, _optimizers)


# ---- steps ----------------------------------------------------------------------------------------------------------


def _accumulation(rank: int) -> None:
    six = type("Six", (Mixed,), {"steps": 6})
    model = six()
    fit(model, accumulate_grad_batches=3)
    assert_like(model, one_process(6, WORLD, accumulate=3))

    class Late(six):  # type: ignore[misc,valid-type]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for block in self.net.trunk:
                block.set_requires_gradient_sync(batch_idx % 3 == 2)

    model = Late()
    fit(model, accumulate_grad_batches=3)
    assert_like(model, one_process(6, WORLD, accumulate=3))


def test_r44_accumulation_with_sharded_modules(ranks: Ranks) -> None:
    ranks(2, _accumulation)


class Skips(Mixed):
    """Rank 1 skips step 2, after or before its sharded modules ran."""

    def __init__(self, before: bool, bad: float = 1.0, everybody: bool = False) -> None:
        super().__init__()
        self.before, self.bad, self.everybody = before, bad, everybody

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        skips = batch_idx == 2 and (self.everybody or self.trainer.global_rank == 1)
        if skips and self.before:
            return None
        loss = self.loss(batch * self.bad if skips else batch)
        return None if skips else {"loss": loss, "other": 1}


def _skips(rank: int) -> None:
    def one_skips(m: Any, r: int, step: int) -> Tensor | None:
        return None if step == 2 and r == 1 else m.loss(data(r, step, 3, 4))

    def all_skip(m: Any, r: int, step: int) -> Tensor | None:
        return None if step == 2 else m.loss(data(r, step, 3, 4))

    for bad in (1.0, math.nan):
        model = Skips(before=False, bad=bad)
        fit(model)
        assert_like(model, one_process(5, WORLD, losses=one_skips))
        for before in (False, True):
            model = Skips(before=before, bad=bad)
            fit(model, {"skipped_steps": "together"})
            assert_like(model, one_process(5, WORLD, losses=all_skip))
    model = Skips(before=False, everybody=True)
    fit(model)
    assert_like(model, one_process(5, WORLD, losses=all_skip))
    with pytest.raises(ReplicateError, match=r"rank 0 is about to run 'net.trunk.0'; rank 1 skips the step"):
        fit(Skips(before=True))
    with pytest.raises(ReplicateError, match=r"returned None on rank 1 in step 2"):
        fit(Skips(before=False), {"skipped_steps": "error"})


def test_r28_skipped_steps_with_sharded_modules(ranks: Ranks) -> None:
    ranks(2, _skips)


class Branches(Mixed):
    """Rank 0 leaves the last block out of the loss; or out of the forward."""

    def __init__(self, forward_too: bool) -> None:
        super().__init__()
        self.forward_too = forward_too

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.on_rank(batch, self.trainer.global_rank)

    def on_rank(self, batch: Tensor, rank: int) -> Tensor:
        hidden = self.net.trunk[0](self.net.stem(batch).relu())
        if rank == 0 and self.forward_too:
            return hidden.pow(2).mean()
        last = self.net.trunk[2](hidden)
        return hidden.pow(2).mean() if rank == 0 else self.net.head(last).pow(2).mean()


def _branches(rank: int) -> None:
    def loss(m: Any, r: int, step: int) -> Tensor:
        return m.on_rank(data(r, step, 3, 4), r)

    torch.manual_seed(1000)
    reference = Branches(forward_too=False)
    reference.net.load_state_dict(one_process(0, WORLD).net.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        sum(loss(reference, r, step) / WORLD for r in range(WORLD)).backward()
        optimizer.step()
    for keep in (True, False):
        model = Branches(forward_too=False)
        model.make_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
        fit(model, {"reshard_after_forward": keep})
        assert_like(model, reference)
    with pytest.raises(ReplicateError, match=r"rank 0 is at the step's end; rank 1 is about to run 'net.trunk.2'"):
        fit(Branches(forward_too=True))


def test_t19_r05_ranks_that_use_different_sharded_parameters(ranks: Ranks) -> None:
    ranks(2, _branches)


class MixedUneven(_Uneven):
    def __init__(self, lengths: list[int], sized: bool = False) -> None:
        super().__init__(lengths, sized)
        torch.manual_seed(0)
        self.net = Net()


def _uneven(rank: int) -> None:
    arguments = {"shard": "net.trunk.*"}
    model = MixedUneven([3, 5])
    trainer(ReplicateStrategy(**arguments)).fit(model)
    assert model.seen == [[0, 1, 2]]
    assert_ranks_equal(full(model.parameters()))
    with pytest.raises(ValueError, match=r"join.* cannot serve sharded modules"):
        trainer(ReplicateStrategy(**arguments, uneven_inputs="join")).fit(MixedUneven([3, 5]))
    with pytest.raises(ReplicateError, match="ended at different times"):
        trainer(ReplicateStrategy(**arguments), limit_val_batches=1.0).fit(MixedUneven([3, 5]))


def test_r30_uneven_data_with_sharded_modules(ranks: Ranks) -> None:
    ranks(2, _uneven)


# ---- meshes ---------------------------------------------------------------------------------------------------------


def _hsdp(rank: int) -> None:
    reference = one_process(5, 4)
    for size in (2, "world", 1):
        model = Mixed()
        trainer(ReplicateStrategy(**SHARD, shard_size=size)).fit(model)
        assert model.device_mesh.mesh_dim_names == (("shard",) if size == "world" else ("replicate", "shard"))
        assert_like(model, reference)
    clipped = one_process(5, 4, before_step=lambda params: nn.utils.clip_grad_norm_(params, 0.05))
    model = Mixed()
    trainer(ReplicateStrategy(**SHARD, shard_size=2), gradient_clip_val=0.05).fit(model)
    assert_like(model, clipped)
    with pytest.raises(ValueError, match="`shard_size` must be 'world' or divide the number of ranks, 4"):
        trainer(ReplicateStrategy(**SHARD, shard_size=3)).fit(Mixed())


@pytest.mark.slow
def test_r51_shards_within_a_part_of_the_ranks(ranks: Ranks) -> None:
    ranks(4, _hsdp)


# ---- what is refused ------------------------------------------------------------------------------------------------


class Tied(Mixed):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net.head.weight = nn.Parameter(torch.randn(6, 6))
        self.net.stem = nn.Linear(6, 6)
        self.net.stem.weight = self.net.head.weight


def _refused(rank: int) -> None:
    def fits(message: str, model: Mixed | None = None, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            trainer(ReplicateStrategy(**arguments)).fit(model or Mixed())

    fits("'net.trunk.1' is to be sharded, and to be replicated or local", shard="net.trunk.*", local="net.trunk.1")
    fits("'net.trunk.1' is to be sharded, and to be", shard="net.trunk.*", replicate=["net.trunk.1", "net.stem"])
    fits("`shard` takes modules; 'net.loose' is a parameter", shard="net.loose")
    fits("`shard`: 'net.nothing' matches no", shard="net.nothing")
    fits("'net.loose' is to be replicated within module 'net'", shard="net", replicate="net.loose")
    fits("shared by 'net.stem.weight' .not sharded. and 'net.head.weight' .sharded with", Tied(), shard="net.head")

    def shards_one_of_two(model: Mixed) -> None:
        fully_shard(model.net.head, mesh=model.device_mesh)

    fits("shared by 'net.stem.weight' .not sharded. and 'net.head.weight' .sharded with", Tied(mark=shards_one_of_two))
    fits("`average='sum'` cannot be had beside sharded", shard="net.trunk.*", average="sum")
    fits("LBFGS joins all", Mixed(optimizer=torch.optim.LBFGS), shard="net.trunk.*")
    with warnings.catch_warnings(), pytest.raises(ValueError, match="WeightAveraging copies the whole model"):
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback", UserWarning)
        trainer(ReplicateStrategy(**SHARD), callbacks=[WeightAveraging()]).fit(Mixed())


def test_r49_what_cannot_be_had_is_an_error_that_names_it(ranks: Ranks) -> None:
    ranks(2, _refused)
