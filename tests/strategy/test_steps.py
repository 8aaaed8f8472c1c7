"""Steps that differ between ranks, and models and loops of other people's, through the Trainer."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_replicate import ReplicateError, ReplicateStrategy
from tests.core.helpers import Branches, assert_ranks_equal, assert_same, data, mlp, seeded
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, assert_trained_like, by_hand, trainer
from tests.strategy.test_trainer import _Game, _Idle, _loss, _Skipping, _skips

WORLD = 2


# ---- skipped steps --------------------------------------------------------------------------------------------------


def _together(rank: int) -> None:
    model = _Skipping("none")
    trainer(ReplicateStrategy(skipped_steps="together")).fit(model)
    nobody = lambda step: any(_skips(r, step) for r in range(WORLD))
    reference = by_hand(mlp(4, 5, 2), lambda m, r, step: None if nobody(step) else _loss(m, r, step), 6, world=WORLD)
    assert_trained_like(model, reference)

    model = _Skipping("none")
    trainer(ReplicateStrategy(skipped_steps="together"), accumulate_grad_batches=3).fit(model)

    def windows(module: nn.Module, r: int, step: int) -> list[Tensor] | None:
        return [_loss(module, r, i) / 3 for i in range(step * 3, step * 3 + 3) if not nobody(i)] or None

    assert_trained_like(model, by_hand(mlp(4, 5, 2), windows, 2, world=WORLD))


def test_r28_all_ranks_skip_together(ranks: Ranks) -> None:
    ranks(2, _together)


def _error(rank: int) -> None:
    with pytest.raises(ReplicateError, match=r"`training_step` returned None on rank 1 in step 1"):
        trainer(ReplicateStrategy(skipped_steps="error")).fit(_Skipping("none"))
    with pytest.raises(ValueError, match="`skipped_steps` must be one of"):
        ReplicateStrategy(skipped_steps="never")  # type: ignore[arg-type]


def test_r28_a_skipped_step_as_an_error_on_all_ranks(ranks: Ranks) -> None:
    ranks(2, _error)


def _scaled(rank: int) -> None:
    for mode in ("participants", "together"):
        for accumulate in (1, 3):
            model = _Skipping("none")
            plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
            strategy = ReplicateStrategy(skipped_steps=mode)  # type: ignore[arg-type]
            trainer(strategy, plugins=[plugin], accumulate_grad_batches=accumulate).fit(model)
            out = lambda r, i, mode=mode: (
                any(_skips(s, i) for s in range(WORLD)) if mode == "together" else _skips(r, i)
            )

            def windows(m: nn.Module, r: int, step: int, out: Any = out, k: int = accumulate) -> list[Tensor] | None:
                return [_loss(m, r, i) / k for i in range(step * k, step * k + k) if not out(r, i)] or None

            reference = by_hand(mlp(4, 5, 2), windows, 6 // accumulate, world=WORLD)
            assert_trained_like(model, reference, rtol=1e-2, atol=1e-3)


def test_r28_skipped_steps_under_16_mixed(ranks: Ranks) -> None:
    """Also in a step that all ranks skip, where the loss scaler finds no gradient at all."""
    ranks(2, _scaled)


class _Detached(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss.detach() if batch_idx == 1 and self.global_rank == 1 else loss


def _detached(rank: int) -> None:
    error, message = (
        (RuntimeError, "does not require grad") if rank == 1 else (ReplicateError, "Rank 1 of this process group gave")
    )
    with pytest.raises(error, match=message):
        trainer().fit(_Detached())


def test_r29_a_loss_detached_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    ranks(2, _detached, timeout=30)


# ---- communication hooks --------------------------------------------------------------------------------------------


def _hooked(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for options, tolerance in (
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, {}),
        ({"ddp_comm_hook": default_hooks.bf16_compress_hook}, {"rtol": 2e-2, "atol": 2e-2}),
        (
            {
                "ddp_comm_hook": default_hooks.allreduce_hook,
                "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
            },
            {"rtol": 1e-2, "atol": 1e-2},
        ),
        ({"reduce_dtype": torch.bfloat16}, {"rtol": 2e-2, "atol": 2e-2}),
    ):
        model = _Skipping("none")
        trainer(ReplicateStrategy(**options), accumulate_grad_batches=2).fit(model)

        def windows(m: nn.Module, r: int, step: int) -> list[Tensor] | None:
            return [_loss(m, r, i) / 2 for i in range(step * 2, step * 2 + 2) if not _skips(r, i)] or None

        assert_trained_like(model, by_hand(mlp(4, 5, 2), windows, 3, world=WORLD), **tolerance)


def test_r64_communication_hooks_and_reduce_dtype(ranks: Ranks) -> None:
    ranks(2, _hooked)


def _local_sgd(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    state = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    model = Small()
    model.steps = 7  # type: ignore[misc]
    strategy = ReplicateStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's optimizers that average use what torch deprecates
        trainer(strategy).fit(model)
    # by hand: two averaged steps, then each rank by itself, with the weights averaged every second step
    models = [mlp(4, 5, 2) for _ in range(WORLD)]
    for step in range(7):
        found = [torch.autograd.grad(_loss(m, r, step), list(m.parameters())) for r, m in enumerate(models)]
        if step < 2:
            found = [tuple(sum(column) / WORLD for column in zip(*found, strict=True))] * WORLD
        with torch.no_grad():
            for m, gradients in zip(models, found, strict=True):
                for param, grad in zip(m.parameters(), gradients, strict=True):
                    param -= 0.1 * grad
            if step >= 2 and (step - 2) % 2 == 0:
                for params in zip(*(m.parameters() for m in models), strict=True):
                    mean = torch.stack(params).mean(0)
                    for param in params:
                        param.copy_(mean)
    assert_trained_like(model, list(models[0].parameters()))


def test_d73_post_local_sgd(ranks: Ranks) -> None:
    ranks(2, _local_sgd)


# ---- averages -------------------------------------------------------------------------------------------------------


class _Weighted(Small):
    """Batches of other sizes on each rank; the optimizer step must equal one on all samples."""

    steps = 6

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch[: _size(self.global_rank, batch_idx)]
        self.trainer.strategy.set_weight(len(batch))
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, self.steps, size=8), batch_size=None)


def _size(rank: int, step: int) -> int:
    return [3, 5, 1, 8, 2, 4][(step + 3 * rank) % 6]


def _weighted(rank: int) -> None:
    for accumulate in (1, 3):
        model = _Weighted()
        run = trainer(ReplicateStrategy(average="weighted"), accumulate_grad_batches=accumulate)
        run.fit(model)
        whole = lambda m, _, step, k=accumulate: (
            m(torch.cat([data(r, i, 8, 4)[: _size(r, i)] for r in range(WORLD) for i in range(step * k, step * k + k)]))
            .pow(2)
            .mean()
        )
        assert_trained_like(model, by_hand(mlp(4, 5, 2), whole, 6 // accumulate, world=1))
    with pytest.raises(ValueError, match="average='weighted'"):
        trainer().fit(_Weighted())


def test_r45_weights_equal_one_process_on_all_samples(ranks: Ranks) -> None:
    ranks(2, _weighted)


def _strict(rank: int) -> None:
    with pytest.raises(
        ReplicateError, match=r"net\.idle\.bias on rank 0, 1; net\.idle\.weight on rank 0, 1; net\.left"
    ):
        trainer(ReplicateStrategy(strict_unused=True)).fit(_Idle())
    model = Small()
    trainer(ReplicateStrategy(strict_unused=True)).fit(model)
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 4, world=WORLD))


def test_r02_strict_unused(ranks: Ranks) -> None:
    ranks(2, _strict)


# ---- models ---------------------------------------------------------------------------------------------------------


class _Experts(Small):
    """A mixture of experts of equal shapes, chosen by each rank for itself; LayerDrop; an idle adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(_ExpertNet, 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch, self.global_rank, batch_idx).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


class _ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.idle_adapter = nn.Linear(4, 4)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = self.experts[(step + 2 * rank) % 3](self.trunk(x))
        for index, layer in enumerate(self.layers):
            if (step + rank + index) % 3:  # LayerDrop: another layer on each rank
                x = checkpoint(layer, x, use_reentrant=True)
        return x


def _experts(rank: int) -> None:
    model = _Experts()
    untouched = copy.deepcopy([*model.net.experts[3].parameters(), *model.net.idle_adapter.parameters()])
    states: list[Any] = []

    class Look(Callback):
        def on_train_end(self, t: Any, module: Any) -> None:
            states.append(t.optimizers[0].state)

    trainer(callbacks=[Look()]).fit(model)
    reference = seeded(_ExpertNet, 0)
    params = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        sum(
            reference(data(r, step, 3, 4), r, step).pow(2).mean()
            for r in range(WORLD)  # type: ignore[misc]
        ).div(WORLD).backward()
        optimizer.step()
    assert_trained_like(model, list(reference.parameters()))
    # idle everywhere: no gradient, no optimizer state, and no weight decay either
    idle = [*model.net.experts[3].parameters(), *model.net.idle_adapter.parameters()]
    assert_same(idle, untouched, rtol=0, atol=0)
    assert all(param.grad is None and param not in states[0] for param in idle)


def test_r01_r18_experts_layerdrop_adapters(ranks: Ranks) -> None:
    ranks(2, _experts)


class _Penalized(_Game):
    """WGAN-GP: the gradient of the critic by its input is part of the critic's loss."""

    def critic_loss(self, batch: Tensor) -> Tensor:
        real = batch[:, :3].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(real).sum(), real, create_graph=True)
        return super().critic_loss(batch) + (slope.norm(2, dim=1) - 1).pow(2).mean()


def _penalized(rank: int) -> None:
    from tests.strategy import test_trainer

    model = _Penalized(True, False, True)
    trainer().fit(model)
    plain, test_trainer._Game = test_trainer._Game, _Penalized
    try:
        assert_trained_like(model, test_trainer._game_by_hand(True))
    finally:
        test_trainer._Game = plain


def test_r21_gradient_penalty(ranks: Ranks) -> None:
    ranks(2, _penalized)


class _SelfSupervised(Small):
    """Student and frozen teacher, several forwards a step, a bare parameter; the teacher follows after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        views = [batch * scale for scale in (1.0, 0.5, 0.25)]
        target = self.teacher(batch)
        return sum((self.net(v) - target * self.temperature).pow(2).mean() for v in views)  # type: ignore[return-value]

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net.parameters(), self.temperature], lr=0.1)


def _self_supervised(rank: int) -> None:
    model = _SelfSupervised()
    trainer().fit(model)
    reference = _SelfSupervised()
    params = [*reference.net.parameters(), reference.temperature]
    for step in range(4):
        losses = [reference.training_step(data(r, step, 3, 4), step) for r in range(WORLD)]
        found = torch.autograd.grad(sum(losses) / WORLD, params)  # type: ignore[arg-type]
        with torch.no_grad():
            for param, grad in zip(params, found, strict=True):
                param -= 0.1 * grad
        reference.on_train_batch_end()
    assert_trained_like(model, list(reference.parameters()))


def test_r16_student_and_teacher(ranks: Ranks) -> None:
    ranks(2, _self_supervised)


def _averaging(rank: int) -> None:
    for callback in (WeightAveraging(), EMAWeightAveraging(decay=0.5)):
        model = Small()
        trainer(callbacks=[callback]).fit(model)  # copies the module when it begins, and back when it ends
        assert_ranks_equal(list(model.parameters()))
        trajectory = [mlp(4, 5, 2).parameters()]
        trajectory = [[p.detach() for p in by_hand(mlp(4, 5, 2), _loss, steps, world=WORLD)] for steps in range(5)]
        if isinstance(callback, EMAWeightAveraging):
            expected = trajectory[1]
            for later in trajectory[2:]:
                expected = [0.5 * a + 0.5 * b for a, b in zip(expected, later, strict=True)]
        else:
            expected = [torch.stack(column).mean(0) for column in zip(*trajectory[1:], strict=True)]
        assert_same(list(model.parameters()), expected, rtol=1e-3, atol=1e-4)


def test_callbacks_that_copy_the_model(ranks: Ranks) -> None:
    ranks(2, _averaging)


class _CopyInside(Small):
    """torch's averaged model as a part of the module, its parameters in the optimizer like all others."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged = AveragedModel(self.net)

    def on_train_batch_end(self, *args: Any) -> None:
        self.averaged.update_parameters(self.net)


def _copy_inside(rank: int) -> None:
    model = _CopyInside()
    trainer().fit(model)
    trajectory = [[p.detach() for p in by_hand(mlp(4, 5, 2), _loss, steps, world=WORLD)] for steps in range(1, 5)]
    mean = [torch.stack(column).mean(0) for column in zip(*trajectory, strict=True)]
    assert_same(list(model.averaged.module.parameters()), mean, rtol=1e-4, atol=1e-6)
    assert_ranks_equal([*model.parameters(), *model.buffers()])


def test_an_averaged_copy_inside_the_module(ranks: Ranks) -> None:
    ranks(2, _copy_inside)


class _Monitored(Small):
    """A monitored value that differs between ranks, and is not synchronized."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        falls = self.current_epoch if self.global_rank == 0 else -self.current_epoch
        self.log("watched", torch.tensor(float(-falls)))


def _monitored(rank: int, folder: str) -> None:
    model = _Monitored()
    keep = ModelCheckpoint(dirpath=folder, monitor="watched", save_top_k=1, save_last=True)
    stop = EarlyStopping("watched", patience=1)
    run = trainer(max_epochs=4, limit_val_batches=1, callbacks=[keep, stop], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")  # not doing so is the case
        warnings.filterwarnings("ignore", "The monitored value 'watched' is not the same on all ranks")
        run.fit(model)  # ranks that disagree do not wait for each other
    epochs: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(epochs, (run.current_epoch, sorted(os.listdir(folder))))
    assert epochs[0] == epochs[1]
    assert "last.ckpt" in epochs[0][1]
    assert_ranks_equal(list(model.parameters()))


def test_r34_r35_a_monitored_value_that_differs_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _monitored, str(tmp_path))


def _twin(rank: int) -> None:
    import pytorch_lightning as twin

    class Twin(twin.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(4, 5, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> DataLoader:
            return DataLoader(Batches(rank, 4), batch_size=None)

    model = Twin()
    twin.Trainer(
        strategy="replicate",
        accelerator="cpu",
        devices=WORLD,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(model)
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 4, world=WORLD))


def test_the_other_twin_of_lightning_trains_as_well(ranks: Ranks) -> None:
    ranks(2, _twin)


class _Converted(Small):
    """Double precision from step 2 on; in step 3 all parameters are other objects."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.double()
        if batch_idx == 3:
            self.load_state_dict({key: value.clone() for key, value in self.state_dict().items()}, assign=True)
            self.optimizers().param_groups[0]["params"] = list(self.parameters())

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch.to(self.net[0].weight.dtype))


def _converted(rank: int) -> None:
    model = _Converted()
    trainer().fit(model)
    reference = [param.double() for param in by_hand(mlp(4, 5, 2), _loss, 4, world=WORLD)]
    assert_trained_like(model, reference)


def test_r25_t03_conversions_between_steps(ranks: Ranks) -> None:
    ranks(2, _converted)


class _NewHead(Small):
    """A head that is replaced at epoch 1, with other values on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = mlp(2, 2, seed=5)

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.net(batch)).pow(2).mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = mlp(2, 2, seed=100 + self.global_rank)
            optimizer = self.optimizers()
            optimizer.param_groups[0]["params"] = list(self.net.parameters())
            optimizer.add_param_group({"params": list(self.head.parameters())})


def _new_head(rank: int) -> None:
    model = _NewHead()
    trainer(max_epochs=2).fit(model)
    reference = nn.Sequential(mlp(4, 5, 2), mlp(2, 2, seed=5))
    by_hand(reference, _loss, 4, world=WORLD)
    reference[1] = mlp(2, 2, seed=100)  # rank 0's
    assert_trained_like(model, by_hand(reference, _loss, 4, world=WORLD))


def test_r26_a_head_replaced_while_training(ranks: Ranks) -> None:
    ranks(2, _new_head)


class _OutOfMemory(Small):
    """Rank 1 runs out of memory in the backward of step 1; user code catches that and tries again with less."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.caught: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        state = self.trainer.strategy.states[0]
        try:
            too_much = batch_idx == 1 and self.global_rank == 1
            x = _Explodes.apply(torch.tanh(self.net[0](batch)), too_much)
            self.manual_backward(self.net[2](x).pow(2).mean())
        except (MemoryError, ReplicateError) as error:
            self.caught.append(type(error).__name__)
            state.reset()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[:1]))
        optimizer.step()


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, explode: bool) -> Tensor:
        ctx.explode = explode
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.explode:
            raise MemoryError("simulated")
        return grad, None


def _out_of_memory(rank: int) -> None:
    model = _OutOfMemory()
    trainer().fit(model)
    assert model.caught == [["ReplicateError"], ["MemoryError"]][rank]
    reference = by_hand(
        mlp(4, 5, 2),
        lambda m, r, step: m(data(r, step, 3, 4)[: 1 if step == 1 else None]).pow(2).mean(),
        4,
        world=WORLD,
    )
    assert_trained_like(model, reference)


def test_r37_an_exception_in_backward_and_a_retry(ranks: Ranks) -> None:
    ranks(2, _out_of_memory)


class _FromHooks(Small):
    """Backward is called from a hook, not from the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.kept = self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.kept.backward()
        optimizer.step()


def _from_hooks(rank: int) -> None:
    model = _FromHooks()
    trainer().fit(model)
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 4, world=WORLD))


def test_r10_backward_from_a_hook(ranks: Ranks) -> None:
    ranks(2, _from_hooks)


class _Looked(Small):
    """Sparse embeddings beside dense layers, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = seeded(lambda: nn.Embedding(8, 4, sparse=True), 0)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.looked(self.global_rank, batch_idx))
        for optimizer in optimizers:
            optimizer.step()

    def looked(self, rank: int, step: int) -> Tensor:
        return self.net(self.table(torch.tensor([rank, step, step, 7 - rank]))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SparseAdam(self.table.parameters(), lr=0.01),
            torch.optim.SGD(self.net.parameters(), lr=0.1),
        ]


def _sparse(rank: int) -> None:
    model = _Looked()
    trainer().fit(model)
    reference = _Looked()
    sparse, dense = reference.configure_optimizers()
    for step in range(4):
        sparse.zero_grad()
        dense.zero_grad()
        sum(reference.looked(r, step) for r in range(WORLD)).div(WORLD).backward()  # type: ignore[union-attr]
        sparse.step()
        dense.step()
    assert_trained_like(model, list(reference.parameters()))


def test_r66_sparse_embeddings(ranks: Ranks) -> None:
    ranks(2, _sparse)


class _Alone(Small):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:  # a callback that looks at the model on rank 0 only
            with torch.no_grad():
                self.net(torch.ones(1, 4))
            self.eval()
            self(torch.ones(1, 4))
            self.train()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _alone(rank: int) -> None:
    model = _Alone()
    trainer().fit(model)
    assert_trained_like(model, by_hand(mlp(4, 5, 2), _loss, 4, world=WORLD))


def test_r33_a_forward_on_rank_0_alone(ranks: Ranks) -> None:
    ranks(2, _alone)


class _Lazy(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _lazy(rank: int) -> None:
    # in the first step, with values drawn from rank 0's seed, and the optimizer made before
    model = _Lazy()
    trainer().fit(model)
    first = seeded(lambda: nn.Sequential(nn.Linear(4, 2)), 1000)
    assert type(model.net[0]) is nn.Linear
    assert_trained_like(model, by_hand(first, _loss, 4, world=WORLD))

    # at set-up, where Lightning knows an input: rank 0's values
    for example in (torch.ones(1, 4), (torch.ones(1, 4),), {"x": torch.ones(1, 4)}):
        model = _Lazy()
        model.example_input_array = example
        model.net.append(nn.BatchNorm1d(2, affine=False))
        run = trainer(max_steps=1)
        torch.manual_seed(7 + rank)
        run.fit(model)
        assert model.net.training and model.net[1].num_batches_tracked == 1  # only by the step
        first = seeded(lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False)), 7)
        assert_trained_like(model, by_hand(first, _loss, 1, world=WORLD))


def test_r26_lazy_modules(ranks: Ranks) -> None:
    ranks(2, _lazy)


class _Twice(_Idle):
    """Fitted twice, with a gradient that user code clears, or replaces, after backward."""

    def on_after_backward(self) -> None:
        self.net.head.bias.grad = None
        self.net.head.weight.grad = torch.ones_like(self.net.head.weight)


def _twice(rank: int) -> None:
    model = _Twice()
    head = [param.detach().clone() for param in model.net.head.parameters()]
    trainer().fit(model)
    trainer().fit(model)
    assert_ranks_equal(list(model.parameters()))
    assert_same(list(model.net.head.parameters()), [head[0] - 8 * 0.1, head[1]])


def test_gradients_that_user_code_replaces(ranks: Ranks) -> None:
    ranks(2, _twice)


def _branches_in_windows(rank: int) -> None:
    model = _Idle()
    model.steps = 8  # type: ignore[misc]
    trainer(accumulate_grad_batches=3).fit(model)

    def windows(m: nn.Module, r: int, step: int) -> list[Tensor]:
        return [
            m(data(r, i, 3, 4), *(["left"] if (i + r) % 2 else [])).pow(2).mean() / 3
            for i in range(step * 3, min(step * 3 + 3, 8))
        ]

    assert_trained_like(model, by_hand(seeded(Branches, 0), windows, 3, world=WORLD))


def test_r44_windows_that_touch_different_branches(ranks: Ranks) -> None:
    ranks(2, _branches_in_windows)
