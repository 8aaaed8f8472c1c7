"""What the strategy does at each point of Lightning's life cycle. No Lightning base class: the thin classes in
``trainer`` put this in front of ``DDPStrategy``, which brings launchers, environments, devices and collectives.

``DDPStrategy`` is the base, and not ``ParallelStrategy``, since Lightning asks for it by name where it decides about
samplers, ``sync_dist`` and compiled modules.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Optional, Union, get_args

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import gather_objects, sum_later
from lightning_replicate.core.api import Average, BucketCap, BufferChoice, Options, Plan, UnaveragedGradients
from lightning_replicate.core.buffers import BufferSync
from lightning_replicate.core.failures import forget_failures, note_failure
from lightning_replicate.core.replicate import states_in
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy.checkpoint import Checkpoints
from lightning_replicate.strategy.inputs import EndTogether, UnevenInputs
from lightning_replicate.strategy.lockstep import Lockstep
from lightning_replicate.strategy.marking import mark
from lightning_replicate.strategy.mesh import ShardSize, data_mesh
from lightning_replicate.strategy.mixed import MixedModels, is_on_meta
from lightning_replicate.strategy.monitors import Monitors
from lightning_replicate.strategy.rendezvous import attempt_store, store_outlives_ranks
from lightning_replicate.strategy.selection import Patterns, select
from lightning_replicate.strategy.sharding import ShardPatterns, ShardPolicy, sharded_modules
from lightning_replicate.strategy.steps import SkippedSteps, Steps
from lightning_replicate.strategy.stopping import StopTogether

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_SECONDS_TO_REST = 0.05  # of which gloo's threads need microseconds


class ReplicateLifecycle(MixedModels, Steps, Checkpoints):
    """Data-parallel training without a wrapper.

    Args:
        replicate: Submodules whose gradients are averaged: names, globs, module classes, or a callable ``(name,
            module) -> bool``. Names and globs may also mean parameters. Default: what was marked by hand with
            :func:`~lightning_replicate.replicate` in ``configure_model``, else the whole model.
        local: What stays out: its parameters keep the gradients of their rank, its buffers are each rank's own and may
            have another shape on each. Names and globs may also mean parameters and buffers.
        shard: Submodules that are sharded with FSDP2 (``fully_shard``): patterns, or a mapping from pattern to
            arguments of ``fully_shard`` for what it matches. Children are sharded before parents. The rest is
            replicated.
        shard_size: How many ranks share one copy of the sharded parameters: ``"world"``, or a number that divides it.
            Replicated parts average over all ranks in any case. ``self.device_mesh`` has the dimensions ``("shard",)``
            or ``("replicate", "shard")``.
        mp_policy: ``fully_shard``'s mixed precision policy, for everything in ``shard``.
        reshard_after_forward: See ``fully_shard``, for everything in ``shard``.
        offload_policy: ``fully_shard``'s offload policy, for everything in ``shard``.
        save_distributed_checkpoint: Whether a checkpoint is a folder into which every rank writes its part, instead of
            one ordinary file that rank 0 writes.
        bucket_cap_mb: Gradients are sent in buckets of about this size, in MiB; ``"auto"`` measures and plans them.
        reduce_dtype: Data type in which gradients travel. Default: their own.
        average: What the sum of the ranks' gradients is divided by: ``"participants"`` (the ranks that had a loss in
            this step), ``"world"``, ``"sum"`` or ``"weighted"``.
        skipped_steps: What happens when ``training_step`` returns ``None`` on some ranks. ``"participants"``: they
            contribute nothing, and the average is over the others. ``"together"``: all ranks skip the step (the micro-
            batch, under accumulation). ``"error"``: all ranks raise. All ranks take the optimizer step together.
        uneven_inputs: What happens when ranks' training loaders end at different times. ``"stop"``: all ranks end the
            epoch after the same batch, when the first has no more. ``"join"``: ranks that have no more contribute
            nothing until the last is done. ``"error"``: all ranks raise.
        strict_unused: Whether a step that leaves a parameter without a gradient, on any rank, raises on all ranks, with
            the names.
        unaveraged_gradients: What happens when an optimizer is about to step with a gradient that was not averaged over
            ranks: ``"error"``, ``"warn"`` or ``"allow"``. See :meth:`average_gradients`.
        buffers: Which buffers follow rank 0 after set-up, and when: ``"auto"``, ``"step"``, ``"epoch"``, ``"start"``,
            names or a callable. See :mod:`lightning_replicate.core.buffers`.
        accelerator: See ``DDPStrategy``; usually set by the Trainer.
        parallel_devices: See ``DDPStrategy``; usually set by the Trainer.
        cluster_environment: See ``DDPStrategy``; usually set by the Trainer.
        checkpoint_io: See ``DDPStrategy``.
        precision_plugin: See ``DDPStrategy``.
        ddp_comm_state: First argument of the communication hook.
        ddp_comm_hook: DDP communication hook ``hook(state, bucket) -> Future``.
        ddp_comm_wrapper: Wraps the communication hook.
        model_averaging_period: See ``DDPStrategy``.
        process_group_backend: Backend of the default process group. Default: ``gloo`` on CPU, ``cpu:gloo,cuda:nccl``
            on CUDA, so that host tensors can travel too.
        timeout: How long a collective may take, and other ranks may take to come.
        start_method: How processes start: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        find_unused_parameters: Accepted for DDP's sake; changes nothing.
        static_graph: Accepted for DDP's sake; changes nothing.
        gradient_as_bucket_view: Accepted for DDP's sake; changes nothing.
    """

    if TYPE_CHECKING:  # what DDPStrategy brings
        model: Any
        lightning_module: Any
        optimizers: Any
        lr_scheduler_configs: Any
        root_device: torch.device
        parallel_devices: Any
        world_size: int
        global_rank: int
        num_nodes: int
        num_processes: int
        cluster_environment: Any
        precision_plugin: Any
        _process_group_backend: str | None

    def __init__(
        self,
        replicate: Optional[Patterns] = None,
        local: Patterns = (),
        shard: ShardPatterns = (),
        shard_size: ShardSize = "world",
        mp_policy: Optional[MixedPrecisionPolicy] = None,
        reshard_after_forward: Union[bool, int, None] = None,
        offload_policy: Union[CPUOffloadPolicy, OffloadPolicy, None] = None,
        save_distributed_checkpoint: bool = False,
        bucket_cap_mb: BucketCap = 25.0,
        reduce_dtype: Optional[torch.dtype] = None,
        average: Average = "participants",
        skipped_steps: SkippedSteps = "participants",
        uneven_inputs: UnevenInputs = "stop",
        strict_unused: bool = False,
        unaveraged_gradients: UnaveragedGradients = "error",
        buffers: BufferChoice = "auto",
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
        ddp_comm_state: Optional[object] = None,
        ddp_comm_hook: Optional[Callable] = None,
        ddp_comm_wrapper: Optional[Callable] = None,
        model_averaging_period: Optional[int] = None,
        process_group_backend: Optional[str] = None,
        timeout: Optional[timedelta] = _DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__(
            accelerator=accelerator,  # type: ignore[call-arg]
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._given_timeout = timeout
        self._replicate = replicate
        self._local = local
        given = {
            "mp_policy": mp_policy,
            "reshard_after_forward": reshard_after_forward,
            "offload_policy": offload_policy,
        }
        self._shard = ShardPolicy(shard, {name: value for name, value in given.items() if value is not None})
        self._shard_size = shard_size
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._mesh: DeviceMesh | None = None
        hook = ddp_comm_wrapper(ddp_comm_hook) if ddp_comm_wrapper and ddp_comm_hook else ddp_comm_hook
        self._options = Options(
            bucket_cap_mb=bucket_cap_mb,
            reduce_dtype=reduce_dtype,
            average=average,
            comm_hook=hook,
            comm_hook_state=ddp_comm_state,
            buffers=buffers,
            strict_unused=strict_unused,
            unaveraged_gradients=unaveraged_gradients,
        )
        if skipped_steps not in get_args(SkippedSteps):
            raise ValueError(f"`skipped_steps` must be one of {get_args(SkippedSteps)}, got {skipped_steps!r}.")
        if uneven_inputs not in get_args(UnevenInputs):
            raise ValueError(f"`uneven_inputs` must be one of {get_args(UnevenInputs)}, got {uneven_inputs!r}.")
        self._skipped_steps = skipped_steps
        self._uneven_inputs = uneven_inputs
        self._states: list[ReplicateState] = []
        self._local_params: set[nn.Parameter] = set()
        self._checked: list[tuple[int, bool]] = []
        self._skipped = False
        self._rounds_before_backward: list[int] = []
        self._hook_states_after_fit: list[dict[str, Any] | None] = []
        self._control: dist.ProcessGroup | None = None  # for small messages of the strategy's own
        self._training_data: EndTogether | None = None
        self._joins = False
        self._stopping: StopTogether | None = None
        self._lockstep: Lockstep | None = None
        self._shard_buffers: BufferSync | None = None
        self._shards_skip = False
        self._without_grad: list[torch.Tensor] = []
        self._unscaled: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        self._restore_late = False
        if find_unused_parameters or static_graph or gradient_as_bucket_view:
            _private.rank_zero_info(
                f"ReplicateStrategy accepts DDP's `find_unused_parameters`, `static_graph` and"
                f" `gradient_as_bucket_view` and does not need them ({find_unused_parameters=}, {static_graph=},"
                f" {gradient_as_bucket_view=})."
            )

    # ---- environment ------------------------------------------------------------------------------------------

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend:
            return self._process_group_backend
        if self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()  # type: ignore[misc]

    def setup_environment(self) -> None:
        self._require_world_size(self.world_size)  # what the environment says, before a device is looked up by it
        if self.root_device.type in ("mps", "xla", "meta"):
            raise ValueError(
                f"The replicate strategy needs torch.distributed, which does not serve {self.root_device.type!r}"
                f" devices. Use `Trainer(accelerator='cpu')`, or `strategy='auto'` on this accelerator."
            )
        super().setup_environment()  # type: ignore[misc]
        self._mesh = data_mesh(self.root_device, self.world_size, self._shard_size, self.num_processes)
        _private.set_device_mesh(self.lightning_module, self._mesh)
        if self.world_size > 1:
            timeout = _private.process_group_timeout(dist.group.WORLD)
            self._control = dist.new_group(backend="gloo", timeout=timeout)
            self._end_epochs_together(self._control)

    def setup_distributed(self) -> None:
        if store_outlives_ranks() and not dist.is_initialized():
            self._begin_attempt()
        super().setup_distributed()  # type: ignore[misc]  # leaves a process group that is there as it is
        atexit.unregister(_end_process_groups)  # of an earlier fit
        atexit.register(_end_process_groups)
        forget_failures()
        self._require_world_size(dist.get_world_size())

    def _begin_attempt(self) -> None:
        """Makes the default process group in a part of the store that no dead rank has written to."""
        self.set_world_ranks()  # type: ignore[attr-defined]
        rank, environment = self.global_rank, self.cluster_environment
        store = attempt_store(
            environment.main_address,
            environment.main_port,
            rank,
            self.world_size,
            self._given_timeout or _DEFAULT_TIMEOUT,
        )
        backend = self._get_process_group_backend()
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=self.world_size,
            timeout=self._given_timeout,
            device_id=None if self.root_device.type == "cpu" else self.root_device,
        )
        _private.rank_zero_info(f"distributed_backend={backend}, {self.world_size} processes")

    def _require_world_size(self, launched: int) -> None:
        believed = self.num_nodes * self.num_processes
        if believed != launched:
            raise RuntimeError(
                f"The Trainer was told of {believed} processes (devices={self.num_processes} x"
                f" num_nodes={self.num_nodes}), but {launched} were launched together. Give the Trainer the numbers"
                f" that the launcher has (torchrun: --nproc-per-node and --nnodes; SLURM: --ntasks-per-node and"
                f" --nodes)."
            )

    # ---- set-up -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # values cannot be loaded into a model that has no memory yet
        self._restore_late = self._restore_late or (self.model is not None and is_on_meta(self.model))
        return self._restore_late or self._save_distributed_checkpoint

    def configure_ddp(self) -> None:
        """Nothing is wrapped. Modules are marked after the optimizers were made: see :meth:`setup_optimizers`."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self._mark_modules()
        self._check_optimizers()
        self._serve_sharded_modules()
        control = self._control
        if control is not None:
            self._stopping = StopTogether(trainer, lambda flags: sum_later(flags, control), self.world_size)
            self._stopping.before_epoch_end = self._require_same_logged
            monitors = Monitors(trainer, lambda thing: gather_objects(thing, control))
            self._undo.append(monitors.follow_mean(self.lr_scheduler_configs))
            self._stopping.after_metrics = monitors.compare
            self._keep_in_lockstep(control)

    def _mark_modules(self) -> None:
        local = select(self.lightning_module, self._local, "local", buffers=True)
        self._local_params = local.all_parameters()
        self._states = mark(self.lightning_module, self._replicate, local, self._options, self.optimizers)
        for state in self._states:
            state.hold_buffers()
        self._follow_buffers_of_shards(local)

    # ---- buffers ----------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        if self._stopping is not None:
            self._stopping.validated()
        self._sync_buffers()
        super().on_validation_start()  # type: ignore[misc]

    def on_test_start(self) -> None:
        self._sync_buffers()
        super().on_test_start()  # type: ignore[misc]

    def on_predict_start(self) -> None:
        self._sync_buffers()
        super().on_predict_start()  # type: ignore[misc]

    def on_train_end(self) -> None:
        self._sync_buffers()
        super().on_train_end()  # type: ignore[misc]

    def _sync_buffers(self) -> None:
        if self._shard_buffers is not None:
            self._shard_buffers.before_reading()
        for state in self._states:
            state.sync_buffers()

    # ---- what a person looks at -------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[ReplicateState, ...]:
        """The states of all ``replicate()`` calls on the model, by hand or by this strategy. Empty outside of fit."""
        return tuple(self._states)

    def plan(self) -> Plan:
        """What is reduced: bucket by bucket, with parameter names, data types and bytes."""
        return Plan.joined([state.plan() for state in self._states], self.world_size)

    # ---- the end ----------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        note_failure(exception)  # before this rank's connections end, by which the others notice
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        if self._states:
            self._hook_states_after_fit = [state.hook_state_dict() for state in self._states]  # may be saved after fit
        for state in [*self._states, *(states_in(self.lightning_module) if self.lightning_module else ())]:
            state.remove(give_back=False)  # may follow an exception on this rank alone
        self._states = []
        self._local_params = set()
        self._checked = []
        self._restore_late = False
        if self._stopping is not None:
            self._stopping.remove()
        if self._lockstep is not None:
            self._lockstep.remove()
        self._lockstep = self._shard_buffers = None
        if self.lightning_module:  # an exception may have left them as they are within a step
            _private.reset_sharded(sharded_modules(self.lightning_module).values())
        for undo in self._undo:
            undo()
        self._undo = []
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group(self._control)
        self._stopping = self._control = self._training_data = None
        super().teardown()  # type: ignore[misc]


def _end_process_groups() -> None:
    """Leaves no thread of a process group to the interpreter's end.

    gloo's threads let go of the last collective's tensors after it was waited for, and need the interpreter for that.
    If it is already ending, torch 2.13 aborts the process, after a training that went well (pytorch#190489). And a
    group that is left to the interpreter's end makes NCCL warn, and may wait for ranks that are gone.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if hasattr(sys, "last_value"):  # an exception may have left collectives unfinished: joining would wait for them
        return
    gc.collect()  # a group joins its threads with its last reference, and trainers, strategies and models are cycles
    time.sleep(_SECONDS_TO_REST)  # for groups that something at module level still holds
