"""Runs a function on N gloo ranks, for tests.

``Ranks`` keeps one set of processes for each world size and reuses it for case after case; every case gets a fresh
default process group. A case that raises on any rank fails in the test with the remote traceback; one that hangs fails
after a time-out, and its processes are killed and started anew for the next case.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.known_warnings import KNOWN_WARNINGS

COLLECTIVE_TIMEOUT = timedelta(seconds=20)
CASE_TIMEOUT = 90.0  # seconds
GRACE_AFTER_FAILURE = 3.0  # seconds in which the other ranks may report, too


class RankFailedError(AssertionError):
    """A case failed on some rank; the message holds the remote tracebacks."""


def _worker(rank: int, world_size: int, store_dir: str, port: int, pipe: Connection) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # torchrun's variables would make Lightning believe in an elastic launch
    del os.environ["RANK"]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for action, message, category in KNOWN_WARNINGS:
        warnings.filterwarnings(action, message, category)
    while True:
        try:
            number, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            store = dist.FileStore(os.path.join(store_dir, str(number)), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
            torch.manual_seed(1000 + rank)  # different on each rank unless a case says otherwise
            random.seed(1000 + rank)
            result: Any = (True, function(rank, *args, **kwargs))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send((number, *result))
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # cycles hold process groups of the case, and each of those polls with a thread
        gc.freeze()  # what is left was imported, and need not be looked at after the next case


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = tempfile.TemporaryDirectory(prefix="ranks")
        self._number = 0
        self.pipes: list[Connection] = []
        self._processes = []
        port = random.SystemRandom().randrange(20000, 60000)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, world_size, self._store.name, port, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        self._number += 1
        for pipe in self.pipes:
            pipe.send((self._number, function, args, kwargs))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting:
                    failures.setdefault(rank, f"did not finish within {timeout:.0f} s")
                break
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                del waiting[rank]
                try:
                    _, ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        if failures:
            raise RankFailedError("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(len(self.pipes))]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._store.cleanup()


class Ranks:
    """``ranks(2, case, *args)`` runs ``case(rank, *args)`` on two ranks and returns both results."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = CASE_TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        if world_size not in self._pools:
            self._pools[world_size] = _Pool(world_size)
        try:
            return self._pools[world_size].run(function, args, kwargs, timeout)
        except BaseException:
            self._pools.pop(world_size).stop()
            raise

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools.clear()
