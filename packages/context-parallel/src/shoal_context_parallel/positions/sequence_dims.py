"""Layouts of local tensors with positions of the sequence, and reshapes of such tensors.

A layout is a `Spec` on the mesh of the block. The dim with positions is `Shard(dim, sizes)`, or a
`StridedShard` if a reshape has folded the dim before it into it. In a layout the ranks' positions
follow one another: which positions a rank holds does not matter here, with one exception
(`are_whole_blocks`).
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
    """The error for a reshape after which a row has positions of several ranges or batch rows."""


class UnknownReshapeError(Exception):
    """The error for a reshape whose sizes do not show which dim holds positions."""


class SequenceDim(NamedTuple):
    """The dim of a tensor that holds positions.

    Attributes:
        dim: its index.
        runs: the number of equal runs of positions in it: the batch rows that a reshape has folded
            into it, or 1.
        sizes: rows of one run on each rank. A row is one position, or a part of a position or
            several positions after a reshape.
    """

    dim: int
    runs: int
    sizes: tuple[int, ...]

    @property
    def placement(self) -> Placement:
        """The placement of the dim."""
        if self.runs > 1:
            return StridedShard(self.dim, split_factor=self.runs, sizes=self.sizes)
        is_even = len(set(self.sizes)) == 1
        return Shard(self.dim) if is_even else Shard(self.dim, sizes=self.sizes)

    def spec_of(self, mesh: DeviceMesh, local: Sequence[int], dtype: torch.dtype) -> Spec:
        """Return the layout of a tensor with this dim, from its local shape."""
        shape = [*local]
        shape[self.dim] = self.runs * sum(self.sizes)
        return Spec(mesh, [self.placement], shape, None, dtype=dtype)


def sequence_dim(spec: Spec) -> SequenceDim | None:
    """Return the dim of a layout that holds positions; None if no dim does."""
    # The mesh has one axis, so the layout has one placement.
    placement = spec.placements[0]
    if not isinstance(placement, Shard | StridedShard):
        return None
    runs = placement.split_factor if isinstance(placement, StridedShard) else 1
    sharding = spec.dim_shardings[placement.dim]
    sizes = [sharding.size((rank,)) // runs for rank in range(spec.mesh.size())]
    return SequenceDim(placement.dim, runs, tuple(sizes))


def reshape_layout(spec: Spec, local: Sequence[int], layout: SequenceLayout) -> Spec:
    """Return the layout after a reshape of a rank's tensor to a local shape.

    Args:
        spec: the layout before the reshape.
        local: this rank's shape after it.
        layout: the positions of the ranks.

    Raises:
        TornPositionsError: if positions of several ranges, or of several batch rows, would share a
            row.
        UnknownReshapeError: if sizes do not show which dim holds positions.
    """
    held = sequence_dim(spec)
    if held is None:
        return spec.with_(shape=tuple(local))
    if 0 in local or min(held.sizes) < 2:
        # All sizes fit a tensor without elements. One row of a rank fits each dim of size 1.
        raise UnknownReshapeError
    # Example: (2, 4, 6) on this rank, dim 1 has 4 positions -> a row (one position) is 6 elements,
    # and a block (the positions of a batch row) is 24.
    rank = spec.mesh.get_local_rank()
    row = prod(spec.local_shape[held.dim + 1 :])
    block = row * held.sizes[rank]
    dim = _dim_of_blocks(local, block)
    has_single_dim_before = dim > 0 and local[dim - 1] == 1
    if has_single_dim_before and spec.local_shape[held.dim - 1 : held.dim] != (1,):
        # Example: a rank's 4 positions as (2, 1, 4, 6) are a new dim, or one block of 4 positions.
        raise UnknownReshapeError
    new_row = prod(local[dim + 1 :])
    elements_of_dim = prod(local[dim:])
    if elements_of_dim % block:
        raise TornPositionsError
    runs = elements_of_dim // block
    if new_row <= row:
        # Reshaped to (8, 6): one row for each position. To (2, 8, 3): two rows for each.
        if row % new_row:
            raise TornPositionsError
        rows_of_position = row // new_row
        sizes = [size * rows_of_position for size in held.sizes]
    else:
        # Reshaped to (2, 2, 2, 6): a row has two positions.
        joined, remainder = divmod(new_row, row)
        if remainder or not are_whole_blocks(layout, joined, sum(held.sizes)):
            raise TornPositionsError
        sizes = [size // joined for size in held.sizes]
    target = SequenceDim(dim, runs, tuple(sizes))
    return target.spec_of(spec.mesh, local, spec.dtype)


def _dim_of_blocks(shape: Sequence[int], block: int) -> int:
    """Return the dim in which blocks of so many elements follow one another.

    A row of this dim is smaller than a block, and the whole dim has at least one block. Exactly one
    dim is like this, because a block has at least two elements.
    """
    # Example: blocks of 24 elements in (2, 4, 6) -> dim 1, with rows of 6, and 24 in all.
    dims = []
    for dim in range(len(shape)):
        row = prod(shape[dim + 1 :])
        if row < block <= row * shape[dim]:
            dims.append(dim)
    assert len(dims) == 1, "a block of at least two elements begins in one dim"
    return dims[0]


def expand_layout(spec: Spec, local: Sequence[int]) -> Spec:
    """Return the layout after an expansion to a local shape, which may have new first dims."""
    held = sequence_dim(spec)
    if held is None:
        return spec.with_(shape=tuple(local))
    new_dims = len(local) - spec.ndim
    target = held._replace(dim=held.dim + new_dims)
    return target.spec_of(spec.mesh, local, spec.dtype)


def keeps_fractions(layout: SequenceLayout, source: Spec, result: Spec) -> bool:
    """Tell whether each rank holds the same fraction of a result's rows as of a source's rows.

    If the result has fewer rows, such as each second one, the ranges of the layout must also begin
    and end at such rows.
    """
    before = sequence_dim(source)
    after = sequence_dim(result)
    assert before is not None, "the source is sharded"
    assert after is not None, "the result is sharded"
    rows_before = sum(before.sizes)
    rows_after = sum(after.sizes)
    for size_after, size_before in zip(after.sizes, before.sizes, strict=True):
        # size_after / rows_after == size_before / rows_before, in integers
        if size_after * rows_before != size_before * rows_after:
            return False
    if rows_after >= rows_before:
        return rows_after % rows_before == 0
    joined, remainder = divmod(rows_before, rows_after)
    return not remainder and are_whole_blocks(layout, joined, rows_before)


def are_whole_blocks(layout: SequenceLayout, joined: int, rows: int) -> bool:
    """Tell whether each range of the layout is a whole number of blocks.

    Args:
        layout: the positions of the ranks.
        joined: number of rows of a block.
        rows: number of rows of the whole sequence.
    """
    # Example: the range 0:4 of 8 positions, which are 8 rows, has 2 blocks of 2; 0:3 does not end
    # with a block.
    borders = {border for ranges in layout.ranges for pair in ranges for border in pair}
    # border / length * rows is the border in rows.
    return all(border * rows % (layout.length * joined) == 0 for border in borders)
