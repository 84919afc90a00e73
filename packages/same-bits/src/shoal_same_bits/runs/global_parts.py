"""Which part of a global tensor a rank has: values with global indices, and over which meshes parts add up."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.internal import local_shard
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import dataclass
from shoal_tp_styles import Lowered

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64, as signed numbers
_OFFSET = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPart:
    """What one rank adds to something that is summed over the elements of a global tensor.

    Attributes:
        local: this rank's values.
        indices: for each dim the global indices of the local ones.
        sizes: of the global tensor.
        counted: False if another rank counts the same values.
        meshes: over whose ranks parts are added, one after the other.
    """

    local: Tensor
    indices: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    counted: bool
    meshes: tuple[DeviceMesh, ...]

    def hashes(self) -> Tensor:
        """A number for each element, of its global index; as many as there are bits of the value."""
        place = torch.zeros((1,) * self.local.ndim, dtype=torch.int64, device=self.local.device)
        for dim, (index, size) in enumerate(zip(self.indices, self.sizes, strict=True)):
            place = place * size + index.view(-1, *(1,) * (self.local.ndim - dim - 1))
        if self.local.is_complex():
            place = torch.stack([2 * place, 2 * place + 1], -1)
        return _mixed(place + _OFFSET)

    def digest(self) -> Tensor:
        """The sum of the hashes of elements: of global index and bits."""
        local = torch.view_as_real(self.local.resolve_conj()) if self.local.is_complex() else self.local
        bits = local.contiguous().view(_BITS[local.element_size()]).long()
        return _mixed(bits + self.hashes()).sum() * self.counted


def part_of_tensor(tensor: Tensor) -> GlobalPart:
    """This rank's part of a DTensor, or a tensor that every rank has; what is partial is reduced."""
    if not isinstance(tensor, DTensor):
        ranges = tuple(torch.arange(n, device=tensor.device) for n in tensor.shape)
        return GlobalPart(tensor, ranges, tuple(tensor.shape), True, ())
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=placements)
    spec, local = tensor.spec, local_shard(tensor)
    at = spec.coordinate
    if at is None or any(i and p.is_replicate() for i, p in zip(at, spec.placements, strict=True)):
        none = tuple(torch.arange(0) for _ in spec.shape)
        return GlobalPart(local.new_empty([0] * len(spec.shape)), none, tuple(spec.shape), False, (spec.mesh,))
    indices = tuple(torch.tensor(s.indices(at), dtype=torch.int64, device=local.device) for s in spec.dim_shardings)
    return GlobalPart(local, indices, tuple(spec.shape), True, (spec.mesh,))


def part_of_output(output: Tensor, lowered: Lowered, batch: DeviceMesh | None) -> GlobalPart:
    """This rank's part of what a module with a style returns.

    Args:
        output: of any placement on one axis, as a DTensor or as this rank's shard.
        lowered: of the module.
        batch: the data axes that shard dim 0 too; None if none do.
    """
    local, layout = output, lowered.port_out.desired
    if isinstance(output, DTensor):
        (layout,) = output.placements
        local = local_shard(output)
    sharded = {0: [batch]} if batch is not None else {}
    if isinstance(layout, Shard):
        sharded.setdefault(layout.dim % local.ndim, []).append(lowered.mesh)
    indices, sizes = [], []
    for dim, size in enumerate(local.shape):
        start = 0
        for mesh in sharded.get(dim, []):
            start = start * mesh.size() + mesh.comm(tuple(range(mesh.ndim))).rank
        ranks = torch.Size(mesh.size() for mesh in sharded.get(dim, [])).numel()
        indices.append(torch.arange(size, device=local.device) + start * size)
        sizes.append(size * ranks)
    counted = isinstance(layout, Shard) or lowered.comm.rank == 0
    meshes = (lowered.mesh, *([] if batch is None else [batch]))
    return GlobalPart(local, tuple(indices), tuple(sizes), counted, meshes)


def _mixed(number: Tensor) -> Tensor:
    """The finalizer of splitmix64, element by element."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        number = (number ^ (number >> shift & (1 << 64 - shift) - 1)) * factor
    return number ^ (number >> 31 & (1 << 33) - 1)
