"""Checkpoints in parts: a folder of torch's distributed checkpoint (DCP), into which every rank writes what it has.

The format is that of Lightning's own sharding strategies: parameters and optimizer states under their names, and a file
``meta.pt`` with all the rest. :func:`load` reads parts into a model on any number of ranks, :func:`load_whole` and
:mod:`lightning_replicate.consolidate` make one ordinary checkpoint of a folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_replicate.strategy.marking import parameters_of_optimizers

_META = "meta.pt"


def is_folder(path: Any) -> bool:
    """Whether the path is a checkpoint in parts."""
    return Path(path).is_dir() and (Path(path) / _META).is_file()


def remove(path: Any) -> None:
    """Deletes a checkpoint in parts."""
    shutil.rmtree(path)


def plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state under the names that it has without ``torch.compile`` around submodules."""
    return like(state, {_plain_name(key): value for key, value in state.items()})


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {param: _plain_name(name) for name, param in module.named_parameters()}


def params_by_number(optimizer: Any, state: Mapping[str, Any], *, strict: bool) -> dict[Any, nn.Parameter]:
    """The optimizer's parameters by their numbers in a state of it; ``strict`` if it has as many for certain."""
    numbers = (number for group in state["param_groups"] for number in group["params"])
    return dict(zip(numbers, parameters_of_optimizers([optimizer]), strict=strict))


def like(state: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A module's state with other values: of the same class, with the versions that modules have noted."""
    made = OrderedDict(values)
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]
    return made


def named_optimizer_state(module: nn.Module, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state under the names of parameters instead of numbers; sharded tensors stay as they are.

    Args:
        module: The model, for names.
        optimizer: The optimizer.
        state: Its ``state_dict()``.
    """
    names = _names_of(module)
    by_number = {number: names[param] for number, param in params_by_number(optimizer, state, strict=True).items()}
    return {
        "state": {by_number.get(number, number): entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_number[n] for n in group["params"]]} for group in state["param_groups"]
        ],
    }


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint in parts. Collective. Until it is complete, an earlier one under this name stays whole.

    Args:
        checkpoint: Lightning's checkpoint, with sharded tensors in ``"state_dict"`` and named optimizer states.
        path: The folder.

    Raises:
        ValueError: If the path is not on a file system.
    """
    from torch.distributed.checkpoint import save as save_parts

    if "://" in str(path) or ":/" in str(path):
        raise ValueError(
            f"A checkpoint in parts needs a folder on a file system that all ranks see, got {str(path)!r}."
        )
    rest = dict(checkpoint)
    parts = {"state_dict": rest.pop("state_dict")}
    parts.update({f"optimizer_{number}": state for number, state in enumerate(rest.pop("optimizer_states", ()))})
    unfinished = path.with_name(f".{path.name}.unfinished")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    save_parts(parts, checkpoint_id=unfinished)
    if first:
        torch.save(rest, unfinished / _META)
        former = path.with_name(f".{path.name}.former")
        if path.exists():
            path.rename(former)
        unfinished.rename(path)
        if former.is_dir():
            shutil.rmtree(former)
        elif former.exists():
            former.unlink()
    dist.barrier()


def load(path: Any, module: nn.Module, optimizers: Sequence[Any], *, weights_only: bool = False) -> dict[str, Any]:
    """Reads a checkpoint in parts, each rank what it needs, into a model that is set up. Collective.

    Args:
        path: The folder.
        module: The model; its values change in place.
        optimizers: The optimizers whose states are wanted.
        weights_only: See ``torch.load``, for ``meta.pt``.

    Returns:
        Lightning's checkpoint, with sharded tensors. Names that only the model or only the folder has are kept apart
        from each other, so that loading it says so.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as load_parts

    saved = FileSystemReader(os.fspath(path)).read_metadata().state_dict_metadata
    prefix = "state_dict."
    own = plain_names(module.state_dict())
    parts: dict[str, Any] = {"state_dict": {key: value for key, value in own.items() if prefix + key in saved}}
    for number, optimizer in enumerate(optimizers):
        if any(key.startswith(f"optimizer_{number}.") for key in saved):
            parts[f"optimizer_{number}"] = _places_for(f"optimizer_{number}.", saved, module, optimizer)
    load_parts(parts, checkpoint_id=os.fspath(path))
    for key in saved:
        if key.startswith(prefix) and key.removeprefix(prefix) not in own:
            parts["state_dict"][key.removeprefix(prefix)] = torch.empty(0)
    return _joined(parts, Path(path), weights_only)


def _places_for(prefix: str, saved: Mapping[str, Any], module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Tensors into which an optimizer's saved state can be read: sharded like its parameters, empty otherwise."""
    names = _names_of(module)
    state: dict[str, dict[str, Any]] = {}
    for param in parameters_of_optimizers([optimizer]):
        start = f"{prefix}state.{names[param]}."
        for key, found in saved.items():
            if key.startswith(start):
                state.setdefault(names[param], {})[key.removeprefix(start)] = _place(found, param)
    groups = named_optimizer_state(
        module, optimizer, {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return {"state": state, "param_groups": _only_saved(groups["param_groups"], f"{prefix}param_groups", saved)}


def _only_saved(value: Any, key: str, saved: Mapping[str, Any]) -> Any:
    """What of nested collections the folder has under this key."""
    if key in saved or not isinstance(value, (dict, list)):
        return value
    if isinstance(value, list):
        return [_only_saved(item, f"{key}.{index}", saved) for index, item in enumerate(value)]
    known = (each.removeprefix(f"{key}.").split(".")[0] for each in saved if each.startswith(f"{key}."))
    return {name: _only_saved(value.get(name), f"{key}.{name}", saved) for name in dict.fromkeys(known)}


def _place(found: Any, param: torch.Tensor) -> Any:
    size = getattr(found, "size", None)
    if size is None:
        return None  # not a tensor
    dtype = found.properties.dtype
    return torch.zeros_like(param, dtype=dtype) if size == param.shape else torch.zeros(size, dtype=dtype)


def load_whole(path: Any, *, weights_only: bool = False) -> dict[str, Any]:
    """Reads a checkpoint in parts as one ordinary checkpoint, whole tensors on the CPU. Not collective.

    Args:
        path: The folder.
        weights_only: See ``torch.load``, for ``meta.pt``.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as work:
        dcp_to_torch_save(os.fspath(path), f"{work}/whole.pt")
        parts = torch.load(f"{work}/whole.pt", map_location="cpu", weights_only=True)
    return _joined(parts, Path(path), weights_only)


def consolidate(checkpoint_folder: str | os.PathLike[str], output_file: str | os.PathLike[str]) -> None:
    """Makes one ordinary checkpoint file of a folder that ``save_distributed_checkpoint=True`` wrote.

    Also as a command: ``python -m lightning_replicate.consolidate FOLDER FILE``. Needs memory for the whole checkpoint,
    and no process group.

    Args:
        checkpoint_folder: The folder.
        output_file: The file, which any strategy loads, and ``load_from_checkpoint``.

    Raises:
        FileNotFoundError: If the folder is not a checkpoint in parts.
        FileExistsError: If the file exists.
    """
    if not is_folder(checkpoint_folder):
        raise FileNotFoundError(f"{os.fspath(checkpoint_folder)!r} is not a folder with a checkpoint in parts.")
    if os.path.exists(output_file):
        raise FileExistsError(f"{os.fspath(output_file)!r} exists. Choose another name, or remove it first.")
    torch.save(load_whole(checkpoint_folder), output_file)


def _joined(parts: dict[str, Any], path: Path, weights_only: bool) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = parts["state_dict"]
    names = sorted((name for name in parts if name.startswith("optimizer_")), key=lambda name: int(name.split("_")[1]))
    if names:
        checkpoint["optimizer_states"] = [_numbered(parts[name]) for name in names]
    return checkpoint


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state under the numbers that ``Optimizer.state_dict`` gives parameters."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    return {"state": {numbers[name]: entry for name, entry in state["state"].items()}, "param_groups": groups}
