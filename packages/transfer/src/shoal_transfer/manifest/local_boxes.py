"""The boxes of a tensor that this rank holds, each with its view of the local memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.internal import Box, box_at, local_of, slices_of, whole_box
from shoal_shard_api import ShardedTensorBase

from ..errors import ManifestError


class LocalBox(NamedTuple):
    """A box of a global tensor in a local tensor.

    Attributes:
        box: (start, stop) per dim of the global tensor.
        place: (start, stop) of the same elements per dim of the local tensor.
        memory: the local tensor.
        number: index of `memory` among the local tensors that this rank has of the global tensor.
    """

    box: Box
    place: Box
    memory: Tensor
    number: int

    @property
    def view(self) -> Tensor:
        """The elements of the box."""
        return self.memory[slices_of(self.place)]


def local_boxes(name: str, tensor: Any) -> Iterator[LocalBox]:
    """Yield the boxes that this rank holds of a tensor of any kind.

    The kinds are plain tensors, DTensors of shoal and of torch, and ShardedTensors of both. Tensors
    of torch's classes are found by their methods, because this package does not import the classes.

    Raises:
        ManifestError: the tensor is partial, or a DTensor of torch has chunks along several dims.
    """
    if isinstance(tensor, DTensor):
        yield from _boxes_of_dtensor(name, tensor)
    elif isinstance(tensor, ShardedTensorBase) or hasattr(tensor, "local_shards"):
        # torch's ShardedTensor has the same methods
        for number, shard in enumerate(tensor.local_shards()):
            metadata = shard.metadata
            box = box_at(metadata.shard_offsets, metadata.shard_sizes)
            memory = shard.tensor.detach()
            yield LocalBox(box, whole_box(memory.shape), memory, number)
    elif hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "to_local"):
        yield from _boxes_of_torch_dtensor(name, tensor)
    else:
        memory = tensor.detach()
        whole = whole_box(tensor.shape)
        yield LocalBox(whole, whole, memory, 0)


def _boxes_of_dtensor(name: str, tensor: DTensor) -> Iterator[LocalBox]:
    spec = tensor.spec
    if spec.coordinate is None:
        # this rank is not in the mesh
        return
    if spec.partials:
        raise ManifestError(f"{name!r} is {tensor.placements}: redistribute partial tensors first")
    local = local_of(tensor).detach()
    # There is one box, but for a strided shard. A rank's shard of fused q, k and v has three.
    for box, place in spec.boxes(spec.coordinate):
        yield LocalBox(box, place, local, 0)


def _boxes_of_torch_dtensor(name: str, tensor: Any) -> Iterator[LocalBox]:
    """Yield the boxes of torch's DTensor, which lists its chunks in the order of local memory."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise ManifestError(f"{name!r} is {tensor.placements}: redistribute partial tensors first")
    if tensor.device_mesh.get_coordinate() is None:
        return
    local = tensor.to_local().detach()
    chunks = tensor.__create_chunk_list__()
    if len(chunks) == 1:
        box = box_at(chunks[0].offsets, chunks[0].sizes)
        yield LocalBox(box, whole_box(local.shape), local, 0)
        return
    # A strided shard has several chunks, which differ in one dim. The local tensor has them one
    # after the other. Example: rows 2:4 and 6:8 of the global tensor are rows 0:2 and 2:4 here.
    start = 0
    dim = _chunked_dim(name, chunks)
    for chunk in chunks:
        stop = start + chunk.sizes[dim]
        place = [*whole_box(local.shape)]
        place[dim] = (start, stop)
        start = stop
        yield LocalBox(box_at(chunk.offsets, chunk.sizes), tuple(place), local, 0)


def _chunked_dim(name: str, chunks: list[Any]) -> int:
    """Return the dim along which the chunks follow each other."""
    first = chunks[0].offsets
    differing = []
    for dim, offset in enumerate(first):
        if any(chunk.offsets[dim] != offset for chunk in chunks):
            differing.append(dim)
    if len(differing) != 1:
        raise ManifestError(f"{name!r} has chunks along dims {differing}; redistribute it first")
    return differing[0]
