"""Layouts of local tensors with positions of the sequence, and reshapes of such tensors.

A layout is a `Spec` on a mesh of one axis: the ranks of the `context_parallel` block. The dim with
positions is `Shard(dim, sizes)`, or a `StridedShard` if a reshape has folded the dim before it into
it. A layout records only how many positions each rank holds. Only `are_whole_blocks` uses which
positions these are.

A row is one index of the dim with positions: one position, or after a reshape a part of a position
or several positions. A run is the rows of one batch row. An example is a rank's tensor of 2 batch
rows, 4 positions and 6 features:

| local shape                 | `SequenceDim` if two ranks hold 4 positions each | a row is        |
| --------------------------- | ------------------------------------------------ | --------------- |
| (2, 4, 6)                   | dim=1, runs=1, sizes=(4, 4)                      | a position      |
| reshaped to (8, 6)          | dim=0, runs=2, sizes=(4, 4)                      | a position      |
| reshaped to (2, 8, 3)       | dim=1, runs=1, sizes=(8, 8)                      | half a position |
| reshaped to (2, 2, 12)      | dim=1, runs=1, sizes=(2, 2)                      | two positions   |
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
    """The error for a reshape that joins positions of several ranges or batch rows in one row.

    A range is a run of neighboring positions that one rank holds, see `SequenceLayout`.
    """


class UnknownReshapeError(Exception):
    """The error for a reshape whose sizes do not show which dim holds positions."""


class SequenceDim(NamedTuple):
    """The dim of a tensor that holds positions.

    The docstring of the file defines rows and runs, and has examples.

    Attributes:
        dim: its index.
        runs: the number of batch rows that a reshape has folded into the dim; 1 without such a
            reshape.
        sizes: for each rank, its number of rows in one run.
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
    # The elements of a row, and of a block, which is this rank's rows of one run. Example: a row of
    # (2, 4, 6) has 6 elements, and a block has 4 * 6 = 24.
    rank = spec.mesh.get_local_rank()
    row = prod(spec.local_shape[held.dim + 1 :])
    block = row * held.sizes[rank]
    dim = _dim_of_blocks(local, block)
    had_single_dim = held.dim > 0 and spec.local_shape[held.dim - 1] == 1
    has_single_dim = dim > 0 and local[dim - 1] == 1
    if has_single_dim and not had_single_dim:
        # Example: a rank's (2, 4, 6) becomes (2, 1, 4, 6). After `unsqueeze(1)`, dim 2 holds the
        # positions on all ranks. After `view(2, -1, 4, 6)` dim 1 holds them: a rank with 8
        # positions has (2, 2, 4, 6). This rank's sizes are the same.
        raise UnknownReshapeError
    elements = prod(local[dim:])
    if elements % block:
        raise TornPositionsError
    new_row = prod(local[dim + 1 :])
    if new_row <= row:
        sizes = _split_rows(held.sizes, row, new_row)
    else:
        sizes = _join_rows(held.sizes, row, new_row, layout)
    target = SequenceDim(dim, runs=elements // block, sizes=sizes)
    return target.spec_of(spec.mesh, local, spec.dtype)


def _split_rows(sizes: Sequence[int], row: int, new_row: int) -> tuple[int, ...]:
    """Return the ranks' numbers of rows after rows of `row` elements are split.

    Example: rows of 6 elements, split into rows of 3 -> twice as many rows.
    """
    if row % new_row:
        raise TornPositionsError
    parts = row // new_row
    return tuple([size * parts for size in sizes])


def _join_rows(
    sizes: Sequence[int], row: int, new_row: int, layout: SequenceLayout
) -> tuple[int, ...]:
    """Return the ranks' numbers of rows after rows of `row` elements are joined.

    Example: rows of 6 elements, joined to rows of 12 -> half as many rows.
    """
    joined, remainder = divmod(new_row, row)
    if remainder or not are_whole_blocks(layout, joined, sum(sizes)):
        raise TornPositionsError
    return tuple([size // joined for size in sizes])


def _dim_of_blocks(shape: Sequence[int], block: int) -> int:
    """Return the dim in which blocks of so many elements follow one another.

    A row of this dim is smaller than a block, and the whole dim has at least one block. Exactly one
    dim is like this, because a block has at least two elements.
    """
    # Example: blocks of 24 elements in (2, 4, 6) -> dim 1, whose rows have 6 elements, and which
    # has 4 * 6 = 24 elements.
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

    Example: of 16 rows two ranks hold 8 each. A result with sizes (4, 4) keeps the fractions, and a
    result with (5, 3) does not. If a result has fewer rows, such as 8 of 16 by `x[::2]`, a row of
    it stands for a block of 2 rows of the source. The ranges of the layout must then be whole
    blocks: from rows 0 to 3 of a rank, `x[::2]` takes the rows 0 and 2, as on one device. From the
    rows 3 to 5 it would take 3 and 5, where one device takes 4.
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

    A block is `joined` rows that follow one another, counted from the first row of the sequence.

    Args:
        layout: the positions of the ranks.
        joined: number of rows of a block.
        rows: number of rows of the whole sequence.
    """
    for ranges_of_rank in layout.ranges:
        for start, stop in ranges_of_rank:
            for border in (start, stop):
                # The border in rows is border * rows / length, and must be a multiple of `joined`.
                # Example: 8 positions are 8 rows, in blocks of 2. The range 0:4 has the borders 0
                # and 4, so it is 2 blocks. The range 0:3 ends in the middle of a block.
                if border * rows % (layout.length * joined):
                    return False
    return True
