"""Keeps ranks together around sharded modules, which communicate in forward and backward.

A rank that runs another sharded module than the others, or none because it skips the step, would leave their
collectives half-done. So before each sharded module of a training step, and at the step's end, ranks tell each other
where they are (one tiny message on the control group). They go on together, leave the step together, or raise together.

Backward needs no messages: :func:`anchor` ties the outputs of all sharded modules to the loss without changing it, so
that a backward passes them in the same order on all ranks, whatever the loss was made of. Where it has nothing to say,
gradients are undefined, and the modules reduce zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.dtensor import is_dtensor

_AT_END, _SKIPS = -1, -2


class LeaveStep(BaseException):
    """Takes a rank out of ``training_step`` when all ranks skip it. No ``except Exception`` shall stop it."""


class Lockstep:
    """Watches the sharded modules of one model.

    Args:
        modules: The sharded modules by name, in the same order on all ranks.
        gather: Gives every rank all ranks' numbers. Collective.
        may_leave: Whether all ranks skip a step that one rank skips.

    Attributes:
        params: The sharded parameters.
    """

    def __init__(self, modules: Mapping[str, Any], gather: Callable[[int], list[int]], *, may_leave: bool) -> None:
        self.params = _sharded_parameters(modules.values())
        self._names = list(modules)
        self._gather = gather
        self._may_leave = may_leave
        self._entered: int | None = None  # how many sharded modules were entered; None outside of a training step
        self._collects = False
        self._outputs: dict[int, torch.Tensor] = {}
        self._handles = []
        _private.let_fsdp_pass_undefined_gradients()
        for number, module in enumerate(modules.values()):
            enter = _private.not_compiled(self._entering(number))
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(_private.not_compiled(self._leaving())))

    def remove(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()

    def run(self, training_step: Callable[[], Any], *, may_skip: bool) -> tuple[Any, list[int]]:
        """Runs a training step.

        Args:
            training_step: Runs it.
            may_skip: Whether it skips the step by returning ``None``.

        Returns:
            What it returned, ``None`` if ranks left it together, and the ranks that skip.

        Raises:
            ReplicateError: On all ranks, if they ran different sharded modules.
        """
        self._entered = 0
        self._collects = may_skip  # in manual optimization, backward runs within the step
        self._outputs = {}
        try:
            output = training_step()
            where = self._where(_SKIPS if may_skip and output is None else _AT_END)
        except LeaveStep:
            return None, []
        finally:
            self._entered = None
        return output, [rank for rank, place in enumerate(where) if place == _SKIPS]

    def anchor(self, loss: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Ties the loss to the outputs of the sharded modules that the step ran.

        Args:
            loss: The loss.
            factor: What gradients are multiplied by.

        Returns:
            The same value, with a backward that passes those modules in any case.
        """
        outputs, self._outputs = self._outputs, {}
        return _Anchor.apply(loss, factor, *outputs.values()) if outputs or factor != 1.0 else loss

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            # not in the recomputation of a checkpoint, which is part of backward
            if self._entered is not None and _private.current_graph_task_id() == -1:
                self._where(number)
                self._entered += 1

        return enter

    def _leaving(self) -> Callable[..., None]:
        def leave(_module: Any, _args: Any, output: Any) -> None:
            if self._entered is None or not self._collects or _private.current_graph_task_id() != -1:
                return
            for tensor in _private.tensors_in(output):
                if tensor.grad_fn is not None:
                    self._outputs[id(tensor)] = tensor
                    # a graph that the step itself runs (`torch.autograd.grad`) is gone afterwards
                    tensor.grad_fn.register_prehook(self._forgetting(id(tensor)))

        return leave

    def _forgetting(self, key: int) -> Callable[..., None]:
        def forget(_: Any) -> None:
            self._outputs.pop(key, None)

        return forget

    def _where(self, place: int) -> list[int]:
        places = self._gather(place)
        if all(other == places[0] for other in places) or max(places) < 0:
            return places
        # no other rank has gone further, and a rank that skips has nothing under way
        if self._may_leave and self._entered == 0 and len({other for other in places if other != _SKIPS}) == 1:
            if place == _SKIPS:
                return [_SKIPS] * len(places)
            raise LeaveStep
        told = "; ".join(f"rank {rank} {self._describe(other)}" for rank, other in enumerate(places))
        raise ReplicateError(
            f"Ranks do not run the same sharded modules in a training step: {told}. Sharded modules communicate in"
            f" every forward, so all ranks must run the same ones in the same order. Replicate what only some ranks use"
            f" (leave it out of `shard`), or let all ranks skip a step together: `skipped_steps='together'`, with"
            f" `None` returned before the first sharded module."
        )

    def _describe(self, place: int) -> str:
        if place == _SKIPS:
            return "skips the step"
        return "is at the step's end" if place == _AT_END else f"is about to run {self._names[place]!r}"


def _sharded_parameters(modules: Iterable[nn.Module]) -> Sequence[torch.Tensor]:
    params = {param: None for module in modules for param in module.parameters()}
    return [param for param in params if is_dtensor(param)]


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.factor, ctx.count = factor, len(outputs)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return (grad * ctx.factor if ctx.factor != 1.0 else grad, None, *[None] * ctx.count)
