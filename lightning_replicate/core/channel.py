"""All groups that reduce over one process group: one queue, one order, one round at a time.

Two groups that ran in a different order on two ranks would pair the wrong collectives, so every group of a process
group shares one queue. A backward that touched only some groups must not move the bytes of the others: at its end ranks
agree on the groups that were touched on any of them, with a tiny message on a CPU group. With one group there is
no message.

The order of groups within a round may change from round to round, as long as it is the same on all ranks. It follows
what ranks agreed on before: the groups that were touched last time after the same set come first, so that in a game of
two optimizers each step's own group leaves early.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_replicate import _private
from lightning_replicate.core import agreement
from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.bucket import NEVER

if TYPE_CHECKING:
    from lightning_replicate.core.bucket import Bucket
    from lightning_replicate.core.reducer import Reducer
    from lightning_replicate.core.sparse import SparseBucket

# By id of the process group, which a channel keeps. Channels end by remove(), or with their process group, and never by
# garbage collection: ranks collect at different times, and would disagree whether there is one to be made.
_channels: dict[int, Channel] = {}


class Channel:
    """The queue of one process group.

    Args:
        process_group: The ranks that average together.

    Attributes:
        gradients: A process group of the same ranks that carries gradients only, so that a stray collective of the
            user cannot pair with a bucket.
        control: A CPU process group of the same ranks for small messages.
        task: The graph task whose gradients are arriving, or ``None``.
        nested: Whether that task runs inside another one.
        closed_rounds: How many rounds were closed.
        hook_buckets: Numbers under which communication hooks know buckets, by group and parameters.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        self.process_group = process_group  # kept, so that its id stays ours
        # a subgroup's ranks are the only ones that get here; the others must not be waited for
        alone = len(ranks) < dist.get_world_size()
        timeout = _private.process_group_timeout(process_group)
        self.gradients, self.control = (
            dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=alone)
            for backend in (dist.get_backend(process_group), "gloo")
        )
        self.rank = dist.get_rank()
        self.task: int | None = None
        self.nested = False
        self.closed_rounds = 0
        self.hook_buckets: dict[tuple[str, ...], int] = {}
        self._root: int | None = None
        self._is_open = False
        self._taking_part: list[Reducer] = []
        self._void = False
        self._counted: int | None = None
        self._given_up = False  # the last round was given up, by another rank
        self._reducers: dict[int, weakref.ref[Reducer]] = {}
        self._made = 0
        self._queue: list[tuple[Reducer, Bucket | SparseBucket]] = []
        self._cursor = 0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._touched: frozenset[int] = frozenset()
        self._followed_by: dict[frozenset[int], frozenset[int]] = {}

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Channel:
        """The channel of a process group. Collective when it is made."""
        for key, other in list(_channels.items()):
            if not other._is_alive():
                del _channels[key]
        channel = _channels.get(id(process_group))
        if channel is None:
            channel = _channels[id(process_group)] = cls(process_group)
        return channel

    def _is_alive(self) -> bool:
        """Whether the process group was not destroyed."""
        try:
            dist.get_process_group_ranks(self.process_group)
        except (KeyError, RuntimeError, ValueError):
            return False
        return True

    # ---- groups -----------------------------------------------------------------------------------------------

    def add(self, reducer: Reducer) -> int:
        """Adds a group and returns its number, which is never used again."""
        number = self._made
        self._made += 1
        self._reducers[number] = weakref.ref(reducer)
        return number

    def remove(self, reducer: Reducer) -> None:
        """Takes a group out. The last one frees the process groups."""
        self._reducers.pop(reducer.index, None)
        self._touched = frozenset()
        self._followed_by.clear()
        if not self._reducers:
            _channels.pop(id(self.process_group), None)
            if dist.is_initialized() and self._is_alive():
                for group in (self.gradients, self.control):
                    dist.destroy_process_group(group)

    def owners(self) -> list[Any]:
        """Whoever made the groups, each once."""
        return list({id(reducer.owner): reducer.owner for reducer in self._live()}.values())

    def _live(self) -> list[Reducer]:
        """The groups in this round's order."""
        likely = self._followed_by.get(self._touched, frozenset())
        numbers = sorted(self._reducers, key=lambda number: (number not in likely, number))
        found = (self._reducers[number]() for number in numbers)
        return [reducer for reducer in found if reducer is not None]

    # ---- while backward runs ----------------------------------------------------------------------------------

    def enter(self, task: int) -> None:
        """A gradient arrived from another graph task than the last one.

        Raises:
            ReplicateError: If the round of an earlier backward is still open, because that backward raised.
        """
        node = _private.enclosing_node()
        self.task = task
        self.nested = node is not None
        if node is not None:
            self._await_outer_task(node)
            return
        if self._root is not None and self._root != task:
            self.task = None
            raise ReplicateError(
                f"A backward on rank {self.rank} did not finish, so its gradients were not averaged. After an"
                f" exception in backward call `replicate.state(module).reset()` before the next one."
            )
        if self._counted != task:
            self._counted = task
            for reducer in self._live():
                reducer.note_backward()
        if self._root is None and self._open():
            self._root = task
            _private.queue_backward_callback(self._end_of_backward)

    def _await_outer_task(self, node: torch.autograd.graph.Node) -> None:
        """Gets called again from the task that surrounds this one: the end of that one closes the round.

        The only code that certainly runs in the surrounding task is its next nodes'.
        """

        def enter(*_: object) -> None:
            task = _private.current_graph_task_id()
            if self.task != task:
                self.enter(task)

        for following, _ in node.next_functions:
            if following is not None:
                self._handles.append(following.register_prehook(enter))

    def _open(self, *, took_part: bool = False, abort: bool = False) -> bool:
        """Opens a round unless no group wants one.

        Args:
            took_part: Whether to count a backward of this rank that reached none of the groups.
            abort: Whether this rank gives the round up.
        """
        reducers = self._live()
        # a dropped model's groups are gone on one rank and still there on another, where they want rounds
        dropped = len(reducers) < len(self._reducers)
        if not dropped and not any(reducer.requires_sync for reducer in reducers):
            return False
        self._given_up = False
        self._is_open = True
        for reducer in reducers:
            if took_part:
                reducer.note_backward()
            reducer.begin(abort=abort)
        if not self._needs_message():  # else a message at the end says who gave up
            reducers[0].hold_last()
        self._queue = [(reducer, bucket) for reducer in reducers if reducer.requires_sync for bucket in reducer.buckets]
        self._cursor = 0
        return True

    def _needs_message(self) -> bool:
        """Whether ranks must tell each other which groups they touched: there are several."""
        return len(self._reducers) > 1 or sum(bool(channel._reducers) for channel in _channels.values()) > 1

    def advance(self) -> None:
        """Launches the buckets that are complete and whose turn it is."""
        while self._cursor < len(self._queue):
            reducer, bucket = self._queue[self._cursor]
            if bucket.missing != 0:
                return
            reducer.launch(bucket, early=True)
            self._cursor += 1

    # ---- the end of the round ---------------------------------------------------------------------------------

    def _end_of_backward(self) -> None:
        node = _private.evaluating_node()
        if node is not None:  # nested after all, seen too late to keep early buckets back
            self._root = None
            self._is_open = False
            self.nested = True
            for reducer in self._live():
                reducer.note_nested()
            self._await_outer_task(node)
        elif self._is_open:  # else another channel's callback has closed this one, too
            _close_all()

    def send_rest(self, *, abort: bool = False) -> None:
        """First half of closing a round: agrees on the groups that take part, and sends what has not left.

        Args:
            abort: Whether this rank gives the round up.
        """
        self._taking_part, self._void = self._agree_on_touched(abort)
        for reducer in self._taking_part:
            reducer.flush()

    def finish(self, *, abort: bool = False) -> None:
        """Second half: waits, and hands out the averages. On another exception the round stays open.

        Raises:
            ReplicateError: If another rank gave the round up, or a collective failed, or ranks disagree.
        """
        touched, given_up = self._taking_part, self._void
        self._taking_part = []
        for reducer in touched:
            given_up = reducer.finish() or given_up
        for reducer in self._live():
            if not reducer.dirty:  # its window ends with everybody's
                reducer.forget_window()
        numbers = frozenset(reducer.index for reducer in touched)
        self._followed_by[self._touched] = numbers
        self._touched = numbers
        self.closed_rounds += 1
        self._forget_task()
        if given_up:
            self._report_given_up(abort)
            return
        for reducer in touched:
            complaint = reducer.complain_of_unused()
            if complaint is not None:
                raise ReplicateError(complaint)

    def _report_given_up(self, by_this_rank: bool) -> None:
        table = agreement.gather_flags([by_this_rank], self.control)
        if by_this_rank:
            return
        self._given_up = True
        ranks = ", ".join(str(rank) for rank, (gave_up,) in enumerate(table) if gave_up)
        raise ReplicateError(
            f"Rank {ranks} of this process group gave the round up, after an exception or with a loss that has no"
            f" gradient; the gradients of rank {self.rank} are not averages. Set them to None before the next step."
        )

    def _agree_on_touched(self, abort: bool) -> tuple[list[Reducer], bool]:
        """The groups that any rank touched, and whether any rank gives up (with one group, its tail says so)."""
        reducers = self._live()
        if not self._needs_message():
            return reducers, abort
        flags = [False] * self._made
        for reducer in reducers:
            flags[reducer.index] = reducer.requires_sync and reducer.dirty
        *touched, given_up = agreement.union([*flags, abort], self.control)
        gone = [number for number in self._reducers if touched[number] and self._reducers[number]() is None]
        if gone:
            raise ReplicateError(f"Rank {self.rank} no longer has a replicated module that other ranks still train.")
        return [reducer for reducer in reducers if touched[reducer.index]], given_up

    def close_without_backward(self, *, took_part: bool) -> None:
        """Takes part in a round in which this rank had no backward, or one that reached no parameter.

        Args:
            took_part: Whether this rank counts in the average.
        """
        if self._root is not None:
            raise ReplicateError(f"The round of rank {self.rank} is still open: its backward has not ended.")
        _close_all(took_part=took_part)

    def _forget_task(self) -> None:
        self.task = self._root = None
        self._is_open = self.nested = False
        for _, bucket in self._queue:  # also of groups that nobody touched: a backward without a round counts, too
            bucket.missing = NEVER
        self._queue = []
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def count_backward(self) -> None:
        """Counts a backward of this rank, where it had none since the last round."""
        for reducer in self._live():
            if not reducer.had_backward:
                reducer.note_backward()

    def reset(self) -> None:
        """Takes the place of a backward that failed: closes its round, and tells the other ranks that it is void.

        A rank whose round was given up by another one has nothing left to do.
        """
        if self._given_up:
            self._given_up = False
            return
        if self._root is None:
            self.task = None
            if not self._open(abort=True):
                return
        for reducer in self._live():
            reducer.give_up()
        self._root = None
        _close_all(gives_up=self)
        for reducer in self._live():
            reducer.forget_window()


def any_groups() -> bool:
    """Whether anything is replicated in this process."""
    return any(channel._live() for channel in _channels.values())


def _close_all(*, took_part: bool = True, gives_up: Channel | None = None) -> None:
    """Closes the round on every process group, in the order in which the groups were made: the same on all ranks.

    A backward that reached two process groups reaches them in another order on another rank, or reaches only one there;
    so a rank sends on all of them before it waits on any, and takes part on those that it did not reach.

    Args:
        took_part: Whether this rank counts in the average where it has reached nothing.
        gives_up: The channel on which this rank gives the round up.
    """
    channels = [channel for channel in list(_channels.values()) if channel._reducers and channel._is_alive()]
    channels = [channel for channel in channels if channel._is_open or channel._open(took_part=took_part)]
    with torch.profiler.record_function("replicate::close"):
        for channel in channels:
            channel.send_rest(abort=channel is gives_up)
        for channel in channels:
            channel.finish(abort=channel is gives_up)
