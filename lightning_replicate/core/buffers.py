"""Which buffers follow rank 0 after set-up, and when. Buffers never travel in a forward.

Set-up makes all buffers equal. After that, by ``buffers=``:

=============  ===========================================  =====================================================
choice         after each round (see below)                 when about to be read (:meth:`BufferSync.before_reading`)
=============  ===========================================  =====================================================
``"auto"``     floating-point, but for normalization layers  running statistics of normalization layers
``"step"``     floating-point and running statistics         nothing
``"epoch"``    nothing                                       floating-point and running statistics
``"start"``    nothing                                       nothing
names, call    the chosen ones                               nothing
=============  ===========================================  =====================================================

Under the Trainer, what follows after each round does so between that step and the next: what a rank has counted in a
buffer is still its own when hooks before the optimizer's step look at it.

Integer buffers (counters) and the states of torchmetrics' metrics belong to their rank and are left alone, unless they
are chosen by name or callable. In a glob among these names, ``*`` stands for any characters, dots too.

``ignored_buffers`` are each rank's own from the start, whatever is chosen: shapes may differ, too. They are ignored by
their names, so that one which is assigned anew, or registered later, is ignored as well.

DDP sends all buffers before each forward. In its terms, ``forward_sync_buffers=True`` is ``"auto"`` here, or, with
counters, ``lambda name, buffer: True``. ``forward_sync_buffers=False`` is ``"start"``. ``broadcast_buffers=False``,
where they do not even travel at set-up, is ``ignored_buffers=list(module.buffers())``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import broadcast_from_first, require_same_specs
from lightning_replicate.core.api import BufferChoice, IgnoredBuffers
from lightning_replicate.core.layout import ParamSpec
from lightning_replicate.core.names import matches_any, matches_name, nothing_matched


class HeldBuffer(NamedTuple):
    """A buffer, its full name, and where it is held: ``module.<key>``."""

    name: str
    module: nn.Module
    key: str
    buffer: torch.Tensor


def buffers_in(modules: Iterable[tuple[str, nn.Module]], ignored: Sequence[str] = ()) -> list[HeldBuffer]:
    """The buffers that these modules hold themselves, without those whose name is ignored.

    Args:
        modules: The modules with their names.
        ignored: Names and globs.
    """
    held = [
        HeldBuffer(f"{prefix}.{key}" if prefix else key, module, key, buffer)
        for prefix, module in modules
        for key, buffer in _private.buffers_of(module).items()
        if buffer is not None
    ]
    return [found for found in held if not matches_any(ignored, found.name)]


def names_to_ignore(
    given: IgnoredBuffers,
    named: Sequence[tuple[str, nn.Module]],
    choice: BufferChoice,
    *,
    all_here: bool,
) -> tuple[str, ...]:
    """Turns what was given as ``ignored_buffers`` into names and globs.

    Names and globs stay as they are. Added are the names of buffers that were given as tensors, and the other names of
    all that is ignored: a buffer may be held in several places.

    Args:
        given: Names, globs and buffers.
        named: The modules that may hold them, under each of their names.
        choice: The ``buffers`` option.
        all_here: Whether each of them must be found in these modules.

    Raises:
        TypeError: If something else is given.
        ValueError: If one matches nothing, or is also chosen by name to follow rank 0.
    """
    wanted = [given] if isinstance(given, (str, torch.Tensor)) else list(given)
    held = buffers_in(named)
    ignored: set[torch.Tensor] = set()
    for item in wanted:
        if isinstance(item, str):
            found = [one.buffer for one in held if matches_name(item, one.name)]
        elif isinstance(item, torch.Tensor):
            found = [one.buffer for one in held if one.buffer is item]
        else:
            raise TypeError(f"`ignored_buffers` takes names, globs and buffers, got {type(item).__name__}.")
        if not found and all_here:
            raise ValueError(_not_here(item, held))
        ignored.update(found)
    names = [item for item in wanted if isinstance(item, str)]
    names += [one.name for one in held if one.buffer in ignored]
    if not isinstance(choice, str) and not callable(choice):
        for name in choice:
            if name in names:
                raise ValueError(f"Buffer {name!r} is to follow rank 0 (`buffers`) and to be ignored. Choose one.")
    return tuple(dict.fromkeys(names))


def _not_here(item: str | torch.Tensor, held: Sequence[HeldBuffer]) -> str:
    kind = "buffer that this call looks after"
    if isinstance(item, str):
        return nothing_matched(item, "ignored_buffers", kind, [found.name for found in held])
    return f"`ignored_buffers`: a {type(item).__name__} of shape {tuple(item.shape)} is no {kind}."


class BufferSync:
    """Looks buffers up by name at each synchronization, so that one which was assigned anew is found.

    Args:
        choice: The ``buffers`` option.
        walk: Gives the managed modules with their names.
        group: The group over which buffers travel.
        control: A group of the same ranks on which CPU tensors travel.
        ignored: Names and globs of buffers that are each rank's own.

    Attributes:
        waits: Whether what follows rank 0 after each round waits for :meth:`send_due`.
    """

    def __init__(
        self,
        choice: BufferChoice,
        walk: Callable[[], Sequence[tuple[str, nn.Module]]],
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        ignored: Sequence[str] = (),
    ) -> None:
        self.waits = False
        self._due = False
        self._choice = choice
        self._walk = walk
        self._group = group
        self._control = control
        self._ignored = ignored
        self._step: list[tuple[str, nn.Module, str]] = []
        self._read: list[tuple[str, nn.Module, str]] = []
        self._known: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self.rescan()

    def rescan(self) -> list[HeldBuffer]:
        """Chooses anew. Call it when modules came or went.

        Returns:
            All buffers that are there now, whatever is chosen.
        """
        self._step, self._read = [], []
        held = buffers_in(self._walk(), self._ignored)
        for found in held:
            self._sort_in(*found)
        return held

    def _sort_in(self, name: str, module: nn.Module, key: str, buffer: torch.Tensor) -> None:
        choice = self._choice
        statistic = hasattr(module, "track_running_stats")  # batch and instance normalization, and what derives from it
        if callable(choice):
            to = self._step if choice(name, buffer) else None
        elif not isinstance(choice, str):
            # a name itself, too: in "[0].x" a glob would see a set of characters
            chosen = name in choice or any(fnmatch.fnmatchcase(name, pattern) for pattern in choice)
            to = self._step if chosen else None
        elif not statistic and (not buffer.is_floating_point() or _is_metric(module)):
            to = None
        elif choice == "auto":
            to = self._read if statistic else self._step
        else:
            to = {"step": self._step, "epoch": self._read, "start": None}[choice]
        if to is not None:
            to.append((name, module, key))

    def equalize_new(self, *, broadcast: bool) -> None:
        """Gives every buffer that was not there before, persistent or not, the first rank's values. Collective.

        Args:
            broadcast: Whether values travel, or ranks are only compared.

        Raises:
            ReplicateError: On all ranks, if they hold different buffers.
        """
        new = {
            found.name: found
            for found in self.rescan()
            if found.key not in self._known.get(found.module, ())
            and not nn.parameter.is_lazy(found.buffer)  # lazy modules give ranks equal ones
        }
        specs = [ParamSpec.of(name, found.buffer) for name, found in new.items()]
        require_same_specs(specs, "", self._control, kind="buffer")
        if broadcast:
            broadcast_from_first(list(dict.fromkeys(found.buffer for found in new.values())), self._group)
        for found in new.values():
            self._known.setdefault(found.module, set()).add(found.key)

    def after_round(self) -> None:
        """Synchronizes what follows rank 0 in every step. Collective, but for models without such buffers."""
        self._due = True
        if not self.waits:
            self.send_due()

    def send_due(self) -> None:
        """Synchronizes what waits since the last round. Collective, like :meth:`after_round`."""
        if self._due:
            self._due = False
            self._broadcast(self._step)

    def before_reading(self) -> None:
        """Synchronizes what follows rank 0 when it is about to be read. Collective, like :meth:`after_round`."""
        self.send_due()
        self._broadcast(self._read)

    def _broadcast(self, where: Sequence[tuple[str, nn.Module, str]]) -> None:
        if not where:
            return
        held = {name: _private.buffers_of(module).get(key) for name, module, key in where}
        present = {n: buffer for n, buffer in held.items() if buffer is not None and not nn.parameter.is_lazy(buffer)}
        with torch.profiler.record_function("replicate::buffers"):
            # the backend would end the process where sizes differ
            specs = [ParamSpec.of(name, buffer) for name, buffer in present.items()]
            require_same_specs(specs, "", self._control, kind="buffer")
            if present:
                broadcast_from_first(list(present.values()), self._group, unseen_by_autograd=True)


def _is_metric(module: nn.Module) -> bool:
    # by name, since the lower floor knows torch only
    return any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__)
