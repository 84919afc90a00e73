"""The part of a global tensor that a rank has, and its fingerprint: 64 sums and a digest.

A hash of an element's global index selects one of 64 sums and a sign; the element is added to that
sum with that sign. The digest adds up a hash of the global index and the bits of every element,
modulo 2 ** 64. Neither depends on the number of ranks: every rank adds up its own shard, and an
all-reduce adds the results of the ranks. Nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_dtensor.internal import local_shard
from shoal_mesh import Comm, DeviceMesh
from shoal_tp_styles import Lowered

# The number of sums, a power of two. The squares of the sums add up to about the squared norm of
# the tensor; with 64 sums the norm is right to about 10 percent. The differences between the sums
# of two runs give the norm of the difference of their tensors in the same way, which the sum of
# squares cannot give.
_SUMS = 64
# size of an element in bytes -> an integer dtype of that size
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The constants of splitmix64, as signed numbers.
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_OFFSET = 0x9E3779B97F4A7C15 - (1 << 64)
# 2 ** 32 divided by the golden ratio: it spreads small salts over the bits of a hash.
_SALT_FACTOR = 0x9E3779B9


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPart:
    """One rank's contribution to a sum over all elements of a global tensor.

    Attributes:
        local: this rank's values.
        indices: for each dim a 1-D tensor, the global indices of the local elements along the dim.
        sizes: the sizes of the global tensor.
        counted: False if this rank contributes nothing, because another rank has the same values
            or because this rank is outside of the mesh.
        meshes: the contributions are added over the ranks of each of these meshes, one mesh after
            the other: the mesh of a DTensor, and then the data axes that shard its rows.
    """

    local: Tensor
    indices: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    counted: bool
    meshes: tuple[DeviceMesh, ...]

    def sums(self, salt: int = 0) -> tuple[Tensor, Tensor]:
        """Compute the fingerprint of this part, on the CPU.

        Args:
            salt: a number that changes which sum an element is added to. If the ranks have values
                of their own with the same indices, each rank needs another salt, so that
                differences of two ranks do not cancel in the sum over ranks.

        Returns:
            A float64 tensor (66,) with the 64 sums, the sum of squares, and the number of elements
            that are infinite or nan. And an int64 tensor () with the digest.
        """
        local = self.local
        positions = self._positions()
        if local.is_complex():
            # Example: element 8 has its real part at position 16, its imaginary part at 17.
            local = torch.view_as_real(local.resolve_conj())
            real_positions = 2 * positions
            positions = torch.stack([real_positions, real_positions + 1], -1)
        # Without the offset, position 0 would have the hash 0.
        hashes = _mix(positions + _OFFSET).expand(local.shape)
        # The bits as int64. For some dtypes `long` extends the sign, on all ranks alike.
        integers = _BITS[local.element_size()]
        bits = local.contiguous().view(integers).long()
        # int64 wraps around, which makes this a sum modulo 2 ** 64. A part that is not counted
        # contributes 0.
        digest = _mix(bits + hashes).sum() * self.counted

        exact = local.double()
        is_finite = exact.isfinite()
        finite = torch.where(is_finite, exact, 0.0)
        values = finite.flatten() * self.counted
        # Bits 8 to 13 of the hash select the sum, and bit 32 selects the sign.
        salted = hashes.flatten() + salt * _SALT_FACTOR
        sum_index = (salted >> 8) & (_SUMS - 1)
        is_positive = ((salted >> 32) & 1) == 1
        terms = torch.where(is_positive, values, -values)
        sums = torch.zeros(_SUMS, dtype=torch.float64, device=local.device)
        sums.index_add_(0, sum_index, terms)

        squares = values.square().sum()
        broken = (~is_finite).sum() * self.counted
        fingerprint = torch.cat([sums, torch.stack([squares, broken])])
        return fingerprint.cpu(), digest.cpu()

    def _positions(self) -> Tensor:
        """Return the position of every local element in the flattened global tensor."""
        ndim = self.local.ndim
        positions = torch.zeros((1,) * ndim, dtype=torch.int64, device=self.local.device)
        for dim, (index, size) in enumerate(zip(self.indices, self.sizes, strict=True)):
            # Example: element (1, 2) of shape (4, 6) has position (0 * 4 + 1) * 6 + 2 = 8. `index`
            # gets a dim of size 1 for each later dim, so that it is added along its own dim.
            trailing = (1,) * (ndim - dim - 1)
            positions = positions * size + index.view(-1, *trailing)
        return positions


def part_of_tensor(tensor: Tensor) -> GlobalPart:
    """Return this rank's part of a DTensor or of a replicated tensor.

    Partial axes of a DTensor are reduced first.
    """
    if not isinstance(tensor, DTensor):
        all_indices = tuple(torch.arange(size, device=tensor.device) for size in tensor.shape)
        return GlobalPart(tensor, all_indices, tuple(tensor.shape), counted=True, meshes=())
    if tensor.spec.partials:
        reduced = tensor.spec.without_partials()
        tensor = tensor.redistribute(placements=reduced.placements)
    spec = tensor.spec
    sizes = tuple(spec.shape)
    local = local_shard(tensor)
    coordinate = _contributing_coordinate(tensor)
    if coordinate is None:
        no_indices = (torch.arange(0, device=local.device),) * len(sizes)
        no_values = local.new_empty([0] * len(sizes))
        return GlobalPart(no_values, no_indices, sizes, counted=False, meshes=(spec.mesh,))
    indices = []
    for sharding in spec.dim_shardings:
        numbers = sharding.indices(coordinate)
        indices.append(torch.tensor(numbers, dtype=torch.int64, device=local.device))
    return GlobalPart(local, tuple(indices), sizes, counted=True, meshes=(spec.mesh,))


def _contributing_coordinate(tensor: DTensor) -> tuple[int, ...] | None:
    """Return this rank's coordinate on the mesh, or None if the rank contributes nothing.

    It contributes nothing outside of the mesh, and where it is not the first of the replicas.
    """
    coordinate = tensor.spec.coordinate
    if coordinate is None:
        return None
    for coord, placement in zip(coordinate, tensor.spec.placements, strict=True):
        if coord and placement.is_replicate():
            return None
    return coordinate


def part_of_output(
    output: Tensor, lowered: Lowered | None, batch: DeviceMesh | None, *, grad: bool = False
) -> GlobalPart:
    """Return this rank's part of a module's output, or of the gradient at the output.

    Args:
        output: a DTensor, or the plain tensor that a module with a style returns.
        lowered: the forward that the module's style has put in the place of the module's own, which
            declares the layout of the output; needed for a plain tensor.
        batch: the data axes that shard dim 0; None if no axis does.
        grad: True if `output` is the gradient at the module's output.
    """
    if not isinstance(output, DTensor):
        # The style declares the layout of a plain tensor; without it the shard is unknown.
        assert lowered is not None, "a plain tensor is a known shard only under a style"
        output = _as_dtensor(output, lowered, grad=grad)
    part = part_of_tensor(output)
    if batch is None:
        return part
    data_ranks = _all_axes(batch)
    # If the DTensor's mesh has all data ranks, its spec also shards dim 0 over them, and the part
    # is already a part of the global batch.
    if set(data_ranks.ranks) <= set(_all_axes(output.device_mesh).ranks):
        return part
    # Otherwise the tensor has the rows of one data rank. All data ranks have equally many. Example:
    # with 3 rows on each, row 0 of data rank 2 is the global row 6.
    rows, *other_indices = part.indices
    row_count, *other_sizes = part.sizes
    indices = (rows + data_ranks.rank * row_count, *other_indices)
    sizes = (row_count * batch.size(), *other_sizes)
    return replace(part, indices=indices, sizes=sizes, meshes=(*part.meshes, batch))


def _as_dtensor(output: Tensor, lowered: Lowered, *, grad: bool) -> DTensor:
    """Wrap the plain output of a style by the layout that the style declares."""
    # the layout in which the output leaves the module
    layout = lowered.port_out.desired
    if isinstance(layout, Shard):
        dim = layout.dim % output.ndim
        # If the layout does not list the sizes of the shards, the output is sharded as the weight.
        # If the weight does not determine sizes either, None stands for the sizes of `torch.chunk`.
        sizes = layout.sizes or lowered.output_sizes(index=0, size=output.shape[dim])
        layout = Shard(dim, sizes=None if sizes is None else tuple(sizes))
    elif grad:
        # Every rank has the whole gradient of a replicated output, and of a partial one.
        layout = Replicate()
    return DTensor.from_local(output, lowered.mesh, [layout], run_check=False)


def _all_axes(mesh: DeviceMesh) -> Comm:
    """Return the communicator over all axes of a mesh."""
    return mesh.comm(tuple(range(mesh.ndim)))


def _mix(number: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to every element."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        number = (number ^ _shift_right(number, shift)) * factor
    return number ^ _shift_right(number, 31)


def _shift_right(number: Tensor, shift: int) -> Tensor:
    """Shift every element as an unsigned number.

    `>>` is arithmetic for signed numbers, so the bits that it fills in are masked off.
    """
    # Example: for a shift of 31, the 64 - 31 = 33 low bits are kept.
    low_bits = (1 << (64 - shift)) - 1
    return (number >> shift) & low_bits
