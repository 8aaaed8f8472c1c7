"""Uneven data: ranks whose training loaders end at different times agree where the epoch ends.

Ranks fetch in lockstep, so they agree within the fetch: one tiny message on the control group, before anything of the
step runs or communicates. Loaders that say how long they are agree once, before the first epoch, and pay nothing later
if they are equally long. Loaders for validation and test are left alone: their loops do not wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError

UnevenInputs = Literal["stop", "join", "error"]
"""What happens when training loaders end at different times."""

Gather = Callable[[int], "list[int]"]
"""Gives every rank all ranks' numbers. Collective."""


class NoBatch:
    """What a rank gets that has no more batches while others still have (``uneven_inputs="join"``).

    ``training_step`` is not called with it; hooks and callbacks that look at batches see it.
    """

    def __repr__(self) -> str:
        return "NoBatch()"


def holds_no_batch(batch: Any) -> bool:
    """Whether a batch, or a part of a batch of several loaders, is a :class:`NoBatch`."""
    if isinstance(batch, NoBatch):
        return True
    if isinstance(batch, Mapping):
        return any(map(holds_no_batch, batch.values()))
    if isinstance(batch, (list, tuple)):
        return any(map(holds_no_batch, batch))
    return False


def agree_on_end(loader: Any, mode: UnevenInputs, gather: Gather) -> Any:
    """Makes a training loader end its epochs after the same batch on all ranks. Collective.

    Args:
        loader: This rank's loader.
        mode: What happens when ranks' loaders end at different times.
        gather: Gives every rank all ranks' numbers.

    Returns:
        The loader itself if all ranks' loaders say that they are equally long, else one that wraps it.

    Raises:
        ReplicateError: On all ranks, if loaders say that they are not equally long and ``mode`` is ``"error"``.
    """
    lengths = gather(_length(loader))
    if min(lengths) < 0:
        return _AgreedLoader(loader, mode, gather)
    if min(lengths) == max(lengths):
        return loader
    if mode == "error":
        raise ReplicateError(f"Training loaders are not equally long: {_by_rank(lengths)}. {_ADVICE}")
    return _SizedAgreedLoader(loader, mode, gather, lengths)


_ADVICE = "Give all ranks the same number of batches, or choose `uneven_inputs='stop'` or `'join'`."


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def _by_rank(numbers: Sequence[object]) -> str:
    return ", ".join(f"rank {rank} has {number} batches" for rank, number in enumerate(numbers))


class _AgreedLoader:
    """A loader whose iterator asks the other ranks whether they have a batch, too."""

    def __init__(self, loader: Any, mode: UnevenInputs, gather: Gather) -> None:
        self._loader = loader
        self._mode = mode
        self._gather = gather

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet: this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)  # sampler, dataset, state_dict and the like

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        fetched = 0
        while True:
            batch = next(batches, _END)
            has_batch = self._gather(int(batch is not _END))
            if all(has_batch):
                fetched += 1
            elif self._mode == "join" and any(has_batch):
                batch = NoBatch() if batch is _END else batch
            else:
                self._report(fetched, has_batch)
                return
            yield batch

    def _report(self, fetched: int, has_batch: Sequence[int]) -> None:
        if not any(has_batch):
            return
        if self._mode == "error":
            counts = [f"at least {fetched + 1}" if more else str(fetched) for more in has_batch]
            raise ReplicateError(f"Training loaders ended at different times: {_by_rank(counts)}. {_ADVICE}")
        unused = ", ".join(f"rank {rank} at least 1" for rank, more in enumerate(has_batch) if more)
        _private.rank_zero_info(f"The epoch ended after {fetched} batches, when a rank had no more. Unused: {unused}.")


class _SizedAgreedLoader(_AgreedLoader):
    """The same for loaders that say how long they are: no messages are needed."""

    def __init__(self, loader: Any, mode: UnevenInputs, gather: Gather, lengths: Sequence[int]) -> None:
        super().__init__(loader, mode, gather)
        self._lengths = lengths

    def __len__(self) -> int:
        return max(self._lengths) if self._mode == "join" else min(self._lengths)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(len(self)):
            batch = next(batches, _END)
            if batch is _END and self._mode != "join":
                raise ReplicateError("A training loader ended before the length that it gave.")
            yield NoBatch() if batch is _END else batch
        if self._mode == "stop":
            unused = ", ".join(
                f"rank {rank} {length - len(self)}" for rank, length in enumerate(self._lengths) if length > len(self)
            )
            _private.rank_zero_info(
                f"The epoch ended after {len(self)} batches, when a rank had no more. Unused: {unused}."
            )


_END = object()
