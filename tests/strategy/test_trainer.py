"""Training through the Trainer: equal to one process that sees all ranks' data, and bit-equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_replicate import ReplicateStrategy, replicate
from tests.core.helpers import Branches, assert_ranks_equal, assert_same, data, mlp, seeded
from tests.ranks import Ranks
from tests.strategy.helpers import Batches, Small, assert_trained_like, by_hand, trainer

WORLD = 2


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step, 3, 4)).pow(2).mean()


def _reference(steps: int = 4, world: int = WORLD, **options: Any) -> list[nn.Parameter]:
    return by_hand(mlp(4, 5, 2), _loss, steps, world=world, **options)


# ---- the plain loop -------------------------------------------------------------------------------------------------


def _fit(rank: int, world: int) -> None:
    model = Small(seed=rank)
    fit = trainer()
    assert isinstance(fit.strategy, ReplicateStrategy)
    fit.fit(model)
    assert_trained_like(model, _reference(world=world))
    assert fit.strategy.states == ()
    for module in model.modules():  # everything is taken off at tear-down
        assert not module._forward_pre_hooks and "__getstate__" not in module.__dict__
    for param in model.parameters():
        assert not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [2, 3])
def test_fit(ranks: Ranks, world: int) -> None:
    ranks(world, _fit, world)


def _evaluate(rank: int) -> None:
    model = Small(seed=0)
    run = trainer(limit_val_batches=1.0)
    losses = [torch.stack([_loss(model.net, r, step) for step in range(4)]).mean().item() for r in range(WORLD)]
    (validated,) = run.validate(model, verbose=False)
    (tested,) = run.test(model, verbose=False)
    mean = sum(losses) / WORLD  # `sync_dist` works: both ranks see the mean over all samples
    assert validated["val_loss"] == pytest.approx(mean)
    assert tested["test_loss"] == pytest.approx(mean)
    predicted = run.predict(model)
    assert predicted is not None and len(predicted) == 4
    assert torch.equal(predicted[1], model.net(data(rank, 1, 3, 4)))


def test_validate_test_predict(ranks: Ranks) -> None:
    ranks(2, _evaluate)


def _several_runs(rank: int) -> None:
    model = Small(seed=0)
    run = trainer(limit_val_batches=1)
    run.fit(model)
    run.test(model, verbose=False)
    run.fit_loop.max_epochs = 2  # goes on where it stopped
    run.fit(model)
    trainer().fit(model)  # another Trainer on the same module: nothing is installed, or divided, twice
    three_epochs = by_hand(mlp(4, 5, 2), lambda m, r, step: _loss(m, r, step % 4), 12, world=WORLD)
    assert_trained_like(model, three_epochs)
    other = Small(seed=3)  # and another module in the same process
    trainer().fit(other)
    assert_trained_like(other, by_hand(mlp(4, 5, 2, seed=3), _loss, 4, world=WORLD))


def test_r13_r43_fit_test_fit_and_another_trainer(ranks: Ranks) -> None:
    ranks(2, _several_runs)


class _Accumulating(Small):
    steps = 10
    rounds: list[int]

    def on_train_batch_end(self, *args: Any) -> None:
        self.rounds = [*getattr(self, "rounds", []), self.trainer.strategy.states[0].closed_rounds]


def _accumulate(rank: int) -> None:
    model = _Accumulating()
    trainer(accumulate_grad_batches=4).fit(model)
    assert model.rounds == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]  # one round a window, the short last one included

    def windows(module: nn.Module, r: int, step: int) -> list[Tensor]:
        micro = range(step * 4, min(step * 4 + 4, 10))
        return [_loss(module, r, i) / 4 for i in micro]

    assert_trained_like(model, by_hand(mlp(4, 5, 2), windows, 3, world=WORLD))


def test_r44_accumulation(ranks: Ranks) -> None:
    ranks(2, _accumulate)


def _clip(rank: int) -> None:
    for algorithm, clip in (
        ("norm", lambda params: nn.utils.clip_grad_norm_(params, 0.05)),
        ("value", lambda params: nn.utils.clip_grad_value_(params, 0.05)),
    ):
        model = Small()
        trainer(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm).fit(model)
        assert_trained_like(model, _reference(after_grads=clip))


def test_gradient_clipping(ranks: Ranks) -> None:
    ranks(2, _clip)


# ---- precision ------------------------------------------------------------------------------------------------------


def _precision(rank: int) -> None:
    for precision in ("32-true", "bf16-mixed", "bf16-true", "64-true"):
        model = Small()
        seen: dict[str, Any] = {}

        class Look(Callback):
            def on_before_optimizer_step(self, t: Any, module: Any, optimizer: Any) -> None:
                seen.update(grad={param.grad.dtype for param in module.parameters()}, plan=t.strategy.plan())

        trainer(precision=precision, callbacks=[Look()]).fit(model)
        dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
        assert seen["grad"] == {dtype}
        assert {bucket.dtype for bucket in seen["plan"].buckets} == {dtype}
        reference = [param.to(dtype) for param in _reference()]
        loose = {"rtol": 5e-2, "atol": 2e-2} if "bf16" in precision else {}
        assert_trained_like(model, reference, **loose)


def test_precision(ranks: Ranks) -> None:
    ranks(2, _precision)


class _Overflowing(Small):
    """Rank 1's loss overflows in step 1; no other rank's does."""

    scales: list[float]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler
        self.scales = [*getattr(self, "scales", []), scaler.get_scale()]


def _scaled(rank: int) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    model = _Overflowing()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer(plugins=[plugin]).fit(model)
    assert model.scales == [1024.0, 512.0, 512.0, 512.0]  # both ranks skip step 1 together
    skipped_1 = [0, 2, 3]
    reference = by_hand(mlp(4, 5, 2), lambda m, r, step: _loss(m, r, skipped_1[step]), 3, world=WORLD)
    assert_trained_like(model, reference, rtol=1e-2, atol=1e-3)


def test_16_mixed_skips_together(ranks: Ranks) -> None:
    ranks(2, _scaled)


# ---- optimization by hand, several optimizers -----------------------------------------------------------------------


class _Manual(Small):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss) if self.how == "manual_backward" else loss.backward()
        optimizer.step()


def _manual(rank: int) -> None:
    for how in ("manual_backward", "plain backward"):
        model = _Manual(how)
        trainer().fit(model)
        assert_trained_like(model, _reference())


def test_r10_r11_manual_optimization_and_plain_backward(ranks: Ranks) -> None:
    """Whoever calls backward, gradients are averaged."""
    ranks(2, _manual)


class _Game(LightningModule):
    def __init__(self, toggle: bool, mark: bool, critic_first: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(4, 6, 3, seed=1), mlp(3, 6, 1, seed=2)
        self.toggle, self.mark, self.critic_first = toggle, mark, critic_first
        self.bytes: list[tuple[int, ...]] = []

    def configure_model(self) -> None:
        if self.mark:
            replicate(self.generator)
            replicate(self.critic)

    def critic_loss(self, batch: Tensor) -> Tensor:
        return self.critic(self.generator(batch).detach()).mean() - self.critic(batch[:, :3]).mean()

    def generator_loss(self, batch: Tensor) -> Tensor:
        return -self.critic(self.generator(batch)).mean()

    def play(self, batch: Tensor, optimizer: Any, loss: Any, backward: Any) -> None:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        backward(loss(batch))
        optimizer.step()
        if self.toggle:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        turns = [(critic, self.critic_loss), (generator, self.generator_loss)]
        for optimizer, loss in turns if self.critic_first else turns[::-1]:
            self.play(batch, optimizer, loss, self.manual_backward)
            groups = [group for state in self.trainer.strategy.states for group in state.groups]
            self.bytes.append(tuple(0 if g.last_round is None else g.last_round.number for g in groups))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.05),
            torch.optim.SGD(self.critic.parameters(), lr=0.05),
        ]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 4), batch_size=None)


def _game_by_hand(critic_first: bool) -> list[nn.Parameter]:
    model = _Game(False, False, critic_first)
    nets = {"critic_loss": model.critic, "generator_loss": model.generator}
    order = ["critic_loss", "generator_loss"]
    for step in range(4):
        for name in order if critic_first else order[::-1]:
            params = list(nets[name].parameters())
            losses = [getattr(model, name)(data(r, step, 3, 4)) for r in range(WORLD)]
            found = torch.autograd.grad(sum(losses) / WORLD, params)  # type: ignore[arg-type]
            with torch.no_grad():
                for param, grad in zip(params, found, strict=True):
                    param -= 0.05 * grad
    return list(model.parameters())


def _games(rank: int) -> None:
    for toggle in (False, True):
        for mark in (False, True):
            for critic_first in (False, True):
                model = _Game(toggle, mark, critic_first)
                trainer().fit(model)
                assert_trained_like(model, _game_by_hand(critic_first))
                # two groups: one per optimizer, or as marked. Where the critic's turn touches the critic alone, the
                # generator's group sees a round only in its own turn.
                if critic_first:
                    assert [rounds[0] for rounds in model.bytes] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_r07_r08_games_of_two_optimizers(ranks: Ranks) -> None:
    ranks(2, _games)


# ---- models that stock DDP fails ------------------------------------------------------------------------------------


class _Idle(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Branches, 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch, *(["left"] if (batch_idx + self.global_rank) % 2 else [])).pow(2).mean()


def _idle(rank: int) -> None:
    model = _Idle()
    trainer().fit(model)
    reference = by_hand(
        seeded(Branches, 0),
        lambda m, r, step: m(data(r, step, 3, 4), *(["left"] if (step + r) % 2 else [])).pow(2).mean(),
        4,
        world=WORLD,
    )
    assert_trained_like(model, reference)
    assert model.net.idle.weight.grad is None


def test_r01_r05_r06_t01_idle_layers_and_branches(ranks: Ranks) -> None:
    ranks(2, _idle)


class _Skipping(Small):
    steps = 6

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.kind == "none" and _skips(self.global_rank, batch_idx):
            return None
        if self.kind == "zero" and _skips(self.global_rank, batch_idx):
            return torch.zeros(1, requires_grad=True)
        return self.loss(batch)


def _skips(rank: int, step: int) -> bool:
    return step == 4 or (step, rank) in {(1, 1), (2, 0)}  # in step 4 all ranks skip


def _skipped(rank: int) -> None:
    model = _Skipping("none")
    trainer().fit(model)
    # the average is over the ranks that had a loss
    reference = by_hand(mlp(4, 5, 2), lambda m, r, step: None if _skips(r, step) else _loss(m, r, step), 6, world=WORLD)
    assert_trained_like(model, reference)

    model = _Skipping("zero")
    trainer().fit(model)
    # a loss of zero is a loss: its rank counts
    reference = by_hand(
        mlp(4, 5, 2), lambda m, r, step: None if _skips(r, step) else _loss(m, r, step), 6, world=WORLD, over="world"
    )
    assert_trained_like(model, reference)

    model = _Skipping("none")
    trainer(accumulate_grad_batches=3).fit(model)

    def windows(module: nn.Module, r: int, step: int) -> list[Tensor] | None:
        micro = [i for i in range(step * 3, step * 3 + 3) if not _skips(r, i)]
        return [_loss(module, r, i) / 3 for i in micro] or None

    assert_trained_like(model, by_hand(mlp(4, 5, 2), windows, 2, world=WORLD))


def test_r28_r29_none_and_zero_losses(ranks: Ranks) -> None:
    ranks(2, _skipped)


class _Bypass(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (torch.tanh(self.net[0](batch)) @ self.net[2].weight.t() + self.net[2].bias).pow(2).mean()


def _bypass(rank: int) -> None:
    model = _Bypass()
    trainer().fit(model)
    assert_trained_like(model, _reference())


def test_r14_any_use_of_a_parameter(ranks: Ranks) -> None:
    ranks(2, _bypass)


class _Finetuned(Small):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = mlp(4, 4, seed=1)
        self.head = mlp(4, 2, seed=2)
        del self.net

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(batch))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _finetuning(rank: int) -> None:
    model = _Finetuned()
    start = [param.detach().clone() for param in model.backbone.parameters()]
    at_epoch_1: list[Tensor] = []

    class Look(Callback):
        def on_train_epoch_start(self, t: Any, module: Any) -> None:
            if t.current_epoch == 1:
                at_epoch_1.extend(param.detach().clone() for param in module.backbone.parameters())

    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1, backbone_initial_ratio_lr=0.5)
    trainer(max_epochs=3, callbacks=[unfreeze, Look()]).fit(model)
    assert_same(at_epoch_1, start, rtol=0, atol=0)  # frozen until then
    assert not any(torch.equal(a, b) for a, b in zip(start, model.backbone.parameters(), strict=True))
    assert_ranks_equal(list(model.parameters()))

    reference = _Finetuned()
    loss = lambda m, r, step: m.loss(data(r, step % 4, 3, 4))
    rates = {id(p): 0.1 for p in reference.parameters()}
    for epoch in range(3):
        for step in range(4):
            params = list(reference.parameters() if epoch else reference.head.parameters())
            found = torch.autograd.grad(sum(loss(reference, r, step) for r in range(WORLD)) / WORLD, params)
            with torch.no_grad():
                for param, grad in zip(params, found, strict=True):
                    is_backbone = any(param is p for p in reference.backbone.parameters())
                    # the callback starts the backbone's rate at 0.1 and doubles it each epoch, up to the head's
                    param -= (0.1 if is_backbone else rates[id(param)]) * grad
    assert_trained_like(model, list(reference.parameters()))


def test_r23_t02_backbone_finetuning(ranks: Ranks) -> None:
    ranks(2, _finetuning)


class _Growing(Small):
    """A head added at epoch 1, with other values on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.Module = nn.Identity()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.extra = mlp(2, 2, seed=100 + self.global_rank)
            self.optimizers().add_param_group({"params": list(self.extra.parameters())})

    def loss(self, batch: Tensor) -> Tensor:
        return self.extra(self.net(batch)).pow(2).mean()


def _growing(rank: int) -> None:
    model = _Growing()
    trainer(max_epochs=2).fit(model)
    first = nn.Sequential(mlp(4, 5, 2), nn.Identity())
    by_hand(first, _loss, 4, world=WORLD)
    first[1] = mlp(2, 2, seed=100)  # rank 0's
    assert_trained_like(model, by_hand(first, _loss, 4, world=WORLD))


def test_r26_a_head_added_while_training(ranks: Ranks) -> None:
    ranks(2, _growing)


class _Replaced(Small):
    def on_fit_start(self) -> None:
        self.net[0].weight = nn.Parameter(torch.zeros(5, 4))


def _replaced(rank: int) -> None:
    with pytest.raises(ValueError, match=r"1 trainable parameters.*shape \(5, 4\) that is not, or no longer, in"):
        trainer().fit(_Replaced())


def test_r17_a_parameter_replaced_behind_the_optimizers_back(ranks: Ranks) -> None:
    ranks(2, _replaced)


# ---- what is replicated ---------------------------------------------------------------------------------------------


class _Parts(LightningModule):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.encoder = mlp(4, 4, seed=rank)
        self.head_a, self.head_b = mlp(4, 2, seed=rank + 10), mlp(4, 2, seed=rank + 20)
        self.scale = nn.Parameter(torch.tensor(1.0 + rank))
        self.teacher = mlp(4, 2, seed=rank + 30).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.tanh(self.encoder(batch))
        return ((self.head_a(x) + self.head_b(x) - self.teacher(batch)) * self.scale).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 3), batch_size=None)


def _chosen(rank: int) -> None:
    model = _Parts(rank)
    names: list[str] = []

    class Look(Callback):
        def on_train_start(self, t: Any, module: Any) -> None:
            names.extend(t.strategy.plan().parameters)

    strategy = ReplicateStrategy(replicate=["encoder", "head_*", "scale"], local=["teacher"])
    trainer(strategy, callbacks=[Look()]).fit(model)
    assert set(names) == {name for name, _ in model.named_parameters() if not name.startswith("teacher")}
    assert_ranks_equal([p for n, p in model.named_parameters() if not n.startswith("teacher")])
    own = mlp(4, 2, seed=rank + 30)
    assert_same(list(model.teacher.parameters()), list(own.parameters()), rtol=0, atol=0)  # local: left alone

    model = _Parts(rank)
    trainer(ReplicateStrategy(local=["head_b"])).fit(model)
    assert_ranks_equal([p for n, p in model.named_parameters() if not n.startswith("head_b")])
    assert not torch.equal(model.head_b[0].weight, _Parts(1 - rank).head_b[0].weight)


def test_r04_r17_chosen_submodules(ranks: Ranks) -> None:
    ranks(2, _chosen)


def _forgotten(rank: int) -> None:
    with pytest.raises(ValueError, match=r"3 trainable parameters.*neither.*scale, head_b.0.weight, head_b.0.bias"):
        trainer(ReplicateStrategy(replicate=["encoder", "head_a"])).fit(_Parts(rank))
    with pytest.raises(ValueError, match=r"`replicate`: 'head_c' matches no.*Near it are: 'head_[ab]'"):
        trainer(ReplicateStrategy(replicate=["encoder", "head_c"])).fit(_Parts(rank))
    with pytest.raises(ValueError, match=r"`local`: 'techer' matches no.*'teacher'"):
        trainer(ReplicateStrategy(local="techer")).fit(_Parts(rank))


def test_r17_what_is_neither_replicated_nor_local_is_named(ranks: Ranks) -> None:
    ranks(2, _forgotten)


class _Unfrozen(_Parts):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.head_b.requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.head_b.requires_grad_(True)


def _unfrozen_unmanaged(rank: int) -> None:
    with pytest.raises(ValueError, match=r"2 trainable parameters.*head_b.0.weight, head_b.0.bias"):
        trainer(ReplicateStrategy(replicate=["encoder", "head_a", "scale"], local=["teacher"])).fit(_Unfrozen(rank))


def test_r17_an_unmanaged_parameter_that_is_unfrozen(ranks: Ranks) -> None:
    ranks(2, _unfrozen_unmanaged)


def _nested_patterns(rank: int) -> None:
    model = _Parts(rank)
    names = ["encoder.0.weight", "scale", "head_*"]
    trainer(ReplicateStrategy(replicate=names, local=["encoder.0.bias", "teacher"])).fit(model)
    assert_ranks_equal([model.encoder[0].weight, model.scale, *model.head_a.parameters()])


def test_r04_parameters_by_name(ranks: Ranks) -> None:
    ranks(2, _nested_patterns)


class _ByHand(_Parts):
    def configure_model(self) -> None:
        replicate(self.encoder, self.head_a, self.head_b, ignored_params=[])
        self.scale.requires_grad_(False)


def _by_hand(rank: int) -> None:
    model = _ByHand(rank)
    run = trainer(max_epochs=2)
    run.fit(model)
    assert_ranks_equal(list(model.parameters()))  # the frozen teacher, too
    run.validate(_Validated(rank), verbose=False)
    run.fit_loop.max_epochs = 3
    run.fit(model)  # configure_model runs again: nothing is applied twice
    assert_ranks_equal(list(model.parameters()))


class _ShardedTrunk(LightningModule):
    """A trunk sharded by hand, with buffers in it; the rest is replicated. Every rank starts elsewhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(mlp(4, 6, seed=0), nn.BatchNorm1d(6))  # equal values: sharding does not equalize
        self.head = mlp(6, 2, seed=seed)
        self.trunk[1].running_mean.fill_(seed)
        self.register_buffer("loose", torch.full((2,), float(seed)), persistent=False)

    def configure_model(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not isinstance(self.trunk[0][0].weight, DTensor):
            fully_shard(self.trunk, mesh=init_device_mesh("cpu", (WORLD,)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(torch.tanh(self.trunk(batch))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.trainer.global_rank, 4, size=5), batch_size=None)


def _sharded_trunk(rank: int) -> None:
    model = _ShardedTrunk(seed=rank)
    start: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, t: Any, module: Any) -> None:
            start["buffers"] = [buffer.clone() for buffer in module.buffers()]
            start["plan"] = t.strategy.plan().parameters

    trainer(callbacks=[Look()]).fit(model)
    assert_ranks_equal(start["buffers"])  # those inside the sharded part, too
    assert set(start["plan"]) == {"head.0.weight", "head.0.bias"}
    reference = _ShardedTrunk(seed=0)
    params = list(reference.parameters())
    for step in range(4):
        losses = [reference.training_step(data(r, step, 5, 4), step) for r in range(WORLD)]
        found = torch.autograd.grad(sum(losses) / WORLD, params)  # type: ignore[arg-type]
        with torch.no_grad():
            for param, grad in zip(params, found, strict=True):
                param -= 0.1 * grad
    full = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    assert_same(full, params, rtol=1e-4, atol=1e-6)
    assert_ranks_equal(full)


def test_r47_t36_t48_a_part_that_is_sharded_by_hand(ranks: Ranks) -> None:
    ranks(2, _sharded_trunk)


class _Validated(_ByHand):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    val_dataloader = _Parts.train_dataloader


def test_r47_marks_set_by_hand(ranks: Ranks) -> None:
    ranks(2, _by_hand)


# ---- the rest of Lightning ------------------------------------------------------------------------------------------


class _Normalized(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(4, 5), nn.BatchNorm1d(5), mlp(5, 2))


def _sync_batchnorm(rank: int) -> None:
    model = _Normalized()
    seen: list[Any] = []

    class Look(Callback):
        def on_fit_start(self, t: Any, module: Any) -> None:
            seen.extend([type(module.net[1]), t.strategy.plan().parameters])

    # torch's SyncBatchNorm does not run on the CPU, so this is as far as it goes without a GPU
    trainer(sync_batchnorm=True, limit_train_batches=0, callbacks=[Look()]).fit(model)
    assert seen[0] is nn.SyncBatchNorm and "net.1.weight" in seen[1]
    assert type(model.net[1]) is not nn.SyncBatchNorm  # reverted at the end
    assert_ranks_equal([*model.parameters(), *model.buffers()])


def test_sync_batchnorm(ranks: Ranks) -> None:
    ranks(2, _sync_batchnorm)


def _running_statistics(rank: int) -> None:
    model = _Normalized()
    seen: dict[str, list[Tensor]] = {}

    class Look(Callback):
        def on_train_epoch_end(self, t: Any, module: Any) -> None:
            seen["training"] = [b.clone() for b in module.net[1].buffers()]

    trainer(callbacks=[Look()]).fit(model)
    # training leaves each rank its own statistics; at the end all ranks have rank 0's
    first = [seen["training"]]
    dist.broadcast_object_list(first, 0)
    assert_same(list(model.net[1].buffers()), first[0], rtol=0, atol=0)
    if rank == 1:
        assert not torch.equal(seen["training"][0], first[0][0])


def test_running_statistics_are_rank_0s_in_the_end(ranks: Ranks) -> None:
    ranks(2, _running_statistics)


class _Meta(Small):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _meta(rank: int) -> None:
    model = _Meta()
    start: list[Tensor] = []

    class Look(Callback):
        def on_train_start(self, t: Any, module: Any) -> None:
            start.extend(param.detach().clone() for param in module.parameters())

    trainer(callbacks=[Look()]).fit(model)
    reference = mlp(4, 5, 2)
    with torch.no_grad():
        for param, value in zip(reference.parameters(), start, strict=True):
            param.copy_(value)
    assert_trained_like(model, by_hand(reference, _loss, 4, world=WORLD))


def test_configure_model_on_the_meta_device(ranks: Ranks) -> None:
    ranks(2, _meta)


def _compiled(rank: int) -> None:
    inside = Small()
    inside.net[0].compile(backend="eager")
    trainer().fit(inside)
    assert_trained_like(inside, _reference())
    whole = Small()
    trainer().fit(torch.compile(whole, backend="eager"))
    assert_trained_like(whole, _reference())
    torch.compiler.reset()


def test_r67_compiled_inside_and_as_a_whole(ranks: Ranks) -> None:
    ranks(2, _compiled)


class _Sampled(Small):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = [*getattr(self, "seen", []), *batch[0].tolist()]
        self.log("mean", batch[0].mean(), on_epoch=True, on_step=False, sync_dist=True)
        return self.loss(batch[0].repeat(2, 1).t().repeat(1, 2))


def _sampler(rank: int) -> None:
    model = _Sampled()
    run = trainer(use_distributed_sampler=True)
    run.fit(model)
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, model.seen)
    assert sorted(everybody[0] + everybody[1]) == list(range(12))  # each sample once
    assert run.callback_metrics["mean"].item() == pytest.approx(5.5)


def test_distributed_sampler_and_sync_dist(ranks: Ranks) -> None:
    ranks(2, _sampler)


def _one_device() -> None:
    model = Small()
    hooks: list[Any] = []

    class Look(Callback):
        def on_train_start(self, t: Any, module: Any) -> None:
            hooks.extend(param._post_accumulate_grad_hooks for param in module.parameters())

    trainer(devices=1, callbacks=[Look()]).fit(model)
    assert hooks == [None] * 4
    assert_same(list(model.parameters()), _reference(world=1), rtol=1e-4, atol=1e-6)


def test_one_device_has_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        _one_device()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _wrong_size(rank: int) -> None:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Elsewhere(TorchElasticEnvironment):
        """An environment that has launched two processes while the Trainer was told of one."""

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return rank

        def world_size(self) -> int:
            return WORLD

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """Lightning's own check, where there is one, comes first."""

    with pytest.raises(RuntimeError, match=r"told of 1 processes \(devices=1 x num_nodes=1\), but 2 were launched"):
        trainer(devices=1, plugins=[Elsewhere()]).fit(Small())


def test_r42_devices_and_launched_processes_are_compared(ranks: Ranks) -> None:
    ranks(2, _wrong_size)


def test_devices_that_torch_distributed_cannot_serve() -> None:
    strategy = ReplicateStrategy(parallel_devices=[torch.device("mps")])  # without an environment: one process
    with pytest.raises(ValueError, match=r"does not serve 'mps' devices.*accelerator='cpu'"):
        strategy.setup_environment()


def test_r58_default_backends() -> None:
    cuda = ReplicateStrategy(parallel_devices=[torch.device("cuda", 0)])
    assert cuda._get_process_group_backend() == "cpu:gloo,cuda:nccl"
    cpu = ReplicateStrategy(parallel_devices=[torch.device("cpu")])
    assert cpu._get_process_group_backend() == "gloo"
    assert ReplicateStrategy(process_group_backend="mpi")._get_process_group_backend() == "mpi"
