"""Puts the strategy's names into Lightning's registries, whenever Lightning is imported. Standard library only.

Lightning has no entry point for strategies. torch (2.5 and later) calls the entry points of the group
``torch.backends`` at the end of ``import torch``, which comes before Lightning fills its registries. The group is meant
for device backends; we use it because it is the only hook that runs without an import of ours, and it can be
switched off with ``LIGHTNING_REPLICATE_AUTOLOAD=0``, or for all such packages with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
``import lightning_replicate`` does the same.

An exception in here would break ``import torch`` for everybody. The package's ``__init__``, which calls this, catches
all, and so does everything here that runs inside somebody's import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from types import ModuleType
from typing import Any

_NAMES = {
    "replicate": "popen",
    "replicate_spawn": "spawn",
    "replicate_fork": "fork",
    "replicate_notebook": "fork",
}
_REGISTRIES = {  # module -> (its registry, our module with the strategy class for that twin of Lightning)
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_replicate.strategy.trainer"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "lightning_replicate.strategy.trainer_pl"),
}

_imported_before_torch = False


def autoload() -> None:
    """Registers the names now where Lightning is loaded, and upon its import elsewhere. Idempotent."""
    global _imported_before_torch
    _imported_before_torch = "torch" not in sys.modules
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def autoload_with_torch() -> None:
    """The entry point: what :func:`autoload` does, unless the user opted out."""
    if os.environ.get("LIGHTNING_REPLICATE_AUTOLOAD") != "0" or _imported_before_torch:
        return  # the import of the package, by torch or by the user, has registered
    # torch's loading of the entry point has imported the package; undo what that did, and let an explicit import later
    # on start afresh
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in ("lightning_replicate", __name__):
        sys.modules.pop(name, None)


def _register(module: ModuleType) -> None:
    attribute, home = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)
    if registry is None:  # still executing; the finder comes back when it is done
        return
    for name, start_method in _NAMES.items():
        if name not in registry:
            registry.register(
                name,
                _factory(home),
                description=f"Data-parallel training without a wrapper, started with `{start_method}`",
                start_method=start_method,
            )


def _factory(home: str) -> Any:
    def make_strategy(**options: Any) -> Any:
        return importlib.import_module(home).ReplicateStrategy(**options)

    return make_strategy


def _report(error: Exception) -> None:
    print(f"lightning-replicate could not register its strategy: {error!r}", file=sys.stderr)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets the other finders work, and registers after the found module was executed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _REGISTRIES:
            return None
        try:
            for finder in sys.meta_path:
                if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader)
                    return spec
        except Exception as error:
            _report(error)
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _register(module)
        except Exception as error:
            _report(error)
