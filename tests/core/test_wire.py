"""How a bucket travels: reduced precision and communication hooks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_replicate import replicate
from tests.core.helpers import Branches, assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp, seeded
from tests.ranks import Ranks

WORLD = 2


def _expected(model: nn.Module, loss: Any, divisor: float | None = None) -> list[Any]:
    params = list(model.parameters())
    return mean_of(
        [[None] * len(params) if (made := loss(r)) is None else local_grads(made, params) for r in range(WORLD)],
        divisor,
    )


def _reduce_dtype(rank: int) -> None:
    # error bounds: half a unit in the last place for each rank's rounding, twice that after the sum's own
    for wire, epsilon in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        model = seeded(Branches, 0)
        state = replicate.state(replicate(model, reduce_dtype=wire))
        full = sum(param.nbytes for param in model.parameters())
        for step in range(3):
            model.zero_grad()
            loss = lambda r, step=step: model(data(r, step, 3, 4), *(["left"] if r else [])).sum()
            expected = _expected(model, loss)
            size = [  # the sum of magnitudes bounds the rounding error
                None if e is None else m
                for e, m in zip(
                    expected,
                    mean_of(
                        [
                            [None if g is None else g.abs() for g in local_grads(loss(r), list(model.parameters()))]
                            for r in range(WORLD)
                        ]
                    ),
                    strict=True,
                )
            ]
            loss(rank).backward()
            for param, reference, bound in zip(model.parameters(), expected, size, strict=True):
                assert (param.grad is None) == (reference is None)
                if param.grad is not None:
                    assert param.grad.dtype == torch.float32
                    assert torch.all((param.grad - reference).abs() <= 2 * epsilon * bound + 1e-7)
            assert_ranks_equal([param.grad for param in model.parameters()])
            assert state.last_round is not None and state.last_round.nbytes < full / 2 + 256
        skipping = lambda r: model(data(r, 9, 3, 4)).sum() if r == 0 else None
        model.zero_grad()
        with state.round():
            if rank == 0:
                skipping(0).backward()
        assert_same(grads(list(model.parameters())), _expected(model, skipping, divisor=1), rtol=1e-2, atol=1e-2)

    low = mlp(4, 5, 2, dtype=torch.bfloat16)
    replicate(low, reduce_dtype=torch.float32)  # sums in fp32, stored in bf16
    loss = lambda r: low(data(r, 0, 3, 4, dtype=torch.bfloat16)).sum()
    params = list(low.parameters())
    exact = mean_of([[g.float() for g in local_grads(loss(r), params)] for r in range(WORLD)])  # type: ignore[union-attr]
    loss(rank).backward()
    assert_same(grads(params), [e.bfloat16() for e in exact], rtol=0, atol=0)  # type: ignore[union-attr]


def test_r64_reduce_dtype(ranks: Ranks) -> None:
    ranks(2, _reduce_dtype)


def _hooks(rank: int) -> None:
    def plain_sum(state: Any, bucket: Any) -> torch.futures.Future:
        """DDP's meaning: the hook gets the undivided bucket and divides itself."""
        work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / WORLD)

    hooks = {
        "own": plain_sum,
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "bf16 wrapper": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    }
    for name, hook in hooks.items():
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if "16" in name else {}
        model = seeded(Branches, 0)
        state = replicate.state(replicate(model, comm_hook=hook))
        for step in range(4):
            model.zero_grad(set_to_none=step % 2 == 0)
            before = grads(list(model.parameters()))
            loss = lambda r, step=step: model(data(r, step, 3, 4), *(["left"] if r else [])).sum()
            expected = [o if e is None else e for o, e in zip(before, _expected(model, loss), strict=True)]
            loss(rank).backward()
            assert_same(grads(list(model.parameters())), expected, **tolerance)
            assert_ranks_equal([param.grad for param in model.parameters()])
        model.zero_grad()
        skipping = lambda r: model(data(r, 9, 3, 4)).sum() if r == 0 else None
        with state.round():
            if rank == 0:
                skipping(0).backward()
        assert_same(grads(list(model.parameters())), _expected(model, skipping, divisor=1), **tolerance)
        assert model.idle.weight.grad is None


def test_r64_d66_d69_d70_d71_communication_hooks(ranks: Ranks) -> None:
    ranks(2, _hooks)


def _hook_interface(rank: int) -> None:
    model = mlp(4, 5, 2)
    seen: list[Any] = []

    def ones(state: Any, bucket: Any) -> torch.futures.Future:
        seen.append((state, bucket.index(), bucket.is_last(), len(bucket.parameters()), len(bucket.gradients())))
        assert all(p.shape == g.shape for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True))
        bucket.set_buffer(torch.ones_like(bucket.buffer()))
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future.then(lambda f: f.value() + 1)

    replicate(model, comm_hook=("state", ones), bucket_cap_mb=1e-6)
    model(data(rank, 0, 3, 4)).sum().backward()
    assert_same(grads(list(model.parameters())), [torch.full_like(p, 2.0) for p in model.parameters()])
    assert seen == [("state", i, i == 3, 1, 1) for i in range(4)]

    wrong = replicate(mlp(4, 2), comm_hook=lambda state, bucket: None)
    with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future"):
        wrong(data(rank, 0, 3, 4)).sum().backward()


def test_d66_d67_d74_what_a_hook_sees(ranks: Ranks) -> None:
    ranks(2, _hook_interface)


def _registered_later(rank: int) -> None:
    model = seeded(Branches, 0)
    state = replicate.state(replicate(model))
    loss = lambda r, step: model(data(r, step, 3, 4), *(["left"] if r else [])).sum()
    for step in range(4):
        if step == 2:
            state.register_comm_hook(None, default_hooks.allreduce_hook)
        model.zero_grad()
        expected = _expected(model, lambda r: loss(r, step))
        loss(rank, step).backward()
        assert_same(grads(list(model.parameters())), expected)
        assert_ranks_equal([param.grad for param in model.parameters()])
    with pytest.raises(RuntimeError, match="registered already"):
        state.register_comm_hook(None, default_hooks.allreduce_hook)
    other = replicate.state(replicate(mlp(2, 2), reduce_dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="must be callable"):
        other.register_comm_hook(None, "hook")
    with pytest.raises(ValueError, match="either `comm_hook` or `reduce_dtype`"):
        other.register_comm_hook(None, default_hooks.allreduce_hook)


def test_d67_d68_a_hook_registered_later(ranks: Ranks) -> None:
    ranks(2, _registered_later)


def _participants(rank: int) -> None:
    for average, expected in (("participants", [2, 1]), ("world", [2, 2]), ("weighted", [None, None])):
        model = mlp(4, 2)
        state = replicate.state(replicate(model, average=average))
        for step, count in enumerate(expected):
            with state.round():
                if step == 0 or rank == 0:
                    model(data(rank, step, 3, 4)).sum().backward()
            assert state.last_round is not None
            assert state.last_round.participants == count
        state.remove()


def test_how_many_ranks_took_part(ranks: Ranks) -> None:
    ranks(2, _participants)


def _power_sgd(rank: int) -> None:
    def train(state: Any) -> list[Any]:
        model = mlp(6, 6, 6, seed=0)
        replicate(model, comm_hook=(state, powerSGD_hook.powerSGD_hook))
        for step in range(6):
            model.zero_grad()
            model(data(rank, step, 8, 6)).pow(2).mean().backward()
        assert_ranks_equal([param.grad for param in model.parameters()])
        result = grads(list(model.parameters()))
        replicate.state(model).remove()
        return result

    make = lambda: powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=1.0
    )
    state = make()
    first = train(state)
    assert state.iter > 3  # the compressed phase was reached
    assert_same(train(make()), first, rtol=0, atol=0)
    restored = pickle.loads(pickle.dumps(copy.copy(state)))
    assert restored.iter == state.iter


def test_d72_power_sgd_state_counts_and_pickles(ranks: Ranks) -> None:
    import warnings

    del warnings
    ranks(2, _quiet_power_sgd)


def _quiet_power_sgd(rank: int) -> None:
    import logging
    import warnings

    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a pickled state leaves its process group behind
        _power_sgd(rank)
