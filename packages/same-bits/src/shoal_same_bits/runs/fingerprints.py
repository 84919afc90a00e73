"""Which part of a global tensor a rank has, and the sums and the digest of the part.

An element goes, with a sign, to the one of 64 sums that a hash of its global index says. A digest
is the sum over elements of a hash of global index and bits, modulo 2 ** 64. Neither depends on the
number of ranks: every rank adds up its own shard, and an all-reduce the ranks; nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.internal import local_shard
from shoal_mesh import Comm, DeviceMesh
from shoal_tp_styles import Lowered

_SUMS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# of splitmix64, as signed numbers
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_OFFSET = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPart:
    """What one rank adds to something that is summed over the elements of a global tensor."""

    local: Tensor  # this rank's values
    # for each dim the global indices of the local ones
    indices: tuple[Tensor, ...]
    sizes: tuple[int, ...]  # of the global tensor
    # False if another rank counts the same values
    counted: bool
    # over whose ranks parts are added, one after the other
    meshes: tuple[DeviceMesh, ...]

    def sums(self, salt: int = 0) -> tuple[Tensor, Tensor]:
        """The sums with the squares of all elements and the number of broken ones; and the digest.  All on the CPU."""
        place = torch.zeros((1,) * self.local.ndim, dtype=torch.int64, device=self.local.device)
        for dim, (index, size) in enumerate(zip(self.indices, self.sizes, strict=True)):
            # (1, 2) of (4, 6): 6 + 2 = 8
            place = place * size + index.view(-1, *(1,) * (self.local.ndim - dim - 1))
        local = self.local
        if local.is_complex():
            local = torch.view_as_real(local.resolve_conj())
            place = torch.stack([2 * place, 2 * place + 1], -1)  # element 8: 16 real, 17 imaginary
        hashes = _mixed(place + _OFFSET).expand(local.shape)
        bits = local.contiguous().view(_BITS[local.element_size()]).long()
        digest = _mixed(bits + hashes).sum() * self.counted
        exact = local.double()
        finite = exact.isfinite()
        values = torch.where(finite, exact, 0.0).flatten() * self.counted
        hashes = hashes.flatten() + salt * 0x9E3779B9
        sums = torch.zeros(_SUMS, dtype=torch.float64, device=local.device)
        sums.index_add_(
            0, hashes >> 8 & (_SUMS - 1), torch.where(hashes >> 32 & 1 == 1, values, -values)
        )
        facts = torch.stack([values.square().sum(), (~finite).sum() * self.counted])
        return torch.cat([sums, facts]).cpu(), digest.cpu()


def part_of_tensor(tensor: Tensor) -> GlobalPart:
    """This rank's part of a DTensor, or a tensor that every rank has; what is partial is reduced."""
    if not isinstance(tensor, DTensor):
        ranges = tuple(torch.arange(n, device=tensor.device) for n in tensor.shape)
        return GlobalPart(tensor, ranges, tuple(tensor.shape), True, meshes=())
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=placements)
    spec = tensor.spec
    local = local_shard(tensor)
    at = spec.coordinate
    if at is None or any(i and p.is_replicate() for i, p in zip(at, spec.placements, strict=True)):
        none = tuple(torch.arange(0) for _ in spec.shape)
        return GlobalPart(
            local.new_empty([0] * len(spec.shape)),
            none,
            tuple(spec.shape),
            False,
            meshes=(spec.mesh,),
        )
    indices = tuple(
        torch.tensor(s.indices(at), dtype=torch.int64, device=local.device)
        for s in spec.dim_shardings
    )
    return GlobalPart(local, indices, tuple(spec.shape), True, meshes=(spec.mesh,))


def part_of_output(
    output: Tensor, lowered: Lowered | None, batch: DeviceMesh | None, *, grad: bool = False
) -> GlobalPart:
    """This rank's part of what a module returns, or of the gradient there: a DTensor, or the shard of a style."""
    if not isinstance(output, DTensor):
        assert lowered is not None, "only styles say what a plain tensor is a shard of"
        layout = lowered.port_out.desired
        if isinstance(layout, Shard):
            dim = layout.dim % output.ndim
            sizes = layout.sizes or lowered.output_sizes(0, output.shape[dim])
            layout = Shard(dim, sizes=None if sizes is None else tuple(sizes))
        elif grad:
            layout = Replicate()
        output = DTensor.from_local(output, lowered.mesh, [layout], run_check=False)
    part = part_of_tensor(output)
    if batch is None or {*_comm(batch).ranks} <= {*_comm(output.device_mesh).ranks}:
        return part
    rows, *others = part.indices  # the data axes shard dim 0 too
    # rows 0 to 2 of 3 on data rank 2: 6, 7, 8
    rows = rows + _comm(batch).rank * part.sizes[0]
    sizes = (part.sizes[0] * batch.size(), *part.sizes[1:])
    return replace(part, indices=(rows, *others), sizes=sizes, meshes=(*part.meshes, batch))


def _comm(mesh: DeviceMesh) -> Comm:
    return mesh.comm(tuple(range(mesh.ndim)))


def _mixed(number: Tensor) -> Tensor:
    """The finalizer of splitmix64, element by element."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        number = (number ^ (number >> shift & (1 << 64 - shift) - 1)) * factor
    return number ^ (number >> 31 & (1 << 33) - 1)
