"""Checkpoints: Lightning's ordinary files, with what communication hooks have learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_replicate import _private
from lightning_replicate.core.state import ReplicateState

_KEY = "lightning_replicate"


class Checkpoints:
    """The part of the strategy that saves and loads."""

    if TYPE_CHECKING:  # what the other parts and DDPStrategy bring
        global_rank: int
        world_size: int
        _states: list[ReplicateState]
        _hook_states_after_fit: list[dict[str, Any] | None]
        _model_averager: Any

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint:  # not only weights
            extra = self._hook_states()
            if extra:
                checkpoint[_KEY] = extra
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        extra = checkpoint.get(_KEY)
        if extra:
            self._load_hook_states(extra)

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
