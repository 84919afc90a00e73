"""`local_value`: the values of a tensor on this rank, and their places in the logical tensor.

The places come from metadata; a plain tensor has none. DTensors of torch are recognized by the name
of their class, because torch's DTensor is not imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.internal import local_shard

from ..records import LocalValue


def local_value(tensor: Tensor) -> LocalValue:
    """Copy the values of this rank, in double precision on the CPU, without communication.

    Args:
        tensor: a plain tensor, or a DTensor or ShardedTensor of shoal or of torch.

    Returns:
        The values; with shape and places if the tensor has metadata.

    Example:
        >>> local_value(torch.ones(2, dtype=torch.bfloat16)).tensor
        tensor([1., 1.], dtype=torch.float64)
    """
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            return _from_dtensor(tensor)
        if _is_torch_dtensor(tensor):
            return _from_torch_dtensor(tensor)
        if callable(getattr(tensor, "local_shards", None)):
            return _from_sharded_tensor(tensor)
        return LocalValue(_exact_copy(tensor))


def _exact_copy(tensor: Tensor) -> Tensor:
    """Copy a plain tensor to the CPU in double precision."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def _from_dtensor(tensor: DTensor) -> LocalValue:
    """Read the layout of a DTensor of shoal."""
    spec = tensor.spec
    coordinate = spec.coordinate
    shape = tuple(spec.shape)
    if coordinate is None:
        empty = torch.zeros(0, dtype=torch.float64)
        return LocalValue(empty, shape, torch.zeros(0, dtype=torch.int64))
    indices = [torch.tensor(dim.indices(coordinate)) for dim in spec.dim_shardings]
    index = _cross_positions(indices, shape)
    pending = tuple[int, ...]()
    reduced = [i for i, placement in enumerate(spec.placements) if isinstance(placement, Partial)]
    if reduced:
        pending = _ranks_along(spec.mesh.mesh, coordinate, reduced)
    local = _exact_copy(local_shard(tensor))
    return LocalValue(local, shape, index.view(local.shape), pending)


def _cross_positions(indices: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the flat positions of the elements with these indices in each dim."""
    positions = torch.zeros((1,) * len(shape), dtype=torch.int64)
    for dim, (index, size) in enumerate(zip(indices, shape, strict=True)):
        # element (1, 2) of a (4, 6) tensor: 0 * 4 + 1 = 1 after dim 0, 1 * 6 + 2 = 8 after dim 1
        trailing = (1,) * (len(shape) - dim - 1)
        positions = positions * size + index.long().view(-1, *trailing)
    return positions


def _ranks_along(grid: Any, coordinate: Any, dims: list[int]) -> tuple[int, ...]:
    """Return the ranks whose coordinate differs from `coordinate` in the mesh dims `dims` only."""
    place = tuple(
        slice(None) if dim in dims else position for dim, position in enumerate(coordinate)
    )
    ranks: list[int] = torch.as_tensor(grid)[place].flatten().tolist()
    return tuple(ranks)


def _is_torch_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is of torch's own DTensor class."""
    cls = type(tensor)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed")


def _from_torch_dtensor(tensor: Any) -> LocalValue:
    """Read the layout of a DTensor of torch.

    A strided shard (FSDP over TP) is split after the plain shards of its dim, although its mesh dim
    comes first.
    """
    mesh = tensor.device_mesh
    shape = tuple(tensor.shape)
    local = _exact_copy(tensor.to_local())
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalValue(local, shape, torch.zeros(local.shape, dtype=torch.int64))
    positions = torch.arange(tensor.numel()).view(shape)
    plain = list[tuple[int, int]]()
    strided = list[tuple[int, int]]()
    partial = list[int]()
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            partial.append(axis)
        elif type(placement).__name__ == "_StridedShard":
            strided.append((axis, placement.dim))
        elif placement.is_shard():
            plain.append((axis, placement.dim))
    for axis, dim in (*plain, *reversed(strided)):
        chunks = positions.chunk(mesh.size(axis), dim)
        position = coordinate[axis]
        # `chunk` returns fewer chunks than ranks if there are not enough rows
        is_empty = position >= len(chunks)
        positions = positions.narrow(dim, 0, 0) if is_empty else chunks[position]
    pending = _ranks_along(mesh.mesh, coordinate, partial) if partial else ()
    return LocalValue(local, shape, positions.reshape(local.shape), pending)


def _from_sharded_tensor(tensor: Any) -> LocalValue:
    """Concatenate the local shards of a ShardedTensor of torch or of shoal."""
    shape = tuple(tensor.size())
    positions = torch.arange(tensor.numel()).view(shape)
    values = [torch.zeros(0, dtype=torch.float64)]
    indices = [torch.zeros(0, dtype=torch.int64)]
    for shard in tensor.local_shards():
        metadata = shard.metadata
        place = tuple(
            slice(start, start + size)
            for start, size in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
        )
        values.append(_exact_copy(shard.tensor).flatten())
        indices.append(positions[place].flatten())
    return LocalValue(torch.cat(values), shape, torch.cat(indices))
