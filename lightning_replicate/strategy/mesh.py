"""The one owner of mesh arithmetic: which ranks shard together, and which hold replicas of each other's shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Union

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ShardSize = Union[int, Literal["world"]]
"""How many ranks share one copy of the sharded parameters."""


def mesh_shape(world_size: int, shard_size: ShardSize, ranks_per_node: int) -> dict[str, int]:
    """Sizes of the mesh's dimensions by name.

    Args:
        world_size: Number of ranks.
        shard_size: How many ranks share one copy.
        ranks_per_node: Number of ranks on one node, for the message of an error.

    Returns:
        ``{"shard": world_size}``, or ``{"replicate": ..., "shard": ...}`` if there are several copies. Ranks that shard
        together have consecutive numbers, so they are on one node if ``shard_size`` divides the ranks on it.

    Raises:
        ValueError: If ``shard_size`` does not divide ``world_size``.
    """
    size = world_size if shard_size == "world" else shard_size
    if not isinstance(size, int) or size < 1 or world_size % size:
        raise ValueError(
            f"`shard_size` must be 'world' or divide the number of ranks, {world_size} ({ranks_per_node} on each node),"
            f" got {shard_size!r}."
        )
    if size == world_size:
        return {"shard": world_size}
    return {"replicate": world_size // size, "shard": size}


def data_mesh(device: torch.device, world_size: int, shard_size: ShardSize, ranks_per_node: int) -> DeviceMesh:
    """The mesh of all data-parallel ranks. Collective: makes process groups if it has two dimensions.

    Args:
        device: A device of the type on which the ranks compute.
        world_size: Number of ranks.
        shard_size: How many ranks share one copy.
        ranks_per_node: Number of ranks on one node.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = mesh_shape(world_size, shard_size, ranks_per_node)
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
