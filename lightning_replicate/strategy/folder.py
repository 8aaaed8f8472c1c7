"""Checkpoints in parts: a folder of torch's distributed checkpoint (DCP), into which every rank writes what it has.

The format is that of Lightning's own sharding strategies: parameters and optimizer states under their names, and a file
``meta.pt`` with all the rest. :func:`load` reads parts into a model on any number of ranks, :func:`load_whole` and
:mod:`lightning_replicate.consolidate` make one ordinary checkpoint of a folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_META = "meta.pt"


def is_folder(path: Any) -> bool:
    """Whether the path is a checkpoint in parts."""
    return Path(path).is_dir() and (Path(path) / _META).is_file()


def remove(path: Any) -> None:
    """Deletes a checkpoint in parts."""
    shutil.rmtree(path)


def optimizer_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """An optimizer's state under the names of parameters, sharded tensors as they are. Collective."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(module, optimizer)


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint in parts. Collective. Until it is complete, an earlier one under this name stays whole.

    Args:
        checkpoint: Lightning's checkpoint, with sharded tensors in ``"state_dict"`` and named optimizer states.
        path: The folder.
    """
    from torch.distributed.checkpoint import save as save_parts

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


def load(path: Any, module: nn.Module, optimizers: Any) -> dict[str, Any]:
    """Reads a checkpoint in parts, each rank what it needs, into a model that is set up. Collective.

    Args:
        path: The folder.
        module: The model; its values change in place.
        optimizers: The optimizers; may be empty.

    Returns:
        Lightning's checkpoint, with sharded tensors.
    """
    from torch.distributed.checkpoint import load as load_parts

    state = {key.replace("_orig_mod.", ""): value for key, value in module.state_dict().items()}
    parts: dict[str, Any] = {"state_dict": state}
    parts.update({f"optimizer_{number}": optimizer_state(module, each) for number, each in enumerate(optimizers)})
    load_parts(parts, checkpoint_id=os.fspath(path))
    return _joined(parts, Path(path))


def load_whole(path: Any) -> dict[str, Any]:
    """Reads a checkpoint in parts as one ordinary checkpoint, whole tensors on the CPU. Not collective.

    Args:
        path: The folder.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as work:
        dcp_to_torch_save(os.fspath(path), f"{work}/whole.pt")
        parts = torch.load(f"{work}/whole.pt", map_location="cpu", weights_only=True)
    return _joined(parts, Path(path))


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


def _joined(parts: dict[str, Any], path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=True)
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
