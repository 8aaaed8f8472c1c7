"""Uneven data: ranks whose training loaders end at different times agree where the epoch ends.

What ends is the combination of a rank's loaders, as Lightning makes it (``CombinedLoader``, whatever its mode); what
its parts do inside is left to Lightning. So the agreement sits on the combined loader itself, which is the first thing
that Lightning asks for whenever it sets up data: at the start of a fit, when loaders are reloaded, and earlier, when
somebody asks for the number of steps.

Loaders that know how long they are agree once an epoch. Others ask within each fetch, in which ranks are in lockstep:
one tiny message on the control group, before anything of the step runs or communicates. Loaders for validation and test
are left alone unless modules are sharded: their loops do not wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError

UnevenInputs = Literal["stop", "join", "error"]
"""What happens when training loaders end at different times."""

Gather = Callable[[Sequence[int]], "list[list[int]]"]
"""Gives every rank all ranks' numbers. Collective."""


class NoBatch:
    """What a rank gets that has no more batches while others still have (``uneven_inputs="join"``).

    ``training_step`` is not called with it; hooks and callbacks that look at batches see it.
    """

    def __repr__(self) -> str:
        return "NoBatch()"


class EndTogether:
    """Makes loaders of one Trainer end their epochs after the same batch on all ranks.

    Args:
        mode: What happens when ranks' loaders end at different times.
        gather: Gives every rank all ranks' numbers. Collective.
        on_uneven: Called on all ranks whenever loaders are, or may be, of unequal length.
    """

    def __init__(self, mode: UnevenInputs, gather: Gather, on_uneven: Callable[[], None] = lambda: None) -> None:
        self.mode = mode
        self.gather = gather
        self.on_uneven = on_uneven
        self._said = ""

    def agree(self, loader: Any) -> Any:
        """Makes a combined loader agree with those of the other ranks whenever it is iterated over. Collective.

        Args:
            loader: This rank's ``CombinedLoader``, which is left as it is.

        Returns:
            A copy of it, of a class derived from its own.

        Raises:
            ReplicateError: On all ranks, if they combine different numbers of loaders.
        """
        counts = [count for (count,) in self.gather([len(loader.flattened)])]
        if min(counts) != max(counts):
            told = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise ReplicateError(f"Ranks have different numbers of loaders: {told}. Give all ranks the same number.")
        kind = type(loader)
        agreed: Any = object.__new__(type(f"Agreed{kind.__name__}", (_AgreedLoader, kind), {}))
        vars(agreed).update(vars(loader))
        agreed.together = self
        return agreed

    def part(self, loader: Any) -> Any:
        """Prepares one of the loaders that are combined. Collective.

        Lightning sums the lengths of those that have one over ranks, and refuses an empty one, each rank by itself. So
        one that has no length on some rank, or no batch, gets none on all.
        """
        lengths = [length for (length,) in self.gather([_length(loader)])]
        return _Unsized(loader) if min(lengths) <= 0 and min(lengths) != max(lengths) else loader

    def say(self, message: str) -> None:
        """Tells the user on rank 0 what is not used; what was said last is not repeated in every epoch."""
        if message != self._said:
            _private.rank_zero_info(message)
        self._said = message


class _AgreedLoader:
    """Comes before the class of a combined loader; :meth:`EndTogether.agree` makes such objects."""

    together: EndTogether
    flattened: list[Any]
    _asks = False  # whether ranks ask each other at each batch
    _agreed_length: int | None = None
    _fetched = 0

    def __iter__(self) -> Any:
        super().__iter__()  # type: ignore[misc]
        self._fetched = 0
        table = self.together.gather([self._own_length(), any(map(_may_end_early, self.flattened))])
        lengths = [length for length, _ in table]
        self._asks = any(asks for _, asks in table)
        known, even = min(lengths) >= 0, min(lengths) == max(lengths)
        mode = self.together.mode
        self._agreed_length = (max(lengths) if mode == "join" else min(lengths)) if known else None
        if self._asks or not even:
            self.together.on_uneven()
        if known and not even and mode == "error":
            raise ReplicateError(f"Loaders are not equally long: {_by_rank(lengths)}. {_ADVICE}")
        if known and not even and mode == "stop":
            left = [f"rank {rank} {n - min(lengths)}" for rank, n in enumerate(lengths) if n > min(lengths)]
            self.together.say(_ended("Each epoch ends", min(lengths), left))
        return self

    def __len__(self) -> int:
        if self._agreed_length is None:
            length = super().__len__()  # type: ignore[misc]  # raises before the first iteration
            raise TypeError(f"Some rank does not know how many batches it has; this one has {length}.")
        return self._agreed_length

    def __next__(self) -> Any:
        if not self._asks and self._fetched >= len(self):
            raise StopIteration
        batch = self._next()
        mode = self.together.mode
        if self._asks:
            has_batch = [bool(has) for (has,) in self.together.gather([batch is not None])]
            if not (all(has_batch) or (mode == "join" and any(has_batch))):
                self._report(has_batch)
                raise StopIteration
        if batch is None and mode != "join":
            raise ReplicateError(
                f"A loader ended after {_count(self._fetched)}, before the length that it gave, {len(self)}. Give it"
                f" the right length, or use an iterable dataset, for which ranks agree batch by batch."
            )
        self._fetched += 1
        return (NoBatch(), self._fetched - 1, 0) if batch is None else batch

    def _next(self) -> Any:
        try:
            return super().__next__()  # type: ignore[misc]
        except StopIteration:
            return None

    def _own_length(self) -> int:
        try:
            length = super().__len__()  # type: ignore[misc]
        except (TypeError, NotImplementedError):
            return -1
        return -1 if length == float("inf") else int(length)

    def _report(self, has_batch: Sequence[bool]) -> None:
        if not any(has_batch):
            return
        if self.together.mode == "error":
            counts = [f"at least {self._fetched + 1}" if more else str(self._fetched) for more in has_batch]
            raise ReplicateError(f"Loaders ended at different times: {_by_rank(counts)}. {_ADVICE}")
        left = [f"rank {rank} at least 1" for rank, more in enumerate(has_batch) if more]
        self.together.say(_ended("The epoch ended", self._fetched, left))


class _Unsized:
    """A loader whose length is not for everybody to see."""

    __slots__ = ("_loader",)
    _loader: Any

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_loader", loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:  # sampler, dataset, state_dict and the like
        if name == "_loader":  # not there yet: this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:  # worker_init_fn
        setattr(self._loader, name, value)


_ADVICE = "Give all ranks the same number of batches, or choose `uneven_inputs='stop'` or `'join'`."


def _ended(what: str, batches: int, left: Sequence[str]) -> str:
    return f"{what} after {_count(batches)}, when a rank has no more. Unused: {', '.join(left)}."


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def _may_end_early(loader: Any) -> bool:
    """Whether a loader has no length, or one that its data need not keep to: only torch's own samplers are sure to."""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        own = ("torch", "lightning", "pytorch_lightning", "builtins")  # the last for None and for lists
        return any(type(s).__module__.partition(".")[0] not in own for s in (loader.sampler, loader.batch_sampler))
    return not isinstance(loader, Sequence)


def _count(batches: object) -> str:
    return f"{batches} batch" if str(batches).endswith(" 1") or batches in (1, "1") else f"{batches} batches"


def _by_rank(numbers: Sequence[object]) -> str:
    return ", ".join(f"rank {rank} has {_count(number)}" for rank, number in enumerate(numbers))
