"""The entry point: what it accepts, what it refuses, and who owns a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_replicate import ReplicateError, replicate
from lightning_replicate.core.api import Options
from tests.core.helpers import Branches, assert_ranks_equal, assert_same, data, grads, local_grads, mean_of, mlp, seeded
from tests.ranks import Ranks

WORLD = 2


def _train(model: nn.Module, rank: int, width: int = 4, steps: int = 2) -> None:
    """Each step's gradients equal the mean by hand."""
    params = [param for param in model.parameters() if param.requires_grad]
    for step in range(steps):
        model.zero_grad()
        expected = mean_of([local_grads(model(data(r, step, 3, width)).pow(2).sum(), params) for r in range(WORLD)])
        model(data(rank, step, 3, width)).pow(2).sum().backward()
        assert_same(grads(params), expected)
        assert_ranks_equal([param.grad for param in params])


# ---- set-up ---------------------------------------------------------------------------------------------------------


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.register_buffer("count", torch.randint(1000, (2,)))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]


def _first_values(rank: int) -> None:
    model = seeded(_WithBuffers, rank)
    rank_0 = seeded(_WithBuffers, 0)
    replicate(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert_same(tensors, [*rank_0.parameters(), *rank_0.buffers()], rtol=0, atol=0)
    assert_ranks_equal(tensors)

    other = seeded(lambda: nn.Linear(3, 3), rank)
    mine = other.weight.detach().clone()
    replicate(other, broadcast=False)
    assert torch.equal(other.weight, mine)


def test_d7_d8_r63_rank_0_values_win(ranks: Ranks) -> None:
    ranks(2, _first_values)


def _mismatch(rank: int, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3))
    options: dict[str, Any] = {}
    if rank == 1:
        if kind == "shape":
            model[0] = nn.Linear(4, 5)
        elif kind == "dtype":
            model[1].double()
        elif kind == "stride":
            model[1].to(memory_format=torch.channels_last)
        elif kind == "requires_grad":
            model[1].bias.requires_grad_(False)
        elif kind == "fewer":
            del model[1]
        elif kind == "more":
            model.append(nn.Linear(1, 1))
        elif kind == "name":
            model = nn.Sequential()
            model.add_module("other", nn.Linear(4, 4))
            model.add_module("1", nn.Conv2d(2, 2, 3))
        elif kind == "buffer":
            model[1].register_buffer("extra", torch.ones(3))
        elif kind == "ignored":
            options["ignored_modules"] = [model[1]]
        else:
            options["bucket_cap_mb"] = 3.0
    expected = {
        "shape": r"'0.weight' differs between ranks in its shape: \(4, 4\) on rank 0, \(5, 4\) on rank 1",
        "dtype": r"'1.weight' differs between ranks in its dtype: torch.float32 on rank 0, torch.float64 on rank 1",
        "stride": r"'1.weight' differs between ranks in its stride",
        "requires_grad": r"'1.bias' differs between ranks in its requires_grad: True on rank 0, False on rank 1",
        "fewer": r"Rank 0 has 4 parameters, rank 1 has 2; the first that only rank 0 has is '1.weight'",
        "more": r"Rank 0 has 4 parameters, rank 1 has 6; the first that only rank 1 has is '2.weight'",
        "name": r"where rank 0 has '0.weight', rank 1 has 'other.weight'",
        "buffer": r"Rank 0 has 0 buffers, rank 1 has 1; the first that only rank 1 has is '1.extra'",
        "ignored": r"Rank 0 has 4 parameters, rank 1 has 2",
        "option": r"called differently: rank 0 with bucket_cap_mb=25.0.*rank 1 with bucket_cap_mb=3.0",
    }[kind]
    values = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ReplicateError, match=expected):  # on every rank
        replicate(model, **options)
    assert_same(list(model.parameters()), values, rtol=0, atol=0)  # nothing that the user had is lost
    assert not model._forward_pre_hooks
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())  # type: ignore[attr-defined]
    fine = replicate(mlp(4, 5, 2))
    _train(fine, rank)


_KINDS = ("shape", "dtype", "stride", "requires_grad", "fewer", "more", "name", "buffer", "ignored", "option")


def _mismatches(rank: int) -> None:
    for kind in _KINDS:
        _mismatch(rank, kind)


def test_r63_t45_d9_d10_the_first_difference_is_named_on_every_rank(ranks: Ranks) -> None:
    ranks(2, _mismatches)


def _bad_arguments(rank: int) -> None:
    model = mlp(4, 5, 2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "at least one module", lambda: replicate()),
        (TypeError, "takes modules, got list", lambda: replicate([model])),
        (TypeError, "`ignored_modules` takes modules, got str", lambda: replicate(model, ignored_modules=["0"])),
        (TypeError, "`ignored_params` takes parameters, got str", lambda: replicate(model, ignored_params=["w"])),
        (ValueError, "`bucket_cap_mb` must be a positive", lambda: replicate(model, bucket_cap_mb=0)),
        (ValueError, "`average` must be one of", lambda: replicate(model, average="median")),
        (ValueError, "`reduce_dtype` must be a floating", lambda: replicate(model, reduce_dtype=torch.int32)),
        (ValueError, "`buffers` must be one of", lambda: replicate(model, buffers="never")),
        (TypeError, "`comm_hook` must be callable", lambda: replicate(model, comm_hook=3)),
        (
            ValueError,
            "either `comm_hook` or `reduce_dtype`",
            lambda: replicate(model, comm_hook=print, reduce_dtype=torch.float16),
        ),
        (ValueError, "divides by the world size", lambda: replicate(model, comm_hook=print, average="sum")),
        (
            ValueError,
            "either `mesh` or `process_group`",
            lambda: replicate(model, mesh=mesh["a"], process_group=dist.group.WORLD),
        ),
        (ValueError, "must have one dimension", lambda: replicate(model, mesh=mesh)),
        (ValueError, "'weight' is on the meta device", lambda: replicate(nn.Linear(2, 2, device="meta"))),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    replicate(model)
    with pytest.raises(ValueError, match=r"already applied.*remove"):
        replicate(model)
    with pytest.raises(ValueError, match="average='weighted'"):
        replicate.state(model).set_weight(2)
    _train(model, rank)


def test_d2_d5_k4_bad_arguments_get_a_clear_error(ranks: Ranks) -> None:
    ranks(2, _bad_arguments)


def _registry(rank: int) -> None:
    from torch.distributed._composable.contract import _get_registry

    model = mlp(4, 5, 2)
    names = [list(model.state_dict()), [n for n, _ in model.named_modules()], [n for n, _ in model.named_buffers()]]
    replicate(model)
    assert list(_get_registry(model) or ()) == ["replicate"]
    assert all(_get_registry(child) is None for child in model)
    after = [list(model.state_dict()), [n for n, _ in model.named_modules()], [n for n, _ in model.named_buffers()]]
    assert after == names
    replicate.state(model).remove()
    assert _get_registry(model) is None


def test_k1_k2_k4_torchs_registry_of_composable_functions(ranks: Ranks) -> None:
    ranks(2, _registry)


def test_d55_default_bucket_sizes() -> None:
    mib = 1024 * 1024
    assert Options().bucket_caps == (mib, 25 * mib)
    assert Options(bucket_cap_mb=0.5).bucket_caps == (mib // 2, mib // 2)
    assert Options(bucket_cap_mb=1e-9).bucket_caps == (1, 1)


def _zero_features(rank: int) -> None:
    model = replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0)))
    model(data(rank, 0, 3, 4)).sum().backward()
    assert_ranks_equal([param.grad for param in model.parameters()])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_d4_zero_output_features(ranks: Ranks) -> None:
    ranks(2, _quiet_zero_features)


def _quiet_zero_features(rank: int) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op")
        _zero_features(rank)


def test_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        replicate(model)
    monkeypatch.delenv("WORLD_SIZE")
    replicate(model)  # a process on its own: one that loads a checkpoint, say
    state = replicate.state(model)
    assert (state.active, state.world_size) == (False, 1)
    assert not model.weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    model(torch.ones(1, 2)).sum().backward()
    with state.no_sync(), state.round():
        pass
    assert state.plan().buckets == () and state.last_round is None
    replicate(model)  # and may be marked again where there are other processes
    replicate.state(model).remove()
    assert not model.__dict__.keys() - nn.Linear(2, 2).__dict__.keys()


def _alone(rank: int) -> None:
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    model = replicate(mlp(4, 5, 2, seed=rank), process_group=group)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())  # type: ignore[attr-defined]
    model(data(rank, 0, 3, 4)).sum().backward()
    assert replicate.state(model).closed_rounds == 0
    if rank == 0:
        with pytest.raises(ValueError, match="not a member"):
            replicate(mlp(2, 2), process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_one_rank_has_no_hooks(ranks: Ranks) -> None:
    ranks(2, _alone)


# ---- several modules, several calls ---------------------------------------------------------------------------------


def _several_modules(rank: int) -> None:
    model = seeded(Branches, 0)
    given = (model.trunk, model.left, model.head)
    assert replicate(*given) == given
    states = {id(replicate.state(module)) for module in given}
    assert len(states) == 1  # one state and one set of buckets
    plan = replicate.state(model.trunk).plan()
    assert len(plan.buckets) == 1
    assert set(plan.parameters) == {f"[{i}].{name}" for i in range(3) for name in ("weight", "bias")}
    params = [param for module in given for param in module.parameters()]
    loss = lambda r: model(data(r, 0, 3, 4), "left", "right").sum()
    expected = mean_of([local_grads(loss(r), params) for r in range(WORLD)])
    own = local_grads(loss(rank), list(model.right.parameters()))
    loss(rank).backward()
    assert_same(grads(params), expected)
    assert_same(grads(list(model.right.parameters())), own)  # nobody replicated this one
    replicate.state(model.left).remove()
    with pytest.raises(ValueError, match="was not applied"):
        replicate.state(model.head)


def test_k5_several_modules_share_buckets(ranks: Ranks) -> None:
    ranks(2, _several_modules)


def _nested(rank: int) -> None:
    for order in ("child first", "parent first", "child and its parent in one call"):
        model = mlp(4, 5, 5, 2)
        if order == "child first":
            replicate(model[2])
            replicate(model)
        elif order == "parent first":
            replicate(model)
            replicate(model[2])
        else:
            replicate(model[2], model)
        if order != "child and its parent in one call":
            assert set(replicate.state(model[2]).plan().parameters) == {"weight", "bias"}
            assert set(replicate.state(model).plan().parameters) == {
                f"{i}.{name}" for i in (0, 4) for name in ("weight", "bias")
            }
        assert_ranks_equal(list(model.parameters()))
        _train(model, rank, steps=3)


def test_r49c_a_parameter_belongs_to_the_innermost_call(ranks: Ranks) -> None:
    ranks(2, _nested)


def _failing_takeover(rank: int) -> None:
    model = mlp(4, 5, 2)
    replicate(model)
    if rank == 1:
        model[2].bias.requires_grad_(False)
    with pytest.raises(ReplicateError, match="requires_grad"):
        replicate(model[2])
    model[2].bias.requires_grad_(True)
    _train(model, rank, steps=3)  # the parent still has it


def test_a_failed_call_takes_nothing_from_the_parent(ranks: Ranks) -> None:
    ranks(2, _failing_takeover)


def _tied(rank: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
            self.out.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.embed(x)))

    whole = replicate(Tied())
    assert len(replicate.state(whole).plan().parameters) == 3
    _train(whole, rank, steps=3)
    apart = Tied()
    replicate(apart.embed)
    replicate(apart.out)  # the shared weight stays with the first call
    assert replicate.state(apart.out).plan().parameters == ("bias",)
    _train(apart, rank, steps=3)


def test_d41_d59_tied_weights_are_reduced_once(ranks: Ranks) -> None:
    ranks(2, _tied)


def _ignored(rank: int) -> None:
    model = seeded(Branches, rank)
    mine = [param.detach().clone() for param in model.left.parameters()]
    replicate(model, ignored_modules=[model.left], ignored_params=[model.head.bias])
    assert_same(list(model.left.parameters()), mine, rtol=0, atol=0)
    names = set(replicate.state(model).plan().parameters)
    assert not names & {"left.weight", "left.bias", "head.bias"} and "head.weight" in names
    loss = model(data(rank, 0, 3, 4), "left").sum()
    own = local_grads(loss, [*model.left.parameters(), model.head.bias])
    loss = model(data(rank, 0, 3, 4), "left").sum()
    loss.backward()
    assert_same(grads([*model.left.parameters(), model.head.bias]), own)
    assert_ranks_equal([param.grad for param in model.trunk.parameters()])


def test_r6_d11_d12_ignored_modules_and_parameters(ranks: Ranks) -> None:
    ranks(2, _ignored)


# ---- beside fully_shard ---------------------------------------------------------------------------------------------


def _beside_fully_shard(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    reference = mlp(4, 8, 8, 2)

    def expected(step: int) -> list[Any]:
        params = list(reference.parameters())
        return mean_of([local_grads(reference(data(r, step, 3, 4)).pow(2).sum(), params) for r in range(WORLD)])

    def child_replicated() -> nn.Module:
        model = mlp(4, 8, 8, 2)
        replicate(model[4])
        fully_shard(model, mesh=mesh)
        return model

    def child_sharded() -> nn.Module:
        model = mlp(4, 8, 8, 2)
        fully_shard(model[0], mesh=mesh)
        replicate(model)
        return model

    for make in (child_replicated, child_sharded):
        model = make()
        kinds = [isinstance(param, DTensor) for param in model.parameters()]
        assert any(kinds) and not all(kinds)
        for step in range(3):
            model.zero_grad()
            model(data(rank, step, 3, 4)).pow(2).sum().backward()
            full = [
                param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                for param in model.parameters()
            ]
            assert_same(full, expected(step))
    assert all(not isinstance(param, DTensor) for param in model[2].parameters())


def test_k6_r49_t26_t32_one_of_them_in_the_other(ranks: Ranks) -> None:
    ranks(2, _beside_fully_shard)


def _refused_beside_fully_shard(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = mlp(4, 8, 2)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="already sharded by `fully_shard`"):
        replicate(model)
    with pytest.raises(ValueError, match=r"'weight' is a DTensor.*before `fully_shard`"):
        replicate(model[0])
    model = mlp(4, 8, 2)
    replicate(model)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="both applied to the same module"):
        model(data(rank, 0, 3, 4))


def test_t32_r50_c5_the_same_module_in_both_is_an_error(ranks: Ranks) -> None:
    ranks(2, _refused_beside_fully_shard)


def _mesh_of_one_dimension(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    model = replicate(mlp(4, 5, 2, seed=rank), mesh=mesh["replicate"])
    _train(model, rank, steps=3)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    handed_over = replicate(mlp(4, 5, 2), process_group=dist.new_group([0, 1]))
    _train(handed_over, rank)


def test_r48_t27_a_mesh_of_one_dimension(ranks: Ranks) -> None:
    ranks(2, _mesh_of_one_dimension)
