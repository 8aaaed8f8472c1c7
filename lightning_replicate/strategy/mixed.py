"""Sharded modules beside replicated ones: what the strategy does for them. Part of
:class:`~lightning_replicate.strategy.lifecycle.ReplicateLifecycle`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import gather_numbers
from lightning_replicate.core.api import Options, ReplicateError
from lightning_replicate.core.buffers import BufferSync
from lightning_replicate.core.collect import is_fsdp1
from lightning_replicate.core.lazy import uninitialized
from lightning_replicate.core.replicate import states_in
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy.inputs import UnevenInputs
from lightning_replicate.strategy.lockstep import Lockstep
from lightning_replicate.strategy.optimizers import step_by_kind
from lightning_replicate.strategy.precision import clip_over_both_kinds, scale_together
from lightning_replicate.strategy.selection import Patterns, Selection, select, select_existing
from lightning_replicate.strategy.sharding import (
    ByHand,
    ShardPolicy,
    equal_start,
    has_sharded_parameters,
    make_equal,
    move_plain,
    prepare,
    shard,
    sharded_modules,
)
from lightning_replicate.strategy.steps import SkippedSteps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MixedModels:
    """The part of the strategy that knows FSDP2."""

    if TYPE_CHECKING:  # what the other parts and DDPStrategy bring
        accelerator: Any
        model: Any
        lightning_module: Any
        optimizers: Any
        root_device: torch.device
        world_size: int
        precision_plugin: Any
        setup_precision_plugin: Callable[[], None]
        _zero_loss: Callable[[], torch.Tensor]
        _skipped_error: Callable[[list[int]], ReplicateError]
        _states: list[ReplicateState]
        _options: Options
        _replicate: Patterns | None
        _local: Patterns
        _local_params: set[nn.Parameter]
        _shard: ShardPolicy
        _mesh: DeviceMesh | None
        _control: dist.ProcessGroup | None
        _skipped_steps: SkippedSteps
        _skipped: bool
        _uneven_inputs: UnevenInputs
        _shards_skip: bool
        _unscaled: list[Any]
        launcher: Any
        _lockstep: Lockstep | None
        _undo: list[Callable[[], Any]]
        _shard_buffers: BufferSync | None

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        module = self.lightning_module
        if ByHand.knows(module):  # sharded by `configure_model`, which would shard again
            module.configure_model = functools.partial(ByHand.mark_again, module)
            self._undo.append(lambda: vars(module).pop("configure_model", None))

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        module = self.lightning_module
        with equal_start(module, select_existing(module, self._local, "local")):
            yield
        if not ByHand.knows(module) and sharded_modules(module):
            ByHand.remember(module, states_in(module))

    def setup(self, trainer: Any) -> None:
        if any(map(is_fsdp1, self.lightning_module.modules())):
            raise ValueError(
                "The model holds modules wrapped with FullyShardedDataParallel, whose flat parameters clipping and"
                " checkpoints cannot read. Shard them with `fully_shard` (FSDP2), by hand or with"
                " `ReplicateStrategy(shard=...)`."
            )
        if trainer.state.fn == "fit":
            super().setup(trainer)  # type: ignore[misc]
            return
        # before it evaluates, Lightning would give all ranks rank 0's shards, and what is local
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        make_equal(self.model, select(self.model, self._local, "local", buffers=True).all_tensors())
        self.setup_precision_plugin()

    def _follow_buffers_of_shards(self, local: Selection) -> None:
        """Lets buffers within sharded modules follow rank 0 like those of replicated ones."""
        walked = {module for state in self._states for module in state.managed_modules()}
        walked.update(child for module in local.modules.values() for child in module.modules())
        sharded = sharded_modules(self.lightning_module).values()
        inside = {child for module in sharded for child in module.modules()} - walked
        rest = [found for found in self.lightning_module.named_modules() if found[1] in inside]
        if rest and self.world_size > 1:
            group = dist.group.WORLD
            assert group is not None and self._control is not None
            self._shard_buffers = BufferSync(
                self._options.buffers, lambda: rest, group, self._control, local.buffer_names()
            )
            self._shard_buffers.waits = True

    def _sharded(self) -> dict[str, Any]:
        """The sharded modules, also those that are about to be sharded."""
        return {**sharded_modules(self.lightning_module), **self._shard.select(self.lightning_module)}

    def model_to_device(self) -> None:
        sharded = self._sharded()
        if is_on_meta(self.model):
            _private.materialize(self.model, torch.device("cpu") if sharded else self.root_device)
        if uninitialized(self.model.modules()) and self.lightning_module.example_input_array is not None:
            initialize_lazy_modules(self.lightning_module)
        if not sharded:
            super().model_to_device()  # type: ignore[misc]
            return
        module = self.lightning_module
        local = select(module, self._local, "local", buffers=True)
        replicated = None if self._replicate is None else select(module, self._replicate, "replicate")
        assert self._mesh is not None
        shard(module, self._shard, self._mesh, local=local, replicated=replicated)  # before it needs memory on a device
        if any(map(_private.is_offloaded, sharded_modules(module).values())):
            move_plain(module, self.root_device)
        else:
            super().model_to_device()  # type: ignore[misc]
        prepare(sharded_modules(module).values())
        for loop in _private.evaluation_loops(module.trainer):
            if loop.inference_mode:  # FSDP2 cannot train on after it was evaluated in that mode
                loop.inference_mode = False
                self._undo.append(functools.partial(setattr, loop, "inference_mode", True))

    def _serve_sharded_modules(self) -> None:
        """Lets clipping, loss scaling and optimizers work over both kinds of parameters."""
        sharded = has_sharded_parameters(self.lightning_module)
        if sharded:
            _require_compatible(self._options.average, self.lightning_module.trainer)
            self._require_launcher_that_leaves_the_model()
            self._undo.append(step_by_kind(self.optimizers))
        if self.world_size > 1 and (sharded or self._local_params):
            self._undo.append(clip_over_both_kinds(self.precision_plugin, self._local_params))
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and self.world_size > 1 and (sharded or self._local_params):
            self._undo.append(scale_together(scaler))

    def _require_launcher_that_leaves_the_model(self) -> None:
        if self.world_size > 1 and type(self.launcher).__name__ == "_MultiProcessingLauncher":
            raise ValueError(
                "The launchers that start processes from a running program (spawn, fork, notebook) send the trained"
                " model back in one piece, which is not possible where parts of it are sharded. Run the program as a"
                " script (`start_method='popen'`), or with torchrun."
            )

    def _keep_in_lockstep(self, control: dist.ProcessGroup) -> None:
        sharded = sharded_modules(self.lightning_module)
        if sharded:
            if self._uneven_inputs == "join":
                raise ValueError(
                    "`uneven_inputs='join'` cannot serve sharded modules, which communicate in every forward. Use"
                    " `uneven_inputs='stop'`, or replicate them."
                )
            together = self._skipped_steps == "together"
            self._lockstep = Lockstep(
                sharded, lambda place: [number for (number,) in gather_numbers([place], control)], may_leave=together
            )

    def _step_in_lockstep(self, lockstep: Lockstep, step: Callable[[], Any]) -> Any:
        """A training step of a model with sharded modules, whose backward all ranks run alike.

        Sharded gradients are always divided by the number of ranks. So where some skip, the others' losses are scaled
        up, and replicated gradients are divided by the number of ranks, too.
        """
        automatic = self.lightning_module.automatic_optimization
        output, skipping = lockstep.run(step, may_skip=automatic)
        if not automatic:
            return output
        if skipping and self._skipped_steps == "error":
            raise self._skipped_error(skipping)
        all_skip = output is None if not skipping else self._skipped_steps == "together"
        all_skip = all_skip or len(skipping) == self.world_size
        self._skipped = self._shards_skip = all_skip
        if all_skip or output is None:
            return lockstep.anchor(self._zero_loss())
        averages = {state.average for state in self._states} or {self._options.average}
        averages_over_some = skipping and "participants" in averages
        factor = self.world_size / (self.world_size - len(skipping)) if averages_over_some else 1.0
        if factor != 1.0:  # what is local is not divided by the number of ranks
            for param in self._local_params:
                if param.requires_grad:
                    self._unscaled.append(param.register_hook(lambda grad: grad / factor))
        if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
            return {**output, "loss": lockstep.anchor(output["loss"], factor)}
        return lockstep.anchor(output, factor) if isinstance(output, torch.Tensor) else output


def initialize_lazy_modules(module: Any) -> None:
    """Gives lazy modules their parameters, by a forward of the LightningModule's ``example_input_array``."""
    example = module.example_input_array
    modes = {child: child.training for child in module.modules()}
    module.eval()  # no statistics are gathered
    try:
        with torch.no_grad():
            if isinstance(example, Mapping):
                module(**example)
            elif isinstance(example, (list, tuple)):
                module(*example)
            else:
                module(example)
    finally:
        for child, training in modes.items():
            child.training = training


def is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def _require_compatible(average: str, trainer: Any) -> None:
    """Checks that what was chosen can be had beside sharded parameters.

    Raises:
        ValueError: If it cannot.
    """
    if average not in ("participants", "world"):
        raise ValueError(
            f"`average={average!r}` cannot be had beside sharded modules, whose gradients FSDP2 divides by the number"
            f" of ranks. Use 'participants' or 'world'."
        )
    for callback in trainer.callbacks:
        if {"WeightAveraging", "StochasticWeightAveraging"} & {cls.__name__ for cls in type(callback).__mro__}:
            raise ValueError(
                f"{type(callback).__name__} copies the whole model, which is not possible where parts of it are"
                f" sharded. Replicate the whole model, or average the weights of checkpoints afterwards."
            )
