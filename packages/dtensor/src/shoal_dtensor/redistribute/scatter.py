"""From one rank's plain tensor to a shard on every rank."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch

from shoal_mesh import all_to_all_v, broadcast

from ..errors import PlacementError
from ..layout.boxes import Box
from .strided_plan import unfold_spec

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
        return _own_copy(tensor, spec.box(spec.coordinate)).to(_device(tensor, spec))
    return _from_source(tensor, spec, source)


def _device(tensor: torch.Tensor, spec: Spec) -> torch.device:
    """Where local shards live: the tensor's device if the mesh is of its type, else the mesh's current device."""
    if tensor.device.type == spec.mesh.device_type or tensor.is_meta:
        return tensor.device
    return torch.device(spec.mesh.device_type)


def _own_copy(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor, contiguous, in memory of its own unless it is the tensor itself."""
    shard = _narrow(tensor, box)
    return shard.contiguous() if shard.shape == tensor.shape else shard.clone(memory_format=torch.contiguous_format)


def _from_source(tensor: torch.Tensor, spec: Spec, source: int) -> torch.Tensor:
    """Scatter exact boxes over the axes that shard, in the source's plane; then broadcast to the other planes."""
    mesh, coordinate = spec.mesh, spec.coordinate
    assert coordinate is not None, "only ranks of the mesh call this"
    sharding = tuple(sorted(axis for sharded in spec.dim_shardings for axis in sharded.axes))
    copying = tuple(axis for axis in range(mesh.ndim) if axis not in sharding)
    for axis, size in enumerate(mesh.shape):
        if not 0 <= source < size:
            raise PlacementError(
                f"src_data_rank {source} is no coordinate of mesh axis {mesh.axis_names[axis]!r} of size {size}"
            )
    device = _device(tensor, spec)
    local = torch.empty(spec.local_shape, dtype=tensor.dtype, device=device)
    if all(coordinate[axis] == source for axis in copying):
        local = _scatter(tensor.to(device), spec, source, sharding) if sharding else tensor.to(device).contiguous()
    if copying and prod(mesh.shape[axis] for axis in copying) > 1:
        index = 0
        for axis in copying:
            index = index * mesh.shape[axis] + source
        local = broadcast(local, mesh.comm(copying), src=index)
    return local


def _scatter(tensor: torch.Tensor, spec: Spec, source: int, axes: tuple[int, ...]) -> torch.Tensor:
    mesh, coordinate = spec.mesh, spec.coordinate
    assert coordinate is not None, "only ranks of the mesh call this"
    sends = all(coordinate[axis] == source for axis in axes)
    sizes, shards = [0] * prod(mesh.shape[axis] for axis in axes), []
    for rank, along in enumerate(product(*(range(mesh.shape[axis]) for axis in axes)) if sends else ()):
        there = list(coordinate)
        for axis, position in zip(axes, along, strict=True):
            there[axis] = position
        shards.append(_narrow(tensor, spec.box(there)).reshape(-1))
        sizes[rank] = shards[-1].numel()
    flat = torch.cat(shards) if shards else tensor.new_empty(0)
    index = 0
    for axis in axes:
        index = index * mesh.shape[axis] + source
    receives = [prod(spec.local_shape) if i == index else 0 for i in range(len(sizes))]
    got = all_to_all_v(flat, mesh.comm(axes), sizes, receives)
    return got.view(spec.local_shape)


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor
