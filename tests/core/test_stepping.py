"""What an optimizer steps with: averages, also where no backward brought the gradients, and an average loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replicate import ReplicateError, replicate
from lightning_replicate.core import stepping
from tests.core.helpers import Branches, assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp
from tests.ranks import Ranks

WORLD = 2


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return (model(data(rank, step, 3, 4)) - 1).pow(2).mean()


def _surgery(model: nn.Module, rank: int, step: int = 0) -> list[Tensor]:
    """Gradients of two tasks, the second without its part along the first (as PCGrad makes them)."""
    out = model(data(rank, step, 3, 4))
    params = list(model.parameters())
    first = torch.autograd.grad(out[:, 0].pow(2).mean(), params, retain_graph=True)
    second = torch.autograd.grad((out[:, 1] - 1).pow(2).mean(), params)
    return [a + b - a * (a * b).sum().clamp(max=0) / (a * a).sum() for a, b in zip(first, second, strict=True)]


def _assign(model: nn.Module, values: list[Any]) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        param.grad = value


# ---- average_gradients ----------------------------------------------------------------------------------------------


def _averaged(rank: int) -> None:
    for options, divisor in (
        ({}, WORLD),
        ({"average": "world"}, WORLD),
        ({"average": "sum"}, 1),
        ({"reduce_dtype": torch.bfloat16}, WORLD),
    ):
        model = mlp(4, 5, 2)
        replicate(model, **options)  # type: ignore[arg-type]
        state = replicate.state(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = mlp(4, 5, 2)
        close = {"rtol": 2e-2, "atol": 1e-2} if "reduce_dtype" in options else {}
        for step in range(3):  # the first round finds out in which order gradients come
            optimizer.zero_grad()
            _assign(model, _surgery(model, rank, step))
            state.average_gradients()
            expected = mean_of([_surgery(reference, r, step) for r in range(WORLD)], divisor)  # type: ignore[misc]
            assert_same(grads(list(model.parameters())), expected, **close)
            optimizer.step()
            with torch.no_grad():
                for param, grad in zip(reference.parameters(), expected, strict=True):
                    assert grad is not None
                    param -= 0.1 * grad
            assert_ranks_equal(list(model.parameters()))


def _weighted_and_accumulated(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model, average="weighted")
    state = replicate.state(model)
    params = list(model.parameters())
    weights = [3.0, 5.0]
    state.set_weight(weights[rank])
    _assign(model, _surgery(model, rank))
    state.average_gradients()
    surgery = [_surgery(model, r) for r in range(WORLD)]
    assert_same(
        grads(params), [sum(w * g for w, g in zip(weights, c, strict=True)) / 8 for c in zip(*surgery, strict=True)]
    )  # type: ignore[misc]

    # two backwards without a round are weighed as they arrive, and what is assigned for one parameter is weighed here
    model.zero_grad()
    with state.no_sync():
        _loss(model, rank, 1).backward()
        assert params[0].grad is not None
        params[0].grad = params[0].grad * 2  # of a backward
        params[1].grad = torch.full_like(params[1], rank + 1.0)  # replaces what a backward brought
        state.average_gradients()  # also within no_sync: it is asked for
    by_rank = [local_grads(_loss(model, r, 1), params) for r in range(WORLD)]
    expected = [sum(w * g for w, g in zip(weights, column, strict=True)) / 8 for column in zip(*by_rank, strict=True)]  # type: ignore[misc]
    expected[0] = expected[0] * 2
    expected[1] = torch.full_like(params[1], (1 + 2) / 8)  # its place had arrived, so it is taken as it is
    assert_same(grads(params), expected)
    assert_ranks_equal([param.grad for param in params])


def _chosen_and_missing(rank: int) -> None:
    model = Branches()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    replicate(model.trunk, model.head)
    replicate(model.left, model.right)
    trunk, branches = replicate.state(model.trunk), replicate.state(model.left)
    for step in range(2):
        model.zero_grad()
        for module in (model.trunk, model.head, model.left):
            for param in module.parameters():
                param.grad = torch.full_like(param, rank + 1.0 + step)
        if rank == 0:  # rank 1 has none for the head
            model.head.zero_grad()
        trunk.average_gradients([*model.trunk.parameters(), *model.head.parameters(), *model.right.parameters()])
        assert torch.equal(model.trunk.weight.grad, torch.full_like(model.trunk.weight, 1.5 + step))  # type: ignore[arg-type]
        assert torch.equal(model.head.bias.grad, torch.full_like(model.head.bias, (2 + step) / 2))  # type: ignore[arg-type]
        assert torch.equal(model.left.bias.grad, torch.full_like(model.left.bias, rank + 1.0 + step))  # type: ignore[arg-type]
        assert branches.last_round is None or branches.last_round.number == step
        branches.average_gradients()
        assert torch.equal(model.left.bias.grad, torch.full_like(model.left.bias, 1.5 + step))  # type: ignore[arg-type]
        assert model.right.bias.grad is None


def _sparse(rank: int) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    replicate(table)
    state = replicate.state(table)
    for step in range(3):
        table.zero_grad()
        rows = torch.tensor([[rank, rank + 1]])
        table.weight.grad = torch.sparse_coo_tensor(
            rows, torch.full((2, 2), step + rank + 1.0), (5, 2), check_invariants=True
        )
        state.average_gradients()
        grad = table.weight.grad
        assert grad is not None and (grad.is_sparse or step == 0)
        dense = grad.to_dense() if grad.is_sparse else grad
        first, second = (step + 1.0) / 2, (step + 2.0) / 2
        assert torch.equal(dense[:, 0], torch.tensor([first, first + second, second, 0, 0]))


def _average_gradients(rank: int) -> None:
    _averaged(rank)
    _weighted_and_accumulated(rank)
    _chosen_and_missing(rank)
    _sparse(rank)


def test_gradients_that_no_backward_brought_are_averaged_when_asked(ranks: Ranks) -> None:
    ranks(2, _average_gradients)


# ---- what is noticed when it was forgotten --------------------------------------------------------------------------


def _forgotten(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    state = replicate.state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]

    _assign(model, _surgery(model, rank))
    message = rf"SGD is about to step parameter '0.weight' on rank {rank}, in its step 1, .*it was assigned"
    with pytest.raises(ReplicateError, match=message):
        optimizer.step()
    assert_same(list(model.parameters()), before, rtol=0, atol=0)  # nothing was lost
    state.average_gradients()
    optimizer.step()
    assert_ranks_equal(list(model.parameters()))

    for step in range(2):  # in later steps as well
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        _assign(model, _surgery(model, rank))
        with pytest.raises(ReplicateError, match="it was assigned"):
            optimizer.step()
        optimizer.zero_grad()
        with state.no_sync():
            _loss(model, rank).backward()
        with pytest.raises(ReplicateError, match=r"it came from a backward that no round closed"):
            optimizer.step()
        state.average_gradients()
        optimizer.step()
    assert_ranks_equal(list(model.parameters()))

    # shared layers by surgery, the head by an ordinary backward whose round says nothing of them
    optimizer.zero_grad()
    body = model(data(rank, 9, 3, 4)).detach()
    (body * model[2].bias).sum().backward()
    model[0].weight.grad = torch.full_like(model[0].weight, rank + 1.0)
    with pytest.raises(ReplicateError, match=r"'0.weight' .*it was assigned"):
        optimizer.step()
    state.average_gradients([model[0].weight])
    optimizer.step()
    assert_ranks_equal(list(model.parameters()))

    # a closure that forgets
    optimizer.zero_grad()
    with pytest.raises(ReplicateError, match="it was assigned"):
        optimizer.step(lambda: _assign(model, _surgery(model, rank)))  # type: ignore[arg-type]
    assert_ranks_equal(list(model.parameters()))


def _said_otherwise(rank: int) -> None:
    for choice in ("warn", "allow"):
        model = mlp(4, 5, 2)
        replicate(model, unaveraged_gradients=choice)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _assign(model, [torch.full_like(param, rank + 1.0) for param in model.parameters()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = model[0].weight.detach().clone()
            optimizer.step()
        expected = ["SGD is about to step parameter '0.weight'"] if choice == "warn" else []
        assert [str(warning.message)[:41] for warning in caught] == expected
        torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * (rank + 1))
    with pytest.raises(ValueError, match="`unaveraged_gradients` must be one of error, warn, allow, got 'never'"):
        replicate(mlp(4, 2), unaveraged_gradients="never")  # type: ignore[arg-type]


def _no_false_alarm(rank: int) -> None:
    model = Branches()
    replicate(model)
    params = list(model.parameters())
    state = replicate.state(model)
    first = torch.optim.Adam([*model.trunk.parameters(), *model.left.parameters(), *model.idle.parameters()])
    second = torch.optim.SGD([*model.head.parameters(), *model.right.parameters()], lr=0.1, momentum=0.9)

    def backward(step: int, *branches: str) -> None:
        model(data(rank, step, 3, 4), *branches).pow(2).mean().backward()

    def both(step: int) -> None:
        first.step()
        second.step()
        assert_ranks_equal(params)

    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: nn.utils.clip_grad_norm_(params, 0.01),
        lambda: _assign(model, [None if p.grad is None else p.grad.clamp(-1e-3, 1e-3) for p in params]),  # on purpose
        lambda: [p.grad.mul_(0.5) for p in params if p.grad is not None],  # unscaling
        lambda: model.trunk.requires_grad_(False),  # frozen between the round and the step
        lambda: model.trunk.requires_grad_(True),
    ]
    for step, change in enumerate(changes * 2):
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(step, "left" if rank == 0 or step % 3 else "right")
        change()
        both(step)
        if step % 4 == 3:  # again, without a new gradient
            both(step)
    # two backwards that take turns, as those of a game, and both steps at the end
    for step in range(3):
        model.zero_grad()
        backward(step, "left")
        for param in model.left.parameters():
            assert param.grad is not None
            param.grad = param.grad.clone()
        backward(step, "right")
        both(step)
    # accumulated, with the round in the last backward; the layer that is idle has left the layout by now
    for step in range(40):
        model.zero_grad()
        with state.no_sync():
            backward(step, "right")
        backward(step + 1, "left")
        both(step)
    assert state.plan().idle == ("idle.weight", "idle.bias")
    # the step of an optimizer that has nothing of ours, while gradients are on their way
    other = nn.Linear(2, 2)
    with state.no_sync():
        backward(1)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def _no_false_alarm_for_zeros(rank: int) -> None:
    """Zeros in place of None, and gradients that are zeroed in place and replaced, for layers that come and go."""
    for steps, used_in in ((3, lambda step: False), (6, lambda step: step % 2 == 0), (45, lambda step: step < 5)):
        model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=False)
            loss = model[0](data(rank, step, 2, 3)).mean()
            if used_in(step):
                loss = loss + model[1](data(rank, step, 2, 3)).mean()
            loss.backward()
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad.clamp(-1, 1)
            optimizer.step()
        assert_ranks_equal(list(model.parameters()))


def _noticed(rank: int) -> None:
    _no_false_alarm_for_zeros(rank)
    _forgotten(rank)
    _said_otherwise(rank)
    _no_false_alarm(rank)


def test_a_step_with_gradients_that_nobody_averaged_is_an_error(ranks: Ranks) -> None:
    ranks(2, _noticed)


def _leaves_nothing(rank: int) -> None:
    from torch.optim import optimizer as torch_optimizer

    def hooks() -> int:
        return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)  # type: ignore[attr-defined]

    stepping.watch_optimizers(on=False)  # models of other cases may be there that nobody took off
    before = hooks()
    models = [replicate(mlp(4, 2)), replicate(mlp(4, 2))]
    assert hooks() == before + 2
    for model in models:
        assert hooks() == before + 2
        replicate.state(model).remove()
    assert hooks() == before and not stepping._handles


def test_no_hook_is_left_on_optimizers(ranks: Ranks) -> None:
    ranks(2, _leaves_nothing)


# ---- optimizers that look at the loss -------------------------------------------------------------------------------


def _lbfgs(rank: int) -> None:
    for search in ("strong_wolfe", None):
        for average in ("participants", "sum", "weighted"):
            model, alone = mlp(4, 5, 2), mlp(4, 5, 2)
            replicate(model, average=average)  # type: ignore[arg-type]
            state = replicate.state(model)
            sizes = [3, 6] if average == "weighted" else [4, 4]
            if average == "weighted":
                state.set_weight(sizes[rank])
            batches = [data(r, 0, size, 4) for r, size in enumerate(sizes)]

            def train(net: nn.Module, losses: Callable[[], Tensor], search: Any = search) -> tuple[int, Any]:
                optimizer = torch.optim.LBFGS(net.parameters(), max_iter=6, line_search_fn=search)
                calls = 0

                def closure() -> Tensor:
                    nonlocal calls
                    calls += 1
                    optimizer.zero_grad()
                    loss = losses()
                    loss.backward()
                    return loss

                for _ in range(3):
                    returned = optimizer.step(closure)
                return calls, returned

            def own(model: nn.Module = model, batches: Any = batches) -> Tensor:
                return (model(batches[rank]) - 1).pow(2).mean()

            def whole(alone: nn.Module = alone, batches: Any = batches, average: str = average) -> Tensor:
                loss = (alone(torch.cat(batches)) - 1).pow(2).mean()
                return loss * WORLD if average == "sum" else loss

            calls, returned = train(model, own)
            expected, _ = train(alone, whole)
            assert calls == expected, (search, average)
            assert_same(list(model.parameters()), list(alone.parameters()), rtol=1e-3, atol=1e-4)
            assert_ranks_equal(list(model.parameters()))
            if rank == 0:  # after the step, looking at the loss is nobody else's business
                assert returned.item() > 0


def test_pytorch_30439_a_line_search_decides_by_the_average_loss(ranks: Ranks) -> None:
    ranks(2, _lbfgs)


class _StepByLoss(torch.optim.Optimizer):
    """Steps as far as the loss tells (Polyak's step size, arXiv 2002.10542), which it reads in ``read``'s way."""

    def __init__(self, params: Any, read: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {})
        self.read = read

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        size = self.read(loss) / sum(param.grad.pow(2).sum() for param in params)
        with torch.no_grad():
            for param in params:
                param.sub_(size * param.grad)
        return loss


def _polyak(rank: int) -> None:
    reads: list[Callable[[Tensor], Any]] = [
        float,
        Tensor.item,
        lambda loss: loss,
        lambda loss: torch.stack([loss]).sum(),
    ]
    for read in reads:
        model, alone = mlp(4, 5, 2), mlp(4, 5, 2)
        replicate(model)
        optimizer = _StepByLoss(model.parameters(), read)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                model.zero_grad()
                loss = _loss(model, rank, step)
                loss.backward()
                return loss.detach()

            optimizer.step(closure)
            losses = [_loss(alone, r, step) for r in range(WORLD)]
            params = list(alone.parameters())
            gradient = torch.autograd.grad(sum(losses) / WORLD, params)  # type: ignore[arg-type]
            size = (sum(losses) / WORLD).detach() / sum(g.pow(2).sum() for g in gradient)  # type: ignore[union-attr]
            with torch.no_grad():
                for param, g in zip(params, gradient, strict=True):
                    param -= size * g
        assert_same(list(model.parameters()), list(alone.parameters()), rtol=1e-4, atol=1e-6)
        assert_ranks_equal(list(model.parameters()))


def test_an_optimizer_that_steps_by_the_loss_gets_the_average(ranks: Ranks) -> None:
    ranks(2, _polyak)


def _hands_through(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    optimizer = torch.optim.Adam(model.parameters())
    sent: list[Any] = []
    original = dist.all_reduce
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, rank, step)
            loss.backward()
            losses.append(loss.item())
            return loss

        def counted(*args: Any, **kwargs: Any) -> Any:
            sent.append(args)
            return original(*args, **kwargs)

        if step == 2:
            dist.all_reduce = counted  # type: ignore[assignment]
        try:
            returned = optimizer.step(closure)  # type: ignore[arg-type]
        finally:
            dist.all_reduce = original
    assert len(sent) == 1  # the bucket: an optimizer that does not look at the loss costs no message
    assert float(returned) == losses[-1]  # this rank's


def _looked_at_elsewhere(rank: int) -> None:
    """A loss is this rank's own business before and after its step, also where the step failed."""
    model = nn.Linear(3, 1, bias=False)
    replicate(model)
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this part of torch uses what torch itself deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizers.append(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))  # all is rank 0's
    for optimizer in optimizers:
        losses: list[Any] = []

        def closure(fails: bool = False, losses: Any = losses) -> Tensor:
            if rank == 0 and losses:
                assert float(losses[-1]) > 0  # of the step before
            if fails:
                raise MemoryError
            model.zero_grad()
            loss = model(data(rank, 0, 2, 3)).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            losses.append(optimizer.step(closure))
        with pytest.raises(MemoryError):
            optimizer.step(lambda: closure(True))
        if rank == 0:
            assert float(losses[-1]) > 0
        assert_ranks_equal(list(model.parameters()))


def test_losses_of_other_steps(ranks: Ranks) -> None:
    ranks(2, _looked_at_elsewhere)


def test_an_optimizer_that_does_not_look_costs_no_message(ranks: Ranks) -> None:
    ranks(2, _hands_through)
