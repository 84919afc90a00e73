"""ShardedTensor <-> DTensor, sharing the shards, without communication.  The class ShardedTensor is an argument."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from shoal_dtensor import DTensor, Placement, Spec
from shoal_mesh import DeviceMesh

from ._torch import RemoteDevice
from .convert import Grid, grid_of, spec_of
from .errors import NotExpressibleError
from .groups import comm_of, members, mesh_of
from .metadata import Layout, TensorProperties
from .reshard import move

Placements = tuple[Placement, ...]


def grid_for(tensor: Any) -> Grid:
    """The grid that a ShardedTensor's layout is.

    Raises:
        NotExpressibleError: It is none.
    """
    return grid_of(tensor._layout, tuple(tensor.size()), members(tensor.process_group))


def mesh_for(tensor: Any, grid: Grid) -> DeviceMesh:
    """The mesh of a grid over a ShardedTensor's process group; all ranks call it."""
    return mesh_of(tensor.process_group, tensor._parts[0].device.type, grid.mesh_shape, grid.ranks)


def to_dtensor(tensor: Any) -> DTensor:
    """The DTensor of the same shards."""
    grid = grid_for(tensor)
    part = next((each for each in tensor._parts if each.numel() > 0), tensor._parts[0])
    return _from_part(tensor, part, mesh_for(tensor, grid), grid.placements)


def onto(tensor: Any, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """The DTensor of the values of any ShardedTensor on a given mesh; moves what has to move, all ranks call it."""
    spec = Spec(mesh, placements, tensor.size(), tensor.stride(), tensor.dtype)
    comm = comm_of(tensor.process_group, mesh.device_type)
    (part,) = move(tensor._parts, tensor._layout, layout_of(spec), comm)
    return _from_part(tensor, part, mesh, placements)


def _from_part(tensor: Any, part: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    local_shape = Spec(mesh, placements, tensor.size(), tensor.stride(), tensor.dtype).local_shape
    local = part if part.shape == local_shape else part.reshape(local_shape)  # an empty part has lost its shape
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.size(), stride=tuple(tensor.stride())
    )


def layout_of(spec: Spec) -> Layout:
    """Holder and box of every shard of a DTensor, in the order of its mesh."""
    return tuple(
        (spec.mesh.rank_at(coordinate), spec.box(coordinate))
        for coordinate in product(*(range(n) for n in spec.mesh.shape))
    )


def from_dtensor(cls: Any, dtensor: DTensor, *, like: Any = None) -> Any:
    """The ShardedTensor of a DTensor's shards.

    Args:
        cls: The class ShardedTensor.
        dtensor: Sharded along every mesh axis (of more than one rank).
        like: A ShardedTensor on the same ranks, whose process group and devices the result takes.

    Raises:
        NotExpressibleError: The DTensor is replicated or partial along some axis.
    """
    spec = dtensor._spec
    wrong = [
        f"{placement!r} on axis {name!r}"
        for placement, name, size in zip(spec.placements, spec.mesh.axis_names, spec.mesh.shape, strict=True)
        if size > 1 and not placement.is_shard()
    ]
    if wrong or spec.ndim == 0:
        raise NotExpressibleError(
            f"a ShardedTensor's shards do not overlap, so a DTensor of shape {tuple(spec.shape)} with "
            f"{', '.join(wrong) or 'no dims'} has no counterpart: redistribute it to Shard on every mesh axis "
            f"{spec.mesh.axis_names}, or take full_tensor()"
        )
    layout = layout_of(spec)
    if like is None:
        group = spec.mesh.comm(tuple(range(spec.mesh.ndim))).group
        devices = {rank: _device(rank, spec.mesh.device_type) for rank, _ in layout}
    else:
        group, devices = like.process_group, devices_of(like)
    sharding = spec_of(layout, devices)
    local = dtensor.to_local()
    properties = TensorProperties(dtype=spec.dtype, requires_grad=local.requires_grad)
    metadata = sharding.build_metadata(torch.Size(spec.shape), properties)
    return cls._wrap(sharding, metadata, [local], group, stride=spec.stride)


def devices_of(tensor: Any) -> dict[int, RemoteDevice]:
    """Placement of every rank of a ShardedTensor's group; a rank without a shard is given the kind of the others."""
    own = tensor._parts[0].device.type
    found = {rank: _device(rank, own) for rank in members(tensor.process_group)}
    placed = {each.rank: each.placement for each in tensor._metadata.shards_metadata}
    return {**found, **{rank: placement for rank, placement in placed.items() if placement is not None}}


def _device(rank: int, device_type: str) -> RemoteDevice:
    """Where a rank keeps its shards by the usual rule: the device of its index on its host."""
    if device_type == "cpu":
        return RemoteDevice(f"rank:{rank}/cpu")
    count = torch.get_device_module(device_type).device_count()
    return RemoteDevice(f"rank:{rank}/{device_type}:{rank % max(count, 1)}")
