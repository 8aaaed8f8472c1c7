"""What a rank tells of its failure, and what others say of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_replicate import replicate
from lightning_replicate.core import failures
from lightning_replicate.core.api import ReplicateError

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
ADVICE = " This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            f"{GLOO}Connection closed by peer [127.0.0.1]:28300.{ADVICE} an error. GLHF! ",
            "Connection closed by peer [127.0.0.1]:28300",
        ),
        (
            f"{GLOO}Timed out waiting 1000ms for recv operation to complete",
            "Timed out waiting 1000ms for recv operation to complete",
        ),
        ("shapes differ\nand so on", "shapes differ"),
        ("", "RuntimeError"),
    ],
)
def test_backends_errors_in_short(text: str, short: str) -> None:
    assert failures.in_short(RuntimeError(text)) == short


def test_without_process_groups_nothing_is_told() -> None:
    assert not dist.is_initialized()
    failures.note_failure(ValueError("alone"))
    assert failures.first_failure() is None


def test_an_error_that_has_nothing_to_do_with_other_ranks_is_not_blamed_on_them() -> None:
    error = failures.consequence("no bucket", RuntimeError("a hook of the user's failed"))
    assert str(error) == "no bucket: a hook of the user's failed" and not error.from_another_rank


def _tell(rank: int) -> None:
    assert failures.first_failure() is None
    dist.barrier()
    if rank == 1:
        failures.note_failure(ValueError("first\n  of " + "many " * 100))
    dist.barrier()
    if rank == 0:
        failures.note_failure(ValueError("second"))
    dist.barrier()
    told = failures.first_failure()
    assert told is not None and told.startswith("rank 1 failed: ValueError: first of many") and len(told) < 350
    failures.forget_failures()
    assert failures.first_failure() is None
    dist.barrier()
    if rank == 0:  # noticed that another rank is gone, which is not why
        failures.note_failure(RuntimeError(f"{GLOO}Connection closed by peer"))
        failures.note_failure(failures.consequence("no bucket", RuntimeError(f"{GLOO}Connection closed by peer")))
    dist.barrier()
    assert failures.first_failure() is None


def test_the_first_failure_is_told(ranks: Any) -> None:
    ranks(2, _tell)


class _SilentStore:
    """The store of a host that is gone: it neither answers nor refuses."""

    def check(self, keys: list[str]) -> bool:
        return dist.HashStore().wait(["never"], timedelta(seconds=5)) is not None

    def compare_set(self, *_: str) -> bytes:
        raise RuntimeError("Broken pipe")


def _store_is_gone(rank: int) -> None:
    original, failures._private.default_store = failures._private.default_store, _SilentStore
    try:
        failures.note_failure(ValueError("nobody hears it"))
        assert failures.first_failure() is None
    finally:
        failures._private.default_store = original


def test_a_store_that_is_gone_replaces_no_error(ranks: Any) -> None:
    ranks(2, _store_is_gone)


def _fail_in_a_round(rank: int, tells: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    replicate(model, process_group=dist.new_group(timeout=timedelta(seconds=3)))
    model(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        if tells:
            failures.note_failure(ValueError("batch 7 is no good"))
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(ReplicateError) as caught:
        model(torch.ones(1, 4)).sum().backward()
    text = str(caught.value)
    assert text.startswith("Rank 0 could not finish bucket 0 (") and " in round 2, because " in text
    assert ("because rank 1 failed: ValueError: batch 7 is no good. (" in text) == tells
    assert ("Look for that rank's own error" in text) != tells
    assert "/gloo/" not in text and "typically" not in text and "GLHF" not in text
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


@pytest.mark.parametrize("tells", [True, False])
def test_who_failed_is_quoted_where_a_round_ends(tells: bool, ranks: Any) -> None:
    ranks(2, _fail_in_a_round, tells)
