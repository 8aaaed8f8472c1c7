"""Which parts of a model get a ``replicate()`` call, and the rule that every trained parameter has an owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.api import Options
from lightning_replicate.core.dtensor import is_dtensor
from lightning_replicate.core.replicate import apply, equalize, states_in
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy.selection import Patterns, Selection, select


def mark(
    root: nn.Module, replicate: Patterns | None, local: Selection, options: Options, optimizers: Iterable[Any]
) -> list[ReplicateState]:
    """Replicates what the user chose, and gives everything that is not local rank 0's values. Collective.

    Without a choice that is what was marked by hand, or else the whole model: one group for each optimizer, if there
    are several, so that a step moves only its own gradients.

    Args:
        root: The LightningModule, on its device.
        replicate: What to replicate; ``None`` without a choice.
        local: What stays out, buffers included.
        options: How gradients travel.
        optimizers: The optimizers, for the groups.

    Returns:
        The states of all calls on the model, those by hand included.

    Raises:
        ValueError: If a buffer is to be local that a call by hand looks after.
    """
    group = dist.group.WORLD
    assert group is not None
    states = states_in(root)
    _require_not_marked_by_hand(local, states)
    for state in states:
        state.validate()
        state.refresh()  # the model was moved and converted since

    def call(modules: dict[nn.Module, str], options: Options = options, **extra: Any) -> None:
        ignored_params = [*local.params.values(), *extra.pop("ignored_params", ())]
        states.append(
            apply(
                list(modules),
                options,
                process_group=group,
                ignored_modules=local.modules.values(),
                ignored_params=ignored_params,
                ignored_buffers=local.buffer_names(),
                names=modules,
                **extra,
            )
        )

    if replicate is not None:
        chosen = select(root, replicate, "replicate")
        if chosen.modules:
            call({module: name for name, module in chosen.modules.items()})
        if chosen.params:  # marked on the model itself, which owns them
            others = set(root.parameters()) - set(chosen.params.values())
            call({root: ""}, options=dataclasses.replace(options, buffers="start"), ignored_params=others)
    elif not states and "fully_shard" not in _private.composable_registry(root):
        call({root: ""}, partition=_by_optimizer(list(optimizers)))
    equalize(root, local=local.all_tensors(), process_group=group)
    return states


def _require_not_marked_by_hand(local: Selection, states: Iterable[ReplicateState]) -> None:
    """Checks that no call by hand looks after a local buffer: it has given it rank 0's value already."""
    looked_after = {buffer for state in states for buffer in state.buffers()}
    for name, buffer in local.buffers.items():
        if buffer in looked_after:
            raise ValueError(
                f"`local`: buffer {name!r} lies in a module that was given to replicate() by hand, which has made it"
                f" equal on all ranks. Leave it out there, too: `replicate(..., ignored_buffers=[...])`."
            )


def _by_optimizer(optimizers: list[Any]) -> Callable[[nn.Parameter], int]:
    """One group per optimizer; what is in none of them goes with the first."""
    numbers: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        for param in parameters_of_optimizers([optimizer]):
            numbers.setdefault(param, number)
    return lambda param: numbers.get(param, 0)


def parameters_of_optimizers(optimizers: Iterable[Any]) -> Iterator[nn.Parameter]:
    """All parameters of all groups of all optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def require_managed(optimizers: Iterable[Any], root: nn.Module, managed: Set[nn.Parameter]) -> None:
    """Checks that every trainable parameter of every optimizer is replicated, sharded, or local on purpose.

    Args:
        optimizers: The optimizers.
        root: The model, for names.
        managed: The parameters that are replicated or local.

    Raises:
        ValueError: With the names of those that are neither.
    """
    names = {param: name for name, param in root.named_parameters()}
    unmanaged = [
        names.get(param, f"a parameter of shape {tuple(param.shape)} that is not, or no longer, in the model")
        for param in parameters_of_optimizers(optimizers)
        if param.requires_grad and param not in managed and not is_dtensor(param)
    ]
    if not unmanaged:
        return
    listed = ", ".join(unmanaged[:10]) + (", ..." if len(unmanaged) > 10 else "")
    raise ValueError(
        f"{len(unmanaged)} trainable parameters of the optimizers are neither replicated nor local, so each rank would"
        f" train its own: {listed}. Add them to `ReplicateStrategy(replicate=...)` or mark their module with"
        f" `replicate()`, or name them in `local=...` if each rank shall keep its own. A parameter that was replaced"
        f" after the optimizer was made must be given to the optimizer anew."
    )
