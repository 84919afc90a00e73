"""Layouts of local tensors with positions of the sequence, and reshapes of such tensors.

A layout is a `Spec` on the mesh of the block. The dim with positions is `Shard(dim, sizes)`, or a
`StridedShard` if a reshape has folded the dim before it into it. The order of positions is that of
the ranks: which positions a rank holds does not matter here, with one exception (`is_whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from shoal_dtensor import Placement, Shard, Spec, StridedShard
from shoal_mesh import DeviceMesh

from ..sequence_layout import SequenceLayout


class TornPositionsError(Exception):
    """The error for a reshape after which a row has a part of one block of positions."""


class UnknownReshapeError(Exception):
    """The error for a reshape whose sizes do not show which dim holds positions."""


class SequenceDim(NamedTuple):
    """The dim of a tensor that holds positions.

    Attributes:
        dim: its index.
        runs: the number of equal runs of positions in it: the batch rows that a reshape has folded
            into it, or 1.
        sizes: rows of one run on each rank.
    """

    dim: int
    runs: int
    sizes: tuple[int, ...]

    @property
    def placement(self) -> Placement:
        """The placement of the dim."""
        is_even = len(set(self.sizes)) == 1
        if self.runs > 1:
            return StridedShard(self.dim, split_factor=self.runs, sizes=self.sizes)
        return Shard(self.dim) if is_even else Shard(self.dim, sizes=self.sizes)

    def spec_of(self, mesh: DeviceMesh, local: Sequence[int], dtype: torch.dtype) -> Spec:
        """Return the layout of a tensor with such a dim, from its local shape."""
        shape = [*local]
        shape[self.dim] = self.runs * sum(self.sizes)
        return Spec(mesh, [self.placement], shape, None, dtype=dtype)


def sequence_dim(spec: Spec) -> SequenceDim | None:
    """Return the dim of a layout that holds positions; None if it has none."""
    placement = spec.placements[0]
    if not isinstance(placement, Shard | StridedShard):
        return None
    runs = placement.split_factor if isinstance(placement, StridedShard) else 1
    sharding = spec.dim_shardings[placement.dim]
    sizes = [sharding.size((rank,)) // runs for rank in range(spec.mesh.size())]
    return SequenceDim(placement.dim, runs, tuple(sizes))


def reshaped(spec: Spec, local: Sequence[int], layout: SequenceLayout) -> Spec:
    """Return the layout after a reshape of a rank's tensor to a local shape.

    Raises:
        TornPositionsError: if positions of several ranges, or of several batch rows, would share a
            row.
        UnknownReshapeError: if sizes do not show which dim holds positions.
    """
    held = sequence_dim(spec)
    if held is None:
        return spec.with_(shape=tuple(local))
    if 0 in local:
        raise UnknownReshapeError
    # Example: (2, 4, 6) on this rank, dim 1 has 4 positions -> one position is 6 elements, and the
    # positions of a batch row are 24.
    rank = spec.mesh.get_local_rank()
    elements = prod(spec.local_shape[held.dim + 1 :])
    count = held.sizes[rank]
    span = elements * count
    place = [j for j in range(len(local)) if prod(local[j + 1 :]) < span <= prod(local[j:])]
    assert len(place) == 1, "a block of at least two positions begins in one dim"
    (dim,) = place
    if dim and local[dim - 1] == 1 and spec.local_shape[held.dim - 1 : held.dim] != (1,):
        # Example: a rank's 4 positions as (2, 1, 4, 6) are a new dim, or one block of 4 positions.
        raise UnknownReshapeError
    row = prod(local[dim + 1 :])
    if prod(local[dim:]) % span:
        raise TornPositionsError
    runs = prod(local[dim:]) // span
    if row <= elements:
        # Reshaped to (8, 6): one row for each position. To (2, 8, 3): two rows for each.
        if elements % row:
            raise TornPositionsError
        sizes = [size * (elements // row) for size in held.sizes]
    else:
        # Reshaped to (2, 2, 2, 6): a row has two positions.
        if row % elements or not is_whole(layout, row // elements, sum(held.sizes)):
            raise TornPositionsError
        sizes = [size // (row // elements) for size in held.sizes]
    target = SequenceDim(dim, runs, tuple(sizes))
    return target.spec_of(spec.mesh, local, spec.dtype)


def expanded(spec: Spec, local: Sequence[int]) -> Spec:
    """Return the layout after an expansion to a local shape, which may have new first dims."""
    held = sequence_dim(spec)
    if held is None:
        return spec.with_(shape=tuple(local))
    target = held._replace(dim=held.dim + len(local) - spec.ndim)
    return target.spec_of(spec.mesh, local, spec.dtype)


def holds_blocks(layout: SequenceLayout, source: Spec, result: Spec) -> bool:
    """Tell whether a result holds the same fraction of its rows on each rank as a source.

    Where there are fewer rows, such as each second one, the ranges of the layout must begin and
    end at such rows.
    """
    before = sequence_dim(source)
    after = sequence_dim(result)
    assert before is not None, "the source is sharded"
    assert after is not None, "the result is sharded"
    rows = sum(before.sizes)
    total = sum(after.sizes)
    for size, size_before in zip(after.sizes, before.sizes, strict=True):
        if size * rows != size_before * total:
            return False
    if total >= rows:
        return total % rows == 0
    return rows % total == 0 and is_whole(layout, rows // total, rows)


def is_whole(layout: SequenceLayout, joined: int, rows: int) -> bool:
    """Tell whether each range of the layout is a number of blocks of so many rows.

    The whole sequence has `rows` rows.
    """
    # Example: the range 0:4 of 8 positions, which are 8 rows, has 2 blocks of 2; 0:3 has not.
    borders = {border for ranges in layout.ranges for pair in ranges for border in pair}
    return all(border * rows % (layout.length * joined) == 0 for border in borders)
