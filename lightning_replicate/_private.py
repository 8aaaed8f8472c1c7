"""Every private torch or Lightning name that this package relies on, each with the reason and what breaks without it.

Nothing else in the package reaches for a private name. Lightning is imported inside the functions that need it: the
lower floor uses this file too, and must not load Lightning.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import nn


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the running graph task ends.

    Reason: the end of backward is the only moment at which all of a rank's gradients are known to be final; torch has
    no public hook for it. FSDP2 and DDP use the same call. Without it no round can be closed: backward would raise
    ``AttributeError`` in the first hook, never silently skip.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running graph task, -1 outside of backward.

Reason: one ``backward()`` call is one graph task, so the number tells whether a hook belongs to the round that is open.
torch's own ``register_multi_grad_hook`` uses it. Without it the import of this file fails.
"""


def evaluating_node() -> Any:
    """The autograd node that this thread is evaluating, or ``None``.

    Reason: in the callback of a graph task that runs inside another one's node (reentrant checkpointing), this is the
    outer node; in the outermost it is ``None``. Without it a nested backward could be taken for the outermost, and the
    parameters that fire after it would be averaged twice.
    """
    return torch._C._current_autograd_node()


def enclosing_node() -> Any:
    """The custom autograd function's node whose ``backward`` is on this thread's Python stack, or ``None``.

    Reason: tells, while gradients arrive, that the running graph task is nested, so that nothing is launched from it.
    Looks for the frames of ``BackwardCFunction.apply``, through which the engine calls every custom backward. If torch
    renames it, nested tasks are recognized only at their end (:func:`evaluating_node`), and a parameter that fires
    after its bucket left raises.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CUSTOM_BACKWARD_CODE:
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _custom_backward_code() -> frozenset[Any]:
    function = torch.autograd.function.BackwardCFunction
    names = ("apply", "apply_boxed")  # the second since torch 2.13
    return frozenset(getattr(function, name).__code__ for name in names if hasattr(function, name))


_CUSTOM_BACKWARD_CODE = _custom_backward_code()


not_compiled: Callable[[Any], Any] = torch._disable_dynamo
"""Keeps a function out of compiled graphs.

Reason: the public ``torch.compiler.disable`` loads the whole compiler when the decorated function is defined, which
takes seconds; this one waits until something is compiled. Without it the import of this file fails.
"""


def process_group_timeout(process_group: Any) -> timedelta | None:
    """How long the group's collectives may take.

    Reason: the groups that this package makes beside the user's must give up when the user's does, and torch has no
    public way to ask. If it cannot be read, torch's default for the backend holds.
    """
    for device in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None


def default_store() -> Any:
    """The store of the default process group.

    Reason: a rank that fails leaves a line there for the others, and torch gives no public access to it. Without it
    their errors do not tell what failed on that rank.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def composable_contract() -> Any:
    """torch's decorator that records composable functions on modules.

    Reason: ``fully_shard`` leaves a subtree alone only if this registry says ``"replicate"`` on it. Without it the
    import fails; if the registry moved, ``fully_shard(parent)`` would shard replicated children, which
    ``ReplicateState.validate`` turns into an error.
    """
    from torch.distributed._composable.contract import contract

    return contract


def composable_registry(module: nn.Module) -> dict[str, Any]:
    """What composable functions were applied to this module, by name. Empty if none was."""
    from torch.distributed._composable.contract import _get_registry

    return _get_registry(module) or {}


def unmark_composable(module: nn.Module, name: str) -> None:
    """Takes a composable function off a module again; torch has no call for it."""
    cleaned = without_composable(module.__dict__, name)
    module.__dict__.clear()
    module.__dict__.update(cleaned)


def without_composable(state: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of a module's ``__dict__`` in which composable function ``name`` has never been applied."""
    cleaned = dict(state)
    for attribute, keep in _composable_dicts(state, name).items():
        if keep:
            cleaned[attribute] = keep
        else:
            del cleaned[attribute]
    return cleaned


def _composable_dicts(state: dict[str, Any], name: str) -> dict[str, dict[Any, Any]]:
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    found = {}
    for attribute in (REGISTRY_KEY, STATE_KEY):
        if attribute in state:
            entries = state[attribute]
            # the registry is keyed by the function's name, the states by the function itself
            found[attribute] = type(entries)(
                (key, value) for key, value in entries.items() if getattr(key, "__name__", key) != name
            )
    return found


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters, as the dictionary that the module itself holds.

    Reason: comparing these dictionaries' values by identity is the only check for replaced or added parameters that
    is cheap enough for every step; ``named_parameters()`` costs a hundred times as much.
    """
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own children, as the dictionary that the module itself holds. Reason: see :func:`parameters_of`."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, as the dictionary that the module itself holds.

    Reason: ``named_buffers()`` hides a buffer that two modules share, and buffers are looked up here at every
    synchronization so that a buffer which was assigned anew is found.
    """
    return module._buffers


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Any]:
    """The module's forward pre-hooks. Reason: copies of a module must not carry ours."""
    return module._forward_pre_hooks


def foreach_copy(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies many small tensors in one call.

    Reason: one call instead of one per parameter; DDP's ``batched_grad_copy`` does the same. The public spelling is a
    loop over ``Tensor.copy_``.
    """
    torch._foreach_copy_(destinations, sources)


def foreach_mul(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies many small tensors in one call. Reason: see :func:`foreach_copy`."""
    torch._foreach_mul_(tensors, factor)


def foreach_zero(tensors: list[torch.Tensor]) -> None:
    """Zeroes many small tensors in one call. Reason: see :func:`foreach_copy`."""
    torch._foreach_zero_(tensors)


def has_optimizer_in_backward(param: torch.Tensor) -> bool:
    """Whether torch's ``_apply_optimizer_in_backward`` was applied to the parameter.

    Reason: such an optimizer steps with the local gradient, before the average is there, and torch's only sign of it is
    this attribute. Without it ranks would drift apart without a word.
    """
    return hasattr(param, "_in_backward_optimizers")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested collections. Reason: torch's tree utilities, which know registered classes, are private."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies ``function`` to all that nested collections hold. Reason: see :func:`tensors_in`."""
    from torch.utils._pytree import tree_map

    return tree_map(function, value)


def as_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without its subclass.

    Reason: ``as_subclass`` itself is dispatched to the subclass; torch has no public way around that. Without it,
    looking at a closure's loss raises ``AttributeError``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def wrap_unscaling(scaler: Any, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Runs ``wrapper(original, optimizer, ...)`` where a ``GradScaler`` unscales gradients and looks for overflows.

    Reason: torch's scaler for FSDP1 overrides the same method; there is no public way to let ranks decide together, or
    to unscale plain and sharded gradients. Without it a scaler raises over a model with both kinds.

    Returns:
        A function that undoes it.
    """
    scaler._unscale_grads_ = functools.partial(wrapper, scaler._unscale_grads_)
    return lambda: vars(scaler).pop("_unscale_grads_", None)


def is_offloaded(module: Any) -> bool:
    """Whether a sharded module keeps its parameters on the CPU. Reason: FSDP2 has no public way to ask for the policy.

    If it cannot be told, the module is moved to the device with all others, and FSDP2 says that it must not be.
    """
    return any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in _param_groups(module))


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    return list(several) if several is not None else [group for group in [state._fsdp_param_group] if group is not None]


def reset_sharded(modules: Iterable[Any]) -> None:
    """Puts sharded modules back into the state between two steps, after an exception in the middle of one.

    Reason: FSDP2 leaves it undefined otherwise: moving the module would raise, in place of the user's exception, and
    the next backward would add to gradients of the failed one. ``reset_iter_state`` (torch 2.13) is public and leaves
    those gradients; on earlier versions the modules are resharded.
    """
    for module in modules:
        root = module._get_fsdp_state()._is_root is True
        if root and hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
        elif not hasattr(module, "reset_iter_state"):
            module.reshard()
        for group in _param_groups(module):
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if getattr(param, "_unsharded_param", None) is not None:
                    param._unsharded_param.grad = None


def let_fsdp_pass_undefined_gradients() -> None:
    """Keeps gradients that do not exist from becoming zeros where FSDP2 ends the backward of a module.

    Reason: a rank that skips a step runs the backward of its sharded modules with undefined gradients, so that it takes
    part in their communication. Zeros would be multiplied by what the forward left there, which may be the NaN for
    which the step is skipped. If torch renames the function, such a NaN gets into the average, as a test would tell.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    function = _fsdp_param_group.RegisterPostBackwardFunction
    if "setup_context" not in vars(function) or hasattr(function, "_passes_undefined"):
        return
    original = function.setup_context

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        original(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    function.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
    function._passes_undefined = True  # type: ignore[attr-defined]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Gives memory and first values to a module that was built on the meta device.

    Reason: Lightning does this for its sharding strategies and not for DDP. Without it a model that was built on the
    meta device fails at ``module.to(device)`` with torch's message.
    """
    from lightning.fabric.utilities.init import _materialize_distributed_module

    _materialize_distributed_module(module, device)


def take_over_sigterm(trainer: Any, on_sigterm: Callable[[], None]) -> Callable[[], None]:
    """Lets a fit hear of SIGTERM through ``on_sigterm`` and not by messages of Lightning's own.

    Reason: Lightning 2.6 broadcasts from rank 0 at the start of every batch, which makes the host wait for the device,
    and broadcasts again inside the signal handler, which waits for ever on a rank that is signalled alone. If Lightning
    renames these methods, its own messages stay and are harmless beside ours.

    Args:
        trainer: The Trainer, before it registers signal handlers.
        on_sigterm: Called in the signal handler.

    Returns:
        A function that undoes it.
    """
    signals, epoch_loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    told = False

    def handler(signum: Any, _: Any) -> None:
        nonlocal told
        launcher = trainer.strategy.launcher
        if not told and launcher is not None:
            launcher.kill(signum)
        told = True
        on_sigterm()

    replaced = {(signals, "_sigterm_notifier_fn"): handler, (epoch_loop, "_broadcast_sigterm_tensor"): lambda: None}
    replaced = {(owner, name): new for (owner, name), new in replaced.items() if hasattr(owner, name)}
    for (owner, name), new in replaced.items():
        setattr(owner, name, new)

    def undo() -> None:
        for owner, name in replaced:
            vars(owner).pop(name, None)

    return undo


def announce_sigterm(trainer: Any) -> None:
    """Makes Lightning end the fit as after SIGTERM. Reason: see :func:`take_over_sigterm`."""
    trainer._signal_connector.received_sigterm = True


def logged_for_epoch(trainer: Any) -> list[str]:
    """Names of the values that Lightning is about to reduce over ranks at the end of the training epoch.

    Reason: a rank that ran out of data in its first epoch has logged nothing, and would leave the others alone in that
    reduction. Lightning has no public list of what was logged. Without it, such ranks wait for the collective time-out.
    """
    results = trainer.fit_loop.epoch_loop._results
    return sorted(
        key
        for key, result in results.items()
        if result.meta.on_epoch and (result.meta.sync.should or not result.is_tensor)
    )


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Lets a LightningModule see the mesh as ``self.device_mesh``.

    Reason: Lightning's ModelParallelStrategy does the same; there is no public way to set it. Without it
    ``self.device_mesh`` is ``None`` in ``configure_model``.
    """
    module._device_mesh = mesh


def evaluation_loops(trainer: Any) -> list[Any]:
    """The Trainer's loops that have ``inference_mode``. All of them public but for their places."""
    return [
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    ]


def wrap_loaders_of(loop: Any, wrapper: Callable[[Any], Any]) -> Callable[[], None]:
    """Lets ``wrapper`` change what a loop of the Trainer gets when it asks for its loaders.

    Reason: Lightning sets loaders up when a loop starts, when they are reloaded, and whenever somebody asks for the
    number of steps before. This is the one place that all of these pass; ``process_dataloader``, which is public, sees
    the loaders one by one. If Lightning renames it, a fit raises ``AttributeError`` before it starts.

    Returns:
        A function that undoes it.
    """
    source = loop._data_source
    original = source.dataloader
    source.dataloader = lambda: wrapper(original())
    return lambda: vars(source).pop("dataloader", None)


def rank_zero_warn(message: str) -> None:
    """Warns on rank 0. Reason: see :func:`rank_zero_info`."""
    from lightning_utilities.core.rank_zero import rank_zero_warn

    rank_zero_warn(message)


def rank_zero_info(message: str) -> None:
    """Logs on rank 0. Reason: Lightning's two twins each export this; the shared package is the one both have."""
    from lightning_utilities.core.rank_zero import rank_zero_info

    rank_zero_info(message)
