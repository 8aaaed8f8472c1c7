"""Several groups over one process group: one queue, and only the bytes of what was touched."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import replicate
from tests.core.helpers import assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp
from tests.ranks import Ranks

WORLD = 2


def _mean(loss: Any, params: list[nn.Parameter], world: int = WORLD) -> list[Any]:
    return mean_of([local_grads(loss(rank), params) for rank in range(world)])


def _bytes(module: nn.Module) -> int:
    stats = replicate.state(module).last_round
    return 0 if stats is None else stats.nbytes


def _rounds(module: nn.Module) -> int:
    stats = replicate.state(module).last_round
    return 0 if stats is None else stats.number


def _accumulated_beside(rank: int) -> None:
    """A group that nobody touched in a round is accumulated in the next window, over several backwards."""
    nets = [mlp(3, 4, 1, seed=1), mlp(3, 4, 1, seed=2)]
    for net in nets:
        replicate(net)
    first, second = nets
    states = [replicate.state(net) for net in nets]
    for step in range(3):
        sum(net(data(rank, step, 5, 3)).mean() for net in nets).backward()
    for window in range(2):
        for net in nets:
            net.zero_grad()
        first(data(rank, 10 + window, 5, 3)).mean().backward()
        loss = lambda r, window=window: sum(second(data(r, 20 + 4 * window + i, 5, 3)).mean() for i in range(4))
        expected = _mean(loss, list(second.parameters()))
        with states[0].no_sync(), states[1].no_sync():
            for i in range(3):
                second(data(rank, 20 + 4 * window + i, 5, 3)).mean().backward()
        second(data(rank, 20 + 4 * window + 3, 5, 3)).mean().backward()
        assert_same(grads(list(second.parameters())), expected)
        assert_ranks_equal([param.grad for net in nets for param in net.parameters()])


def test_accumulation_of_a_group_that_was_not_touched_before(ranks: Ranks) -> None:
    ranks(WORLD, _accumulated_beside)


def _game(rank: int) -> None:
    generator, critic = mlp(3, 8, 4, seed=1), mlp(4, 8, 1, seed=2)
    replicate(generator)
    replicate(critic)
    both = [*generator.parameters(), *critic.parameters()]
    for step in range(4):
        fake = lambda r, step=step: generator(data(r, step, 5, 3))
        critic_loss = lambda r, fake=fake: critic(fake(r).detach()).mean()
        generator_loss = lambda r, fake=fake: -critic(fake(r)).mean()

        expected = _mean(critic_loss, both)
        rounds = _rounds(generator)
        critic_loss(rank).backward()
        assert_same(grads(both), expected)
        assert_ranks_equal([param.grad for param in both])
        assert _rounds(generator) == rounds  # a backward through the critic alone moved none of the generator's bytes
        assert _bytes(critic) < sum(p.nbytes for p in critic.parameters()) + 256
        for param in both:
            param.grad = None

        expected = _mean(generator_loss, both)
        generator_loss(rank).backward()  # deposits gradients in both
        assert _rounds(generator) == rounds + 1
        assert_same(grads(both), expected)
        assert_ranks_equal([param.grad for param in both])
        for param in both:
            param.grad = None
    stats = replicate.state(critic).last_round
    assert stats is not None and (stats.early, stats.late) == (1, 0)  # both kinds of step leave early by now


def test_r07_r08_a_backward_moves_only_the_groups_that_it_touched(ranks: Ranks) -> None:
    ranks(2, _game)


def _different_groups(rank: int) -> None:
    nets = [mlp(4, 4, seed=i) for i in range(3)]
    for net in nets:
        replicate(net)
    params = [param for net in nets for param in net.parameters()]
    for step in range(6):
        used = lambda r, step=step: [(r + step) % 3] if step < 3 else [r % 3, 2]
        loss = lambda r, step=step: sum(nets[i](data(r, step, 2, 4)).pow(2).sum() for i in used(r))
        expected = _mean(loss, params)
        for param in params:
            param.grad = None
        loss(rank).backward()  # type: ignore[union-attr]
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in params])


def test_t43_ranks_that_touch_different_groups(ranks: Ranks) -> None:
    ranks(2, _different_groups)


def _other_order(rank: int) -> None:
    a, b = mlp(4, 4, seed=1), mlp(4, 4, seed=2)  # equal shapes: a mix-up would go unnoticed by sizes
    replicate(a)
    replicate(b)
    params = [*a.parameters(), *b.parameters()]
    for step in range(4):
        x = lambda r, step=step: data(r, step, 2, 4)
        loss = lambda r: (b(a(x(r))) if r == 0 else a(b(x(r)))).pow(2).sum()
        expected = _mean(loss, params)
        for param in params:
            param.grad = None
        loss(rank).backward()
        assert_same(grads(params), expected)


def test_t46_groups_that_run_in_another_order_on_one_rank(ranks: Ranks) -> None:
    ranks(2, _other_order)


def _windows(rank: int) -> None:
    a, b = mlp(4, 4, seed=1), mlp(4, 4, seed=2)
    replicate(a)
    replicate(b)
    params = [*a.parameters(), *b.parameters()]
    first = lambda r: a(data(r, 0, 2, 4)).pow(2).sum()
    second = lambda r: b(data(r, 1, 2, 4)).pow(2).sum()
    with replicate.state(a).no_sync(), replicate.state(b).no_sync():
        first(rank).backward()
    second(rank).backward()  # touches b only; the window touched a as well
    assert_same(grads(params), _mean(lambda r: first(r) + second(r), params))

    for param in params:
        param.grad = None
    with replicate.state(a).no_sync():  # one group accumulates while the other synchronizes
        (first(rank) + second(rank)).backward()
    assert_same(grads(list(b.parameters())), _mean(second, list(b.parameters())))
    assert_same(grads(list(a.parameters())), local_grads(first(rank), list(a.parameters())))


def test_r44_windows_over_several_groups(ranks: Ranks) -> None:
    ranks(2, _windows)


def _skipped(rank: int) -> None:
    a, b = mlp(4, 4, seed=1), mlp(4, 4, seed=2)
    replicate(a)
    replicate(b)
    for step in range(3):
        for param in (*a.parameters(), *b.parameters()):
            param.grad = None
        with replicate.state(a).round():
            if (rank + step) % 2:
                a(data(rank, step, 2, 4)).sum().backward()
        only = next(r for r in range(WORLD) if (r + step) % 2)
        assert_same(grads(list(a.parameters())), local_grads(a(data(only, step, 2, 4)).sum(), list(a.parameters())))
        assert all(param.grad is None for param in b.parameters())


def test_r28_skipped_backwards_with_several_groups(ranks: Ranks) -> None:
    ranks(2, _skipped)


def _own_process_group(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    model(data(rank, 0, 3, 4)).sum().backward()
    model.zero_grad()
    if rank == 0:  # a stray collective of the user, in flight while buckets are sent
        stray = dist.all_reduce(torch.ones(43), async_op=True)
    model(data(rank, 1, 3, 4)).sum().backward()
    assert_same(
        grads(list(model.parameters())), _mean(lambda r: model(data(r, 1, 3, 4)).sum(), list(model.parameters()))
    )
    if rank == 1:
        stray = dist.all_reduce(torch.ones(43), async_op=True)
    stray.wait()


def test_t44_gradients_have_a_process_group_of_their_own(ranks: Ranks) -> None:
    ranks(2, _own_process_group)


def _subgroups(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "other"))
    model = mlp(4, 5, 2, seed=rank)
    replicate(model, mesh=mesh["replicate"])
    peers = dist.get_process_group_ranks(mesh["replicate"].get_group())
    assert peers == [rank % 2, rank % 2 + 2]
    reference = mlp(4, 5, 2, seed=peers[0])  # the first rank of the group, not rank 0
    assert_same(list(model.parameters()), list(reference.parameters()), rtol=0, atol=0)
    for step in range(3):
        model.zero_grad()
        model(data(rank, step, 3, 4)).sum().backward()
        params = list(reference.parameters())
        expected = mean_of([local_grads(reference(data(r, step, 3, 4)).sum(), params) for r in peers])
        assert_same(grads(list(model.parameters())), expected)


def test_d5_d6_t11_a_mesh_or_process_group_of_some_ranks(ranks: Ranks) -> None:
    ranks(4, _subgroups)


def _dropped(rank: int) -> None:
    model, dropped = mlp(4, 5, 2), mlp(4, 5, 2)
    replicate(model)
    replicate(dropped)
    del dropped
    if rank == 1:  # collected at another time than on rank 0
        gc.collect()
    params = list(model.parameters())
    for step in range(3):
        model.zero_grad()
        with replicate.state(model).no_sync():
            model(data(rank, step, 3, 4)).sum().backward()
        model(data(rank, step + 1, 3, 4)).sum().backward()
        both = _mean(lambda r, s=step: model(data(r, s, 3, 4)).sum() + model(data(r, s + 1, 3, 4)).sum(), params)
        assert_same(grads(params), both)


def test_a_dropped_model_that_some_ranks_have_not_collected_yet(ranks: Ranks) -> None:
    ranks(2, _dropped)
