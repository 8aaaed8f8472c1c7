"""Which buffers follow rank 0 after set-up, and when. Buffers never travel in a forward.

Set-up makes all buffers equal. After that, by ``buffers=``:

=============  ===========================================  =====================================================
choice         after each round (once a step)               when about to be read (:meth:`BufferSync.before_reading`)
=============  ===========================================  =====================================================
``"auto"``     floating-point, but for normalization layers  running statistics of normalization layers
``"step"``     floating-point and running statistics         nothing
``"epoch"``    nothing                                       floating-point and running statistics
``"start"``    nothing                                       nothing
names, call    the chosen ones                               nothing
=============  ===========================================  =====================================================

Integer buffers (counters) and the states of torchmetrics' metrics belong to their rank and are left alone, unless they
are chosen by name or callable.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import broadcast_from_first, require_same_specs
from lightning_replicate.core.api import BufferChoice
from lightning_replicate.core.layout import ParamSpec


class BufferSync:
    """Looks buffers up by name at each synchronization, so that one which was assigned anew is found.

    Args:
        choice: The ``buffers`` option.
        walk: Gives the managed modules with their names.
        group: The group over which buffers travel.
    """

    def __init__(
        self,
        choice: BufferChoice,
        walk: Callable[[], Sequence[tuple[str, nn.Module]]],
        group: dist.ProcessGroup,
    ) -> None:
        self._choice = choice if isinstance(choice, str) or callable(choice) else tuple(choice)
        self._walk = walk
        self._group = group
        self._step: list[tuple[nn.Module, str]] = []
        self._read: list[tuple[nn.Module, str]] = []
        self._known: set[str] = set()
        self.rescan()

    def rescan(self) -> None:
        """Chooses anew. Call it when modules came or went."""
        self._step, self._read = [], []
        for prefix, module in self._walk():
            for key, buffer in _private.buffers_of(module).items():
                if buffer is not None:
                    self._sort_in(f"{prefix}.{key}" if prefix else key, module, key, buffer)

    def _sort_in(self, name: str, module: nn.Module, key: str, buffer: torch.Tensor) -> None:
        choice = self._choice
        statistic = hasattr(module, "track_running_stats")  # batch and instance normalization, and what derives from it
        if callable(choice):
            to = self._step if choice(name, buffer) else None
        elif not isinstance(choice, str):
            to = self._step if any(fnmatch.fnmatchcase(name, pattern) for pattern in choice) else None
        elif not statistic and (not buffer.is_floating_point() or _is_metric(module)):
            to = None
        elif choice == "auto":
            to = self._read if statistic else self._step
        else:
            to = {"step": self._step, "epoch": self._read, "start": None}[choice]
        if to is not None:
            to.append((module, key))

    def equalize_new(self, control: dist.ProcessGroup, *, broadcast: bool) -> None:
        """Gives every buffer that was not there before, persistent or not, the first rank's values. Collective.

        Args:
            control: A group on which CPU tensors travel.
            broadcast: Whether values travel, or ranks are only compared.

        Raises:
            ReplicateError: On all ranks, if they hold different buffers.
        """
        new = {
            f"{prefix}.{key}" if prefix else key: buffer
            for prefix, module in self._walk()
            for key, buffer in _private.buffers_of(module).items()
            if buffer is not None
        }
        new = {
            name: buffer
            for name, buffer in new.items()
            if name not in self._known and not nn.parameter.is_lazy(buffer)  # lazy modules give ranks equal ones
        }
        require_same_specs([ParamSpec.of(*item) for item in new.items()], "", control, kind="buffer")
        if broadcast:
            broadcast_from_first(list({id(buffer): buffer for buffer in new.values()}.values()), self._group)
        self._known |= new.keys()

    def after_round(self) -> None:
        """Synchronizes what follows rank 0 in every step. Collective, but for models without such buffers."""
        self._broadcast(self._step)

    def before_reading(self) -> None:
        """Synchronizes what follows rank 0 when it is about to be read. Collective, like :meth:`after_round`."""
        self._broadcast(self._read)

    def _broadcast(self, where: Sequence[tuple[nn.Module, str]]) -> None:
        found = (_private.buffers_of(module).get(key) for module, key in where)
        tensors = [buffer for buffer in found if buffer is not None and not nn.parameter.is_lazy(buffer)]
        if tensors:
            with torch.profiler.record_function("replicate::buffers"):
                broadcast_from_first(tensors, self._group, unseen_by_autograd=True)


def _is_metric(module: nn.Module) -> bool:
    # by name, since the lower floor knows torch only
    return any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__)
