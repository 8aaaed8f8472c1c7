"""Data-parallel training for PyTorch Lightning without a wrapper.

Importing this package is cheap: torch and Lightning are loaded when a name is used. It also puts the strategy's name
into Lightning's registries, for environments in which torch's start-up hook is off.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_replicate.core.api import BucketPlan, Plan, ReplicateError, RoundStats
    from lightning_replicate.core.clipping import clip_grad_norm_, clip_grad_value_, grad_norm, total_grad_norm
    from lightning_replicate.core.replicate import replicate
    from lightning_replicate.core.state import ReplicateState
    from lightning_replicate.strategy.trainer import ReplicateStrategy

_HOMES = {
    "BucketPlan": "lightning_replicate.core.api",
    "Plan": "lightning_replicate.core.api",
    "ReplicateError": "lightning_replicate.core.api",
    "ReplicateState": "lightning_replicate.core.state",
    "ReplicateStrategy": "lightning_replicate.strategy.trainer",
    "RoundStats": "lightning_replicate.core.api",
    "clip_grad_norm_": "lightning_replicate.core.clipping",
    "clip_grad_value_": "lightning_replicate.core.clipping",
    "grad_norm": "lightning_replicate.core.clipping",
    "replicate": "lightning_replicate.core.replicate",
    "total_grad_norm": "lightning_replicate.core.clipping",
}

__all__ = [
    "BucketPlan",
    "Plan",
    "ReplicateError",
    "ReplicateState",
    "ReplicateStrategy",
    "RoundStats",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "grad_norm",
    "replicate",
    "total_grad_norm",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(by: str = "autoload_with_torch") -> None:
    """Entry point of the group ``torch.backends``, called at the end of ``import torch``. Never raises."""
    try:
        getattr(importlib.import_module("lightning_replicate._autoload"), by)()
    except Exception as error:  # an exception here would break `import torch` for everybody
        print(f"lightning-replicate could not register its strategy: {error!r}", file=sys.stderr)


_register("autoload")
