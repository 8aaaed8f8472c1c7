"""What the strategy does at each point of Lightning's life cycle. No Lightning base class: the thin classes in
``trainer`` put this in front of ``DDPStrategy``, which brings launchers, environments, devices and collectives.

``DDPStrategy`` is the base, and not ``ParallelStrategy``, since Lightning asks for it by name where it decides about
samplers, ``sync_dist`` and compiled modules.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Optional

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.api import Average, BufferChoice, Options, Plan
from lightning_replicate.core.replicate import apply, equalize, states_in
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy.selection import Patterns, Selection, select

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class ReplicateLifecycle:
    """Data-parallel training without a wrapper.

    Args:
        replicate: Submodules whose gradients are averaged: names, globs, module classes, or a callable ``(name,
            module) -> bool``. Names and globs may also mean parameters. Default: what was marked by hand with
            :func:`~lightning_replicate.replicate` in ``configure_model``, else the whole model.
        local: What stays out: its parameters keep the gradients of their rank.
        bucket_cap_mb: Gradients are sent in buckets of about this size, in MiB.
        reduce_dtype: Data type in which gradients travel. Default: their own.
        average: What the sum of the ranks' gradients is divided by: ``"participants"`` (the ranks that had a loss in
            this step), ``"world"``, ``"sum"`` or ``"weighted"``.
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
        timeout: How long a collective may take.
        start_method: How processes start: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        find_unused_parameters: Accepted for DDP's sake; changes nothing.
        static_graph: Accepted for DDP's sake; changes nothing.
        gradient_as_bucket_view: Accepted for DDP's sake; changes nothing.
    """

    if TYPE_CHECKING:  # what DDPStrategy brings
        model: Any
        lightning_module: Any
        optimizers: Any
        root_device: torch.device
        parallel_devices: Any
        world_size: int
        num_nodes: int
        num_processes: int
        cluster_environment: Any
        _ddp_comm_state: Any
        _ddp_comm_hook: Any
        _ddp_comm_wrapper: Any
        _process_group_backend: str | None

    def __init__(
        self,
        replicate: Optional[Patterns] = None,
        local: Patterns = (),
        bucket_cap_mb: float = 25.0,
        reduce_dtype: Optional[torch.dtype] = None,
        average: Average = "participants",
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
        self._replicate = replicate
        self._local = local
        hook = ddp_comm_wrapper(ddp_comm_hook) if ddp_comm_wrapper and ddp_comm_hook else ddp_comm_hook
        self._options = Options(
            bucket_cap_mb=bucket_cap_mb,
            reduce_dtype=reduce_dtype,
            average=average,
            comm_hook=hook,
            comm_hook_state=ddp_comm_state,
            buffers=buffers,
        )
        self._states: list[ReplicateState] = []
        self._local_params: set[nn.Parameter] = set()
        self._checked: list[int] = []
        self._skipped = False
        self._rounds_before_backward: list[int] = []
        self._restore_late = False
        self._info = f"{find_unused_parameters=}, {static_graph=}, {gradient_as_bucket_view=}"
        if find_unused_parameters or static_graph or gradient_as_bucket_view:
            _private.rank_zero_info(
                f"ReplicateStrategy accepts DDP's `find_unused_parameters`, `static_graph` and"
                f" `gradient_as_bucket_view` and does not need them ({self._info})."
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

    def setup_distributed(self) -> None:
        super().setup_distributed()  # type: ignore[misc]
        atexit.register(_destroy_process_groups)
        self._require_world_size(dist.get_world_size())

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
        self._restore_late = self._restore_late or (self.model is not None and _is_on_meta(self.model))
        return self._restore_late

    def model_to_device(self) -> None:
        if _is_on_meta(self.model):
            _private.materialize(self.model, self.root_device)
        super().model_to_device()  # type: ignore[misc]

    def configure_ddp(self) -> None:
        """Nothing is wrapped. Modules are marked after the optimizers were made: see :meth:`setup_optimizers`."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self._mark_modules()
        self._check_optimizers()

    def _mark_modules(self) -> None:
        root = self.lightning_module
        group = dist.group.WORLD
        assert group is not None
        by_hand = states_in(root)
        for state in by_hand:
            state.validate()
            state.refresh()  # the model was moved and converted since
        local = select(root, self._local, "local")
        self._local_params = local.all_parameters()
        self._states = list(by_hand)
        if self._replicate is not None:
            chosen = select(root, self._replicate, "replicate")
            modules = {module: name for name, module in chosen.modules.items()}
            if modules:
                self._apply(modules, local)
            if chosen.params:  # marked on the model itself, which owns them
                inside = list(root.children())
                others = set(dict(root.named_parameters()).values()) - set(chosen.params.values())
                self._apply({root: ""}, local, ignored_modules=inside, ignored_params=others)
        elif not by_hand:
            self._apply({root: ""}, local)
        equalize(root, local_params=self._local_params, local_modules=local.modules.values(), process_group=group)

    def _apply(
        self,
        modules: dict[nn.Module, str],
        local: Selection,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_params: Iterable[nn.Parameter] = (),
    ) -> None:
        whole_model = self._replicate is None
        self._states.append(
            apply(
                list(modules),
                self._options,
                process_group=dist.group.WORLD,
                ignored_modules=[*local.modules.values(), *ignored_modules],
                ignored_params=[*local.params.values(), *ignored_params],
                names=modules,
                partition=_by_optimizer(self.optimizers) if whole_model and len(self.optimizers) > 1 else None,
            )
        )

    def _check_optimizers(self) -> None:
        """Every trainable parameter of every optimizer is replicated, or local on purpose.

        Raises:
            ValueError: With the names of those that are neither.
        """
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        seen = [id(param) for params in groups for param in params]
        if seen == self._checked:
            return
        names = {param: name for name, param in self.lightning_module.named_parameters()}
        managed = {param for state in self._states for param in state.parameters()} | self._local_params
        unmanaged: list[str] = []
        for params in groups:
            for param in params:
                if param.requires_grad and param not in managed:
                    shape = tuple(param.shape)
                    unmanaged.append(
                        names.get(param, f"a parameter of shape {shape} that is not, or no longer, in the model")
                    )
        if unmanaged:
            listed = ", ".join(unmanaged[:10]) + (", ..." if len(unmanaged) > 10 else "")
            raise ValueError(
                f"{len(unmanaged)} trainable parameters of the optimizers are neither replicated nor local, so each"
                f" rank would train its own: {listed}. Add them to `ReplicateStrategy(replicate=...)` or mark their"
                f" module with `replicate()`, or name them in `local=...` if each rank shall keep its own. A parameter"
                f" that was replaced after the optimizer was made must be given to the optimizer anew."
            )
        self._checked = seen

    # ---- one step ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_the_model()
        for state in self._states:
            state.pre_forward()
        self._skipped = False
        output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if output is None and self.lightning_module.automatic_optimization and self.world_size > 1:
            # with a loss that reaches nothing, this rank's backward, scaler and optimizer step run like the others'
            self._skipped = True
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    def _follow_the_model(self) -> None:
        """Between steps ranks may communicate, so new parameters become equal before they are used."""
        for state in self._states:
            if state.has_new_parameters:
                state.refresh()
                self._checked = []
        self._check_optimizers()

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        self._rounds_before_backward = [state.closed_rounds for state in self._channels()]

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        # a backward that reached no replicated parameter has not closed its round
        for state, before in zip(self._channels(), self._rounds_before_backward, strict=True):
            if state.closed_rounds == before:
                state.close_round(took_part=not self._skipped)

    def _channels(self) -> list[ReplicateState]:
        """One state for each process group."""
        return list({id(state.channel): state for state in self._states if state.active}.values())

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(state.no_sync())
            yield

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_the_model()
        return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    # ---- buffers ----------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
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
        for state in self._states:
            state.sync_buffers()

    # ---- what a person looks at -------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[ReplicateState, ...]:
        """The states of all ``replicate()`` calls on the model, by hand or by this strategy. Empty outside of fit."""
        return tuple(self._states)

    def plan(self) -> Plan:
        """What is reduced: bucket by bucket, with parameter names, data types and bytes."""
        plans = [state.plan() for state in self._states]
        return Plan(
            buckets=tuple(bucket for plan in plans for bucket in plan.buckets),
            world_size=self.world_size,
            frozen=tuple(name for plan in plans for name in plan.frozen),
        )

    # ---- the end ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        for state in {*self._states, *(states_in(self.lightning_module) if self.lightning_module else ())}:
            state.remove()
        self._states = []
        self._local_params = set()
        self._checked = []
        self._restore_late = False
        super().teardown()  # type: ignore[misc]


def _by_optimizer(optimizers: Iterable[Any]) -> Callable[[nn.Parameter], int]:
    """One group per optimizer; what is in none of them goes with the first."""
    numbers: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                numbers.setdefault(param, number)
    return lambda param: numbers.get(param, 0)


def _is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def _destroy_process_groups() -> None:
    # a group that is left to the interpreter's end makes NCCL warn, and may wait for ranks that are gone
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
