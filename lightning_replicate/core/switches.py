"""What a user sets around a step: whether it synchronizes, what it weighs, how it travels, what to do if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_replicate.core import hook_state
from lightning_replicate.core.api import Options
from lightning_replicate.core.buffers import BufferSync
from lightning_replicate.core.channel import Channel
from lightning_replicate.core.reducer import Reducer


class Switches:
    """The part of :class:`~lightning_replicate.ReplicateState` that is used in a training loop."""

    active: bool
    channel: Channel | None
    _options: Options
    _reducers: list[Reducer]
    _buffers: BufferSync | None

    def refresh(self) -> None:
        """Follows the model at once. Collective."""
        raise NotImplementedError

    @contextmanager
    def round(self) -> Iterator[None]:
        """Makes sure that one round is closed, whether or not this rank comes to a backward inside.

        A rank that has no backward, or one that reaches no replicated parameter, takes part with nothing when it
        leaves the block, so that the others do not wait for it.

        Example::

            with state.round():
                if batch is not None:
                    loss(model(batch)).backward()
        """
        before = self.closed_rounds
        yield
        if self.closed_rounds == before:
            self.close_round(took_part=False)

    def close_round(self, *, took_part: bool = True) -> None:
        """Takes part in one round without a backward. Collective: every rank must close a round.

        Args:
            took_part: Whether this rank counts in the average: it does if it had a loss that reached no parameter.
        """
        if self.active and self.requires_gradient_sync:
            assert self.channel is not None
            self.channel.close_without_backward(took_part=took_part)

    def average_gradients(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Averages gradients as they are in ``.grad`` now, wherever they came from. Collective.

        For gradients that no backward brings: made with ``torch.autograd.grad`` and assigned (gradient surgery), by
        another library, or by backwards under :meth:`no_sync`. Their whole ``.grad`` is what this rank gives; a rank
        where it is ``None`` gives nothing for that parameter. What is divided by follows ``average``; with
        ``"weighted"``, gradients that came from no backward are multiplied by this rank's weight here. What
        backwards under :meth:`no_sync` have brought for other parameters is averaged, too.

        Args:
            params: The parameters; those of other calls are left out. Default: all.
        """
        self.offer_gradients(params)
        with self.sync():
            self.close_round(took_part=False)

    def offer_gradients(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Makes gradients as they are now part of what this rank gives to the next round. Does not communicate.

        Args:
            params: See :meth:`average_gradients`.
        """
        chosen = None if params is None else set(params)
        for reducer in self._reducers:
            reducer.offer(chosen)
        if self.channel is not None:
            self.channel.count_backward()

    @property
    def closed_rounds(self) -> int:
        """How many rounds were closed on this process group, by any group."""
        return 0 if self.channel is None else self.channel.closed_rounds

    def set_weight(self, weight: float, *, scale: float = 1.0) -> None:
        """Sets how much this rank's next losses count: their number of samples or tokens, say. Holds until set again.

        Each loss is taken for a mean over its samples. A round's gradient is the sum over ranks and accumulated
        backwards of weight times gradient, divided by the sum of all weights: that of one process on the whole batch.

        Args:
            weight: A number that is not negative.
            scale: Undoes a division of the loss by somebody else (an accumulation loop that divides by its length).

        Raises:
            ValueError: If the weight is negative, or ``average`` is not ``"weighted"``.
        """
        if self._options.average != "weighted":
            raise ValueError(f"A weight needs replicate(average='weighted'); this call uses {self._options.average!r}.")
        if not weight >= 0:
            raise ValueError(f"A weight must be a number that is not negative, got {weight!r}.")
        for reducer in self._reducers:
            reducer.set_weight(float(weight), scale)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divides the sum over ranks by this number, whatever ``average`` says; for loops that divide by themselves.

        Args:
            factor: A positive number; ``None`` follows ``average`` again.

        Raises:
            ValueError: If the factor is not positive, or a communication hook divides already.
        """
        if self._options.comm_hook is not None:
            raise ValueError("A `comm_hook` divides by the world size itself, so there is no other divide factor.")
        if factor is not None and not factor > 0:
            raise ValueError(f"A gradient divide factor must be positive, got {factor!r}.")
        for reducer in self._reducers:
            reducer.set_divide_factor(factor)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Lets a DDP communication hook move the gradients from the next round on. Collective.

        The hook has DDP's meaning: it gets the bucket's gradients, not divided by the world size, and the value of the
        future that it returns becomes the gradients.

        Args:
            state: First argument of the hook. ``None`` gives it the process group that carries our gradients.
            hook: ``hook(state, bucket) -> Future``.

        Raises:
            TypeError: If the hook cannot be called.
            RuntimeError: If there is one already.
            ValueError: If ``reduce_dtype`` or ``average="sum"`` was chosen, which a hook cannot keep.
        """
        if self._options.comm_hook is not None:
            raise RuntimeError("A communication hook is registered already; there can be one for a replicate() call.")
        if not callable(hook):
            raise TypeError(f"A communication hook must be callable, got {type(hook).__name__}.")
        self._options = replace(self._options, comm_hook=hook, comm_hook_state=state)
        for reducer in self._reducers:
            reducer.set_options(self._options)
        self.refresh()

    def hook_state_dict(self) -> dict[str, Any] | None:
        """What this rank's communication hook has learned, and for which layout: plain data, for a checkpoint.

        Returns:
            Tensors, numbers and text in dictionaries and lists, which ``torch.load(weights_only=True)`` reads; ``None``
            without a hook that has a state.
        """
        if self.channel is None or self._options.comm_hook_state is None:
            return None
        return {
            "state": hook_state.encode(self._options.comm_hook_state),
            "orders": [[slot.name for slot in reducer.members()] for reducer in self._reducers],
            "buckets": [(list(key), number) for key, number in self.channel.hook_buckets.items()],
        }

    def load_hook_state_dict(self, saved: dict[str, Any]) -> None:
        """Continues with what :meth:`hook_state_dict` gave. Call it on all ranks, before the first round.

        Args:
            saved: What this rank saved; with another number of ranks, what any rank saved.
        """
        if self.channel is None or self._options.comm_hook_state is None:
            return
        params = [slot.param for reducer in self._reducers for slot in reducer.slots]
        device = params[0].device if params else torch.device("cpu")
        hook_state.restore(self._options.comm_hook_state, saved["state"], device)
        self.channel.hook_buckets = {tuple(key): number for key, number in saved["buckets"]}
        for reducer, order in zip(self._reducers, saved["orders"], strict=False):
            reducer.adopt_order(order)
            reducer.build()

    @property
    def requires_gradient_sync(self) -> bool:
        """Whether backward averages gradients."""
        return all(reducer.requires_sync for reducer in self._reducers)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Switches averaging on or off, for gradient accumulation. What counts is the switch during backward.

        Args:
            requires_gradient_sync: Whether the next backward averages, along with what was accumulated before.
        """
        for reducer in self._reducers:
            reducer.requires_sync = requires_gradient_sync

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulates gradients without communication inside the block. The same on all ranks."""
        return self._switched(False)

    def sync(self) -> AbstractContextManager[None]:
        """Averages gradients inside the block, also within :meth:`no_sync`. The same on all ranks."""
        return self._switched(True)

    @contextmanager
    def _switched(self, requires_gradient_sync: bool) -> Iterator[None]:
        before = [reducer.requires_sync for reducer in self._reducers]
        self.set_requires_gradient_sync(requires_gradient_sync)
        try:
            yield
        finally:
            for reducer, requires_sync in zip(self._reducers, before, strict=True):
                reducer.requires_sync = requires_sync

    def sync_buffers(self) -> None:
        """Gives all ranks rank 0's buffers that the ``buffers`` option synchronizes when they are read. Collective.

        Call it before an evaluation whose result should not depend on the rank, and at the end of training.
        """
        if self._buffers is not None:
            self._buffers.before_reading()

    def hold_buffers(self) -> None:
        """From now on, buffers that follow rank 0 in every step wait for :meth:`send_held_buffers`."""
        if self._buffers is not None:
            self._buffers.waits = True

    def send_held_buffers(self) -> None:
        """Gives all ranks rank 0's buffers that wait since the last round. Collective."""
        if self._buffers is not None:
            self._buffers.send_due()

    def reset(self) -> None:
        """Takes the place of a backward that raised: the round is void, on all ranks, and the next one starts clean.

        Call it once on a rank whose backward (or the forward before it) raised and which goes on. The other ranks'
        backward raises :class:`~lightning_replicate.ReplicateError`; they may call it, too, and go on. On a GPU with
        a single group they do not notice, and all ranks must fail together.
        """
        if self.channel is not None:
            self.channel.reset()
