"""What a replicated module is: the same module; and what is left when replication is taken off."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_replicate import ReplicateState, replicate
from lightning_replicate.core.api import BucketPlan, Plan
from tests.core.helpers import assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp
from tests.ranks import Ranks

WORLD = 2


class _Custom(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "note": "kept"}


def _the_same_model(rank: int) -> None:
    model = mlp(4, 5, 2)
    before = (type(model), list(model.state_dict()), [name for name, _ in model.named_modules()])
    values = copy.deepcopy(model.state_dict())
    assert replicate(model) is model
    assert (type(model), list(model.state_dict()), [name for name, _ in model.named_modules()]) == before
    assert isinstance(model, nn.Sequential)
    state = replicate.state(model)
    assert isinstance(state, ReplicateState) and state.modules == (model,) and state.world_size == WORLD
    for key, value in model.state_dict().items():
        assert torch.equal(value, values[key])


def test_r1_a_replicated_model_is_the_same_model(ranks: Ranks) -> None:
    ranks(2, _the_same_model)


def _each_child(rank: int) -> None:
    model = mlp(4, 5, 5, 2)
    keys = list(model.state_dict())
    for child in model:
        replicate(child)
    assert list(model.state_dict()) == keys
    params = list(model.parameters())
    for step in range(2):
        model.zero_grad()
        expected = mean_of([local_grads(model(data(r, step, 3, 4)).sum(), params) for r in range(WORLD)])
        model(data(rank, step, 3, 4)).sum().backward()
        assert_same(grads(params), expected)
    with pytest.raises(ValueError, match="was not applied to this module"):
        replicate.state(model)


def test_r2_r4_k3_every_child_by_itself(ranks: Ranks) -> None:
    ranks(2, _each_child)


def _assert_plain(copied: nn.Module, original: nn.Module) -> None:
    assert type(copied) is type(original)
    for module in copied.modules():
        with pytest.raises(ValueError, match="was not applied"):
            replicate.state(module)
        assert "__getstate__" not in module.__dict__
        assert not module._forward_pre_hooks
    assert_same(list(copied.parameters()), list(original.parameters()), rtol=0, atol=0)
    for param in copied.parameters():
        assert not param._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def _copies(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model[2])
    replicate(model)
    model(data(rank, 0, 3, 4)).sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    averaged = AveragedModel(model)
    made = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        averaged.module,
        copy.deepcopy(copy.deepcopy(model)),
    ]
    rounds = replicate.state(model).closed_rounds
    for copied in made:
        _assert_plain(copied, model)
        copied.zero_grad()
        copied(data(rank, 1, 3, 4)).sum().backward()  # local: nobody replicated the copy
        assert_same(
            grads(list(copied.parameters())), local_grads(model(data(rank, 1, 3, 4)).sum(), list(model.parameters()))
        )
    assert replicate.state(model).closed_rounds == rounds
    averaged.update_parameters(model)
    replicate(made[0])  # a copy may be replicated in its turn
    made[0].zero_grad()
    made[0](data(rank, 2, 3, 4)).sum().backward()
    assert_ranks_equal([param.grad for param in made[0].parameters()])

    custom = replicate(_Custom(2, 2))
    copied = copy.deepcopy(custom)
    assert copied.note == "kept" and copied.weight is not custom.weight
    _assert_plain(copied, custom)


def test_t34_copies_and_pickles_are_plain(ranks: Ranks) -> None:
    ranks(2, _copies)


def _removal(rank: int) -> None:
    model = mlp(4, 5, 2)
    before = set(model.__dict__)
    replicate(model)
    state = replicate.state(model)
    model(data(rank, 0, 3, 4)).sum().backward()
    kept = grads(list(model.parameters()))
    state.remove()
    assert set(model.__dict__) == before
    assert not model._forward_pre_hooks
    assert_same(grads(list(model.parameters())), kept, rtol=0, atol=0)
    storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters() if param.grad is not None}
    assert len(storages) == len(list(model.parameters()))  # ordinary tensors, and the bucket's memory is free
    model.zero_grad()
    model(data(rank, 1, 3, 4)).sum().backward()
    assert_same(
        grads(list(model.parameters())),
        local_grads(model(data(rank, 1, 3, 4)).sum(), list(model.parameters())),
    )
    for _ in range(2):  # again, twice: nothing is installed twice, so nothing is divided twice
        replicate(model)
        model.zero_grad()
        model(data(rank, 2, 3, 4)).sum().backward()
        assert_same(
            grads(list(model.parameters())),
            mean_of([local_grads(model(data(r, 2, 3, 4)).sum(), list(model.parameters())) for r in range(WORLD)]),
        )
        replicate.state(model).remove()


def test_d14_r43_remove_takes_everything_off(ranks: Ranks) -> None:
    ranks(2, _removal)


def _groups_are_freed(rank: int) -> None:
    from torch.distributed.distributed_c10d import _world

    before = len(_world.pg_map)
    for _ in range(3):
        a, b = replicate(mlp(2, 2)), replicate(mlp(2, 2))
        assert len(_world.pg_map) == before + 2  # both share the two groups
        replicate.state(a).remove()
        replicate.state(b).remove()
        assert len(_world.pg_map) == before


def test_r43_process_groups_are_freed(ranks: Ranks) -> None:
    ranks(2, _groups_are_freed)


def _garbage(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    model(data(rank, 0, 3, 4)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    other = replicate(mlp(4, 5, 2))  # a dropped module does not disturb the next one
    params = list(other.parameters())
    for step in range(2):
        other.zero_grad()
        other(data(rank, step, 3, 4)).sum().backward()
        assert_same(
            grads(params), mean_of([local_grads(other(data(r, step, 3, 4)).sum(), params) for r in range(WORLD)])
        )


def test_a_module_that_is_dropped_is_freed(ranks: Ranks) -> None:
    ranks(2, _garbage)


def _collected_at_different_times(rank: int) -> None:
    """Rank 0 collects a module that was dropped, rank 1 does not: they still agree on what there is to set up."""
    if rank == 1:
        gc.disable()
    try:
        for seed in range(3):
            model = replicate(mlp(4, 5, 2, seed=seed))
            params = list(model.parameters())
            model(data(rank, 0, 3, 4)).sum().backward()
            assert_same(
                grads(params), mean_of([local_grads(model(data(r, 0, 3, 4)).sum(), params) for r in range(WORLD)])
            )
            del model, params
            if rank == 0:
                gc.collect()
    finally:
        gc.enable()


def test_ranks_that_collect_garbage_at_different_times(ranks: Ranks) -> None:
    ranks(2, _collected_at_different_times)


def _save_and_load(rank: int) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, shards: Any) -> None:
        for step in steps:
            optimizer.zero_grad()
            sum(model(data(r, step, 3, 4)).pow(2).mean() for r in shards).div(len(shards)).backward()
            optimizer.step()

    plain, unbroken, loaded = (mlp(4, 5, 2) for _ in range(3))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, unbroken, loaded)]
    replicate(unbroken)
    replicate(loaded)
    run(plain, optimizers[0], range(3), range(WORLD))
    for model, optimizer in ((unbroken, optimizers[1]), (loaded, optimizers[2])):
        run(model, optimizer, range(3), [rank])
    saved = copy.deepcopy([{k: v.clone() for k, v in loaded.state_dict().items()} if rank == 0 else None])
    with torch.no_grad():
        for param in loaded.parameters():
            param.zero_()
    dist.broadcast_object_list(saved)
    loaded.load_state_dict(saved[0])  # type: ignore[arg-type]
    run(plain, optimizers[0], range(3, 6), range(WORLD))
    for model, optimizer in ((unbroken, optimizers[1]), (loaded, optimizers[2])):
        run(model, optimizer, range(3, 6), [rank])
    assert_same(list(loaded.parameters()), list(unbroken.parameters()), rtol=0, atol=0)
    assert_same(list(loaded.parameters()), list(plain.parameters()), rtol=1e-4, atol=1e-6)
    assert_ranks_equal(list(loaded.parameters()))


def test_d18_d19_save_load_and_go_on(ranks: Ranks) -> None:
    ranks(2, _save_and_load)


def _two_models(rank: int) -> None:
    one, two = replicate(mlp(4, 3, seed=1)), replicate(mlp(3, 4, seed=2))
    for step in range(3):
        for model, width in ((one, 4), (two, 3)):
            params = list(model.parameters())
            model.zero_grad()
            model(data(rank, step, 2, width)).sum().backward()
            expected = mean_of([local_grads(model(data(r, step, 2, width)).sum(), params) for r in range(WORLD)])
            assert_same(grads(params), expected)


def test_r13_state_lives_on_modules(ranks: Ranks) -> None:
    ranks(2, _two_models)


def _plan(rank: int) -> None:
    model = mlp(4, 5, 2)
    model[0].bias.requires_grad_(False)
    replicate(model, bucket_cap_mb=1e-6)
    plan = replicate.state(model).plan()
    assert [bucket.parameters for bucket in plan.buckets] == [("2.bias",), ("2.weight",), ("0.weight",)]
    assert [bucket.nbytes for bucket in plan.buckets] == [8, 40, 80]
    assert {bucket.dtype for bucket in plan.buckets} == {torch.float32}
    assert (plan.nbytes, plan.world_size, plan.frozen) == (128, WORLD, ("0.bias",))
    text = str(plan)
    assert "3 parameters in 3 buckets" in text and "bucket 2" in text and "1 frozen" in text


def test_a_plan_counts_in_words() -> None:
    one = BucketPlan(("weight",), torch.float32, torch.device("cpu"), 4)
    assert str(Plan((one,), 1)).splitlines() == [
        "1 parameter in 1 bucket, 0.00 MiB, averaged over 1 rank",
        "  bucket 0:    0.000 MiB  float32  cpu  1 parameter (weight)",
    ]
    assert str(Plan((), 2)) == "0 parameters in 0 buckets, 0.00 MiB, averaged over 2 ranks"


def test_the_plan_is_data(ranks: Ranks) -> None:
    ranks(2, _plan)


def _compiled(rank: int) -> None:
    # the eager backend traces like the real ones and needs no compiler
    for order in ("compile first", "replicate first", "blocks"):
        model = mlp(4, 5, 2)
        if order == "replicate first":
            replicate(model)
        if order == "blocks":
            model[0].compile(backend="eager")
            run: Any = model
        else:
            run = torch.compile(model, backend="eager")
        if order != "replicate first":
            replicate(model)
        params = list(model.parameters())
        for step in range(2):
            model.zero_grad()
            run(data(rank, step, 3, 4)).sum().backward()
            expected = mean_of([local_grads(model(data(r, step, 3, 4)).sum(), params) for r in range(WORLD)])
            assert_same(grads(params), expected)
        replicate.state(model).remove()
        torch.compiler.reset()


def test_r67_t49_compiled_modules(ranks: Ranks) -> None:
    ranks(2, _compiled)


def _profiled(rank: int) -> None:
    model = replicate(mlp(4, 5, 2))
    model(data(rank, 0, 3, 4)).sum().backward()
    with torch.profiler.profile() as profile:
        model(data(rank, 1, 3, 4)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"replicate::close"} <= names
    assert any(name.startswith("replicate::launch (") for name in names)
    assert any(name.startswith("replicate::wait (") for name in names)


def test_hot_phases_have_names_in_a_profile(ranks: Ranks) -> None:
    ranks(2, _profiled)
