"""What the strategy does in each step: inputs, skipped steps, backward, the optimizer's step. Part of
:class:`~lightning_replicate.strategy.lifecycle.ReplicateLifecycle`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate import _private
from lightning_replicate.core.agreement import gather_flags, gather_numbers, gather_objects, union
from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.buffers import BufferSync
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy.inputs import EndTogether, NoBatch, UnevenInputs
from lightning_replicate.strategy.lockstep import Lockstep
from lightning_replicate.strategy.marking import parameters_of_optimizers, require_managed
from lightning_replicate.strategy.precision import closure_for_scaler
from lightning_replicate.strategy.sharding import sharded_modules
from lightning_replicate.strategy.stopping import StopTogether

SkippedSteps = Literal["participants", "together", "error"]
"""What happens when ``training_step`` returns ``None`` on some ranks."""


class Steps:
    """The part of the strategy that runs in every step."""

    if TYPE_CHECKING:  # what the other parts and DDPStrategy bring
        lightning_module: Any
        optimizers: Any
        root_device: torch.device
        world_size: int
        precision_plugin: Any
        _states: list[ReplicateState]
        _local_params: set[nn.Parameter]
        _control: dist.ProcessGroup | None
        _stopping: StopTogether | None
        _lockstep: Lockstep | None
        _shards_skip: bool
        _shard_buffers: BufferSync | None
        _step_in_lockstep: Callable[[Lockstep, Callable[[], Any]], Any]
        _without_grad: list[torch.Tensor]
        _unscaled: list[Any]
        _skipped_steps: SkippedSteps
        _uneven_inputs: UnevenInputs
        _training_data: EndTogether | None
        _joins: bool
        _undo: list[Callable[[], Any]]
        combined_loader: type
        _checked: list[tuple[int, bool]]
        _skipped: bool
        _rounds_before_backward: list[int]

    # ---- collectives of Lightning -----------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Lightning averages the sample counts of ranks as whole numbers, which cuts off a half where ranks evaluate
        # other numbers of samples
        averages = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)
        if averages and isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and not tensor.is_complex():
            # what is logged keeps its type when it is divided by the mean
            return super().reduce(tensor.double(), group, reduce_op).to(torch.get_default_dtype())  # type: ignore[misc]
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    # ---- inputs -----------------------------------------------------------------------------------------------

    def _end_epochs_together(self, control: dist.ProcessGroup) -> None:
        """Lets ranks agree where epochs end, from the first loader that Lightning asks for in this run."""
        module, gather = self.lightning_module, lambda numbers: gather_numbers(numbers, control)
        training_data = EndTogether(self._uneven_inputs, gather, self._require_uneven_can_be_served)
        evaluation_data = EndTogether("error", gather)  # where sharded modules communicate in every forward
        self._training_data, self._joins = training_data, False

        def combined(loaders: Any, mode: str) -> Any:
            return loaders if isinstance(loaders, self.combined_loader) else self.combined_loader(loaders, mode)

        def agree(loaders: Any) -> Any:
            return training_data.agree(combined(loaders, "max_size_cycle"))

        def agree_if_sharded(loaders: Any) -> Any:
            return evaluation_data.agree(combined(loaders, "sequential")) if sharded_modules(module) else loaders

        self._undo.append(_private.wrap_loaders_of(module.trainer.fit_loop, agree))
        for loop in _private.evaluation_loops(module.trainer):
            self._undo.append(_private.wrap_loaders_of(loop, agree_if_sharded))

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        module = self.lightning_module
        if self._training_data is None or not (module.trainer.training or sharded_modules(module)):
            return dataloader
        return self._training_data.part(dataloader)

    def _require_uneven_can_be_served(self) -> None:
        if self._uneven_inputs != "join":
            return
        if not self.lightning_module.automatic_optimization:
            raise ValueError(
                "`uneven_inputs='join'` needs automatic optimization: a rank without a batch cannot know how many"
                " backwards the others make. Use `uneven_inputs='stop'`."
            )
        if "dataloader_iter" in inspect.signature(self.lightning_module.training_step).parameters:
            raise ValueError(
                "`uneven_inputs='join'` cannot serve a `training_step` that takes `dataloader_iter`: it would fetch"
                " where there is no batch. Use `uneven_inputs='stop'`."
            )
        self._joins = True

    def _require_same_logged(self) -> None:
        """A rank that had no batch has logged nothing, and would not take part when the others reduce what they did."""
        if not self._joins:
            return
        trainer = self.lightning_module.trainer
        by_rank = gather_objects(_private.logged_for_epoch(trainer), self._control)
        every = set().union(*by_rank)
        for rank, names in enumerate(by_rank):
            missing = sorted(every - set(names))
            if missing:
                raise ReplicateError(
                    f"Rank {rank} logged no {', '.join(map(repr, missing))} in epoch {trainer.current_epoch}, and other"
                    f" ranks reduce that over all ranks at the epoch's end. With `uneven_inputs='join'` every rank"
                    f" needs a batch in which it logs; or use `uneven_inputs='stop'`, or log without `sync_dist`."
                )

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch if isinstance(batch, NoBatch) else super().batch_to_device(batch, *args, **kwargs)  # type: ignore[misc]

    # ---- one step ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_the_model()
        if self._shard_buffers is not None:
            self._shard_buffers.send_due()
        for state in self._states:
            state.send_held_buffers()
            state.pre_forward()
        has_batch = not (args and isinstance(args[0], NoBatch))
        self._skipped = False
        step = super().training_step  # type: ignore[misc]
        if self._lockstep is not None:
            return self._step_in_lockstep(self._lockstep, lambda: step(*args, **kwargs))
        output = step(*args, **kwargs) if has_batch else None
        if not self.lightning_module.automatic_optimization or self.world_size == 1:
            return output
        # a rank that has run out of data does not skip a step, it has none
        self._skipped = self._agree_on_skipping(has_batch and output is None) or not has_batch
        if not self._skipped:
            return output
        # with a loss that reaches nothing, this rank's backward, scaler and optimizer step run like the others'
        return self._zero_loss()

    def _zero_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def _agree_on_skipping(self, skips: bool) -> bool:
        """Whether this rank skips the step."""
        if self._skipped_steps == "participants" or self._control is None:
            return skips
        table = gather_flags([skips], self._control)
        skipping = [rank for rank, (skipped,) in enumerate(table) if skipped]
        if skipping and self._skipped_steps == "error":
            raise self._skipped_error(skipping)
        return bool(skipping)

    def _skipped_error(self, skipping: list[int]) -> ReplicateError:
        return ReplicateError(
            f"`training_step` returned None on rank {', '.join(map(str, skipping))} in step"
            f" {self.lightning_module.global_step}. Return a loss, or allow it with"
            f" `ReplicateStrategy(skipped_steps='participants')` or `'together'`."
        )

    def set_weight(self, weight: float) -> None:
        """Sets how much this rank's loss counts, for ``average="weighted"``. Call it in every ``training_step``.

        The loss is taken for a mean over samples (or tokens) whose number is the weight; the step then equals one
        process that sees the samples of all ranks, and of all batches that are accumulated.

        Args:
            weight: A number that is not negative.

        Raises:
            ValueError: If no replicated module uses ``average="weighted"``.
        """
        weighted = [state for state in self._states if state.average == "weighted"]
        if not weighted:
            raise ValueError("A weight needs `ReplicateStrategy(average='weighted')`.")
        module = self.lightning_module
        divided_by = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        for state in weighted:
            state.set_weight(weight, scale=divided_by)

    def average_gradients(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Averages gradients as they are in ``.grad`` now, wherever they came from. Collective.

        For gradients that no backward brings, such as those of gradient surgery; see
        :meth:`~lightning_replicate.ReplicateState.average_gradients`.

        Args:
            params: The parameters; those that are not replicated are left out. Default: all.
        """
        chosen = None if params is None else list(params)
        for state in self._states:
            state.offer_gradients(chosen)
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(state.sync())
            for state in self._channels()[:1]:  # a round is closed on all process groups together
                state.close_round(took_part=False)

    def _follow_the_model(self) -> None:
        """Between steps ranks may communicate, so new parameters become equal before they are used."""
        for state in self._states:
            if state.has_new_parameters:
                state.refresh()
                self._checked = []
        self._check_optimizers()

    def _check_optimizers(self) -> None:
        seen = [(id(param), param.requires_grad) for param in parameters_of_optimizers(self.optimizers)]
        if seen != self._checked:
            managed = {param for state in self._states for param in state.parameters()} | self._local_params
            managed.update(param for state in self._states for param in state.uninitialized_parameters())
            require_managed(self.optimizers, self.lightning_module, managed)
            self._checked = seen

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._shards_skip and self._lockstep is not None:
            self._without_grad = [param for param in self._lockstep.params if param.grad is None]
        channels = self._channels()
        self._rounds_before_backward = [state.closed_rounds for state in channels]
        if not closure_loss.requires_grad:
            for state in channels:  # backward is about to raise: the other ranks must not wait for this one
                if state.requires_gradient_sync:
                    state.reset()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        for param in self._without_grad:  # nobody had a gradient; FSDP2 has reduced zeros
            param.grad = None
        self._without_grad = []
        for handle in self._unscaled:
            handle.remove()
        self._unscaled = []
        self._shards_skip = False
        # a backward that reached no replicated parameter has not closed its round
        for state, before in zip(self._channels(), self._rounds_before_backward, strict=True):
            if state.closed_rounds == before:
                assert state.channel is not None
                state.channel.close_without_backward(took_part=not self._skipped)

    def _channels(self) -> list[ReplicateState]:
        """One state for each process group."""
        return list({id(state.channel): state for state in self._states if state.active}.values())

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(state.no_sync())
            yield

    def _on_any_rank(self, flag: bool) -> bool:
        if self._control is None or not self._local_params:
            return flag
        return union([flag], self._control)[0]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        self._follow_the_model()

        if getattr(self.precision_plugin, "scaler", None) is not None:
            closure = closure_for_scaler(optimizer, closure, self._on_any_rank)
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)  # type: ignore[misc]
        if self._shard_buffers is not None:
            self._shard_buffers.after_round()
        return result
