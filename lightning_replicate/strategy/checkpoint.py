"""Checkpoints: Lightning's ordinary files, whatever is sharded. Part of
:class:`~lightning_replicate.strategy.lifecycle.ReplicateLifecycle`.

Sharded tensors are gathered one at a time and kept on rank 0 only; on loading every rank cuts its own part out of the
file. With ``save_distributed_checkpoint=True`` every rank writes what it has into a folder, see :mod:`folder`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_replicate import _private
from lightning_replicate.core.agreement import gather_objects
from lightning_replicate.core.api import ReplicateError
from lightning_replicate.core.dtensor import is_dtensor
from lightning_replicate.core.state import ReplicateState
from lightning_replicate.strategy import folder

_KEY = "lightning_replicate"


class Checkpoints:
    """The part of the strategy that saves and loads."""

    if TYPE_CHECKING:  # what the other parts and DDPStrategy bring
        lightning_module: Any
        optimizers: Any
        global_rank: int
        world_size: int
        _states: list[ReplicateState]
        _model_averager: Any
        _hook_states_after_fit: list[dict[str, Any] | None]
        _save_distributed_checkpoint: bool

    # ---- saving -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        if self._save_distributed_checkpoint:
            return folder.plain_names(state)
        if any(map(is_dtensor, state.values())):
            return self._gathered(folder.plain_names(state))
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        if self._save_distributed_checkpoint:
            return folder.named_optimizer_state(self.lightning_module, optimizer, state)
        entries = {key: self._gathered(entry) if isinstance(entry, dict) else entry for key, entry in _entries(state)}
        return {**state, "state": entries} if entries else state

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Sharded tensors made whole on rank 0; other ranks take part and keep none. Collective if any is sharded."""
        whole = {key: self._gather(value) if is_dtensor(value) else value for key, value in state.items()}
        return folder.like(state, whole)

    def _gather(self, tensor: Any) -> torch.Tensor:
        on_device = tensor.to(tensor.device_mesh.device_type)  # offloaded ones cannot travel from where they are
        whole = on_device.full_tensor()
        return whole.cpu() if self.global_rank == 0 else torch.empty_like(whole, device="meta")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint:  # not only weights
            extra = self._hook_states()
            if extra:
                checkpoint[_KEY] = extra
        if self._save_distributed_checkpoint:
            path = Path(self.broadcast(os.fspath(filepath)))  # type: ignore[attr-defined]
            folder.save(checkpoint, path)
            return
        if self.global_rank == 0 and folder.is_folder(filepath):
            folder.remove(filepath)  # an earlier run saved in parts under this name
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        if folder.is_folder(filepath):
            if self.global_rank == 0:
                folder.remove(filepath)
            return
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    # ---- loading ----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._require_seen_by_all(checkpoint_path)
        if folder.is_folder(checkpoint_path):
            trusted = bool(weights_only)
            if self._save_distributed_checkpoint:  # the model is set up, each rank reads its parts
                fits = self.lightning_module.trainer.state.fn == "fit"
                optimizers = self.optimizers if fits else []
                return folder.load(checkpoint_path, self.lightning_module, optimizers, weights_only=trusted)
            return folder.load_whole(checkpoint_path, weights_only=trusted)
        extra = {} if weights_only is None else {"weights_only": weights_only}
        return super().load_checkpoint(checkpoint_path, **extra)  # type: ignore[misc]

    def _require_seen_by_all(self, path: Any) -> None:
        if self.world_size == 1 or not dist.is_initialized() or "://" in str(path):
            return
        seen = gather_objects(os.path.exists(path))
        if any(seen) and not all(seen):
            blind = [rank for rank, sees in enumerate(seen) if not sees]
            raise ReplicateError(
                f"Rank {', '.join(map(str, blind))} cannot see the checkpoint {str(path)!r}, which other ranks can. Put"
                f" it on a file system that all nodes share, or copy it to the same place on each."
            )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        own = module.state_dict()
        names = dict(zip(folder.plain_names(own), own, strict=True))
        saved = checkpoint["state_dict"]
        state = folder.like(saved, {})
        for plain, (key, value) in zip(folder.plain_names(saved), saved.items(), strict=True):
            name = names.get(plain, key)  # compiled here and not there, or the other way round
            state[name] = _cut(value, own.get(name))
        error: RuntimeError | None = None
        try:
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)  # type: ignore[misc]
        except RuntimeError as caught:
            error = caught
        self._require_fits_all(error)

    def _require_fits_all(self, error: RuntimeError | None) -> None:
        """Lets all ranks fail to load if one does: it may have a local buffer of another shape than rank 0's."""
        mine = None if error is None else str(error)
        errors = gather_objects(mine) if self.world_size > 1 and dist.is_initialized() else [mine]
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if failed and len(failed) < len(errors):
            raise ReplicateError(
                f"The checkpoint fits some ranks, and not rank {', '.join(map(str, failed))}: {errors[failed[0]]}\nA"
                f" checkpoint holds rank 0's value of a buffer that is each rank's own. Register it with"
                f" `persistent=False`, or put the rank's value into `checkpoint['state_dict']` in `on_load_checkpoint`."
            ) from error
        if error is not None:
            raise error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            _cut_optimizer_state(state, optimizer)
            for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})  # type: ignore[misc]
        for optimizer in self.optimizers:  # Lightning has moved all of it to the device
            for param, entry in optimizer.state.items():
                if is_dtensor(param) and isinstance(entry, dict):
                    entry.update({k: v.to(param.device) for k, v in entry.items() if is_dtensor(v)})
        extra = checkpoint.get(_KEY)
        if extra:
            self._load_hook_states(extra)

    # ---- communication hooks ----------------------------------------------------------------------------------

    def _hook_states(self) -> dict[str, Any]:
        """What every rank's communication hooks have learned. Collective; complete on rank 0."""
        mine = [state.hook_state_dict() for state in self._states] or self._hook_states_after_fit
        if self.world_size == 1 or not any(mine):
            return {}
        by_rank: list[Any] | None = [None] * self.world_size if self.global_rank == 0 else None
        dist.gather_object(mine, by_rank, dst=0)
        step = None if self._model_averager is None else self._model_averager.step
        return {"comm_hooks": by_rank, "model_averager_step": step}

    def _load_hook_states(self, saved: Mapping[str, Any]) -> None:
        by_rank = saved["comm_hooks"]
        if len(by_rank) != self.world_size:
            _private.rank_zero_info(
                f"The checkpoint holds the communication hooks' states of {len(by_rank)} ranks; rank r of these"
                f" {self.world_size} goes on with that of rank r mod {len(by_rank)}."
            )
        mine = by_rank[self.global_rank % len(by_rank)]
        for state, hook_state in zip(self._states, mine, strict=False):
            if hook_state is not None:
                state.load_hook_state_dict(hook_state)
        if self._model_averager is not None and saved["model_averager_step"] is not None:
            self._model_averager.step = saved["model_averager_step"]


def _entries(state: Mapping[str, Any]) -> Iterable[tuple[Any, Any]]:
    return state["state"].items() if isinstance(state.get("state"), dict) else ()


def _cut(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor, where ``like`` is sharded. Every rank has the whole, nothing is sent."""
    if not is_dtensor(like) or is_dtensor(value) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.to(like.device_mesh.device_type)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to(like.device)


def _cut_optimizer_state(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    by_number = folder.params_by_number(optimizer, state, strict=False)
    values = {
        number: {key: _cut(value, by_number.get(number)) for key, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for number, entry in _entries(state)
    }
    return {**state, "state": values} if values else dict(state)
