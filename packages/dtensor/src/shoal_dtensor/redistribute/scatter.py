"""From one rank's plain tensor to a shard on every rank."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from shoal_mesh import all_to_all_blocks, broadcast

from ..errors import PlacementError
from ..layout.boxes import slices_of
from .composed_plans import unfold_spec
from .execution.kernels import members

if TYPE_CHECKING:
    from ..layout.spec import Spec


def shard_of(tensor: torch.Tensor, spec: Spec, source: int | None) -> torch.Tensor:
    """`V -> placements`: this rank's shard, in memory of its own, of the plain tensor that one rank has.

    Args:
        tensor: the global tensor; on other ranks than the source anything of its shape and dtype.
        spec: of the result, which is not partial.
        source: the rank at this coordinate of every mesh axis; None: every rank slices its own tensor, nothing is sent.

    Raises:
        PlacementError: if values are to be partial, or there is no such coordinate.
    """
    if spec.partials:
        raise PlacementError(f"a tensor cannot be distributed to {spec!r}: placements must be Shard or Replicate")
    tensor = tensor.resolve_conj().resolve_neg()
    if spec.coordinate is None:
        return tensor.new_empty((0,), device=_device(tensor, spec))
    if spec.is_strided:
        opened = unfold_spec(spec)
        return shard_of(tensor.reshape(opened.shape), opened, source).reshape(spec.local_shape)
    if source is None or tensor.is_meta:
        shard = tensor[slices_of(spec.box(spec.coordinate))]
        own = shard.contiguous() if shard.shape == tensor.shape else shard.clone(memory_format=torch.contiguous_format)
        return own.to(_device(tensor, spec))
    return _from_source(tensor, spec, source)


def _device(tensor: torch.Tensor, spec: Spec) -> torch.device:
    """Where local shards live: the tensor's device if the mesh is of its type, else the mesh's current device."""
    if tensor.device.type == spec.mesh.device_type or tensor.is_meta:
        return tensor.device
    return torch.device(spec.mesh.device_type)


def _from_source(tensor: torch.Tensor, spec: Spec, source: int) -> torch.Tensor:
    """Scatter exact boxes over the axes that shard, in the source's plane; then broadcast to the other planes."""
    mesh, here = spec.mesh, spec.coordinate
    assert here is not None, "only ranks of the mesh call this"
    sharding = tuple(sorted(axis for sharded in spec.dim_shardings for axis in sharded.axes))
    copying = tuple(axis for axis in range(mesh.ndim) if axis not in sharding)
    for axis, size in enumerate(mesh.shape):
        if not 0 <= source < size:
            raise PlacementError(
                f"src_data_rank {source} is no coordinate of mesh axis {mesh.axis_names[axis]!r} of size {size}"
            )
    local = torch.empty(spec.local_shape, dtype=tensor.dtype, device=_device(tensor, spec))
    if not sharding and all(here[axis] == source for axis in copying):
        local = tensor.to(local.device).contiguous()
    elif all(here[axis] == source for axis in copying):
        group = members(spec, sharding, here)
        sent: list[list[torch.Tensor]] = [[] for _ in group]
        received: list[list[torch.Tensor]] = [[] for _ in group]
        if all(here[axis] == source for axis in sharding):
            whole = tensor.to(local.device)
            sent = [[whole[slices_of(spec.box(member))]] for member in group]
        received[_index_of(source, sharding, spec)] = [local]
        all_to_all_blocks(sent, mesh.comm(sharding), received)
    if prod(mesh.shape[axis] for axis in copying) > 1:
        local = broadcast(local, mesh.comm(copying), src=_index_of(source, copying, spec))
    return local


def _index_of(source: int, axes: tuple[int, ...], spec: Spec) -> int:
    """Index among the ranks along some axes of the one at coordinate `source` of each."""
    index = 0
    for axis in axes:
        index = index * spec.mesh.shape[axis] + source
    return index
