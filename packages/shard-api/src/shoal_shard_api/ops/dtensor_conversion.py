"""ShardedTensor <-> DTensor of the same shards, without communication.  The class ShardedTensor is an argument."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from shoal_dtensor import DTensor, Placement, Spec
from shoal_mesh import DeviceMesh

from .._torch import RemoteDevice
from ..errors import NotExpressibleError
from ..ranks.process_groups import comm_of, members, mesh_of
from ..ranks.reshard import move
from ..spec.enumerable_spec import spec_of
from ..spec.metadata import Layout, TensorProperties
from ..spec.to_placements import Grid, grid_of

Placements = tuple[Placement, ...]


def grid_for(tensor: Any) -> Grid:
    """The grid of a ShardedTensor's layout.

    Raises:
        NotExpressibleError: The layout is no grid.
    """
    return grid_of(tensor._layout, tuple(tensor.size()), members(tensor.process_group))


def grid_or_none(tensor: Any) -> Grid | None:
    """The grid of a ShardedTensor's layout, None if it is no grid."""
    try:
        return grid_for(tensor)
    except NotExpressibleError:
        return None


def mesh_for(tensor: Any, grid: Grid) -> DeviceMesh:
    """The mesh of a grid over a ShardedTensor's process group; all ranks call it."""
    return mesh_of(tensor.process_group, tensor._local_tensors[0].device.type, grid.mesh_shape, grid.ranks)


def to_dtensor(tensor: Any) -> DTensor:
    """The DTensor of the same shards."""
    grid = grid_for(tensor)
    local = next((each for each in tensor._local_tensors if each.numel() > 0), tensor._local_tensors[0])
    return _from_local(tensor, local, mesh_for(tensor, grid), grid.placements)


def to_dtensor_on(tensor: Any, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Layout -> placements: the DTensor of any ShardedTensor on a given mesh; all ranks call it."""
    spec = Spec(mesh, placements, tensor.size(), tensor.stride(), tensor.dtype)
    comm = comm_of(tensor.process_group, mesh.device_type)
    (local,) = move(tensor._local_tensors, tensor._layout, layout_of(spec), comm)
    return _from_local(tensor, local, mesh, placements)


def _from_local(tensor: Any, local: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    local_shape = Spec(mesh, placements, tensor.size(), tensor.stride(), tensor.dtype).local_shape
    # The empty tensor of a rank without shards is 1-D.
    local = local if local.shape == local_shape else local.reshape(local_shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.size(), stride=tuple(tensor.stride())
    )


def layout_of(spec: Spec) -> Layout:
    """Global rank and box of every shard of a DTensor, in the order of its mesh."""
    return tuple(
        (spec.mesh.rank_at(coordinate), spec.box(coordinate))
        for coordinate in product(*(range(n) for n in spec.mesh.shape))
    )


def from_dtensor(cls: Any, dtensor: DTensor, *, like: Any = None) -> Any:
    """The ShardedTensor of a DTensor's shards.

    Args:
        cls: The class ShardedTensor.
        dtensor: Sharded along every mesh axis of more than one rank.
        like: A ShardedTensor on the same ranks; the result has its process group and devices.

    Raises:
        NotExpressibleError: The DTensor is replicated or partial along some axis, or has no dims.
    """
    spec = dtensor.spec
    unsharded = [
        f"{placement!r} on axis {name!r}"
        for placement, name, size in zip(spec.placements, spec.mesh.axis_names, spec.mesh.shape, strict=True)
        if size > 1 and not placement.is_shard()
    ]
    if unsharded or spec.ndim == 0:
        raise NotExpressibleError(
            f"a ShardedTensor's shards do not overlap, so a DTensor of shape {tuple(spec.shape)} with "
            f"{', '.join(unsharded) or 'no dims'} has no sharding spec: redistribute it to Shard on every mesh axis "
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
    """Placement of every rank of a ShardedTensor's group; a rank without a shard has one of the same device type."""
    own = tensor._local_tensors[0].device.type
    default = {rank: _device(rank, own) for rank in members(tensor.process_group)}
    declared = {each.rank: each.placement for each in tensor._metadata.shards_metadata}
    return {**default, **{rank: placement for rank, placement in declared.items() if placement is not None}}


def _device(rank: int, device_type: str) -> RemoteDevice:
    """The default placement of a rank: the device whose index is the rank modulo the devices of its host."""
    if device_type == "cpu":
        return RemoteDevice(f"rank:{rank}/cpu")
    count = torch.get_device_module(device_type).device_count()
    return RemoteDevice(f"rank:{rank}/{device_type}:{rank % max(count, 1)}")
