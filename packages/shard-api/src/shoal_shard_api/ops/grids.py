"""Grids of shards: a mesh of ranks, and for every mesh axis the tensor dim that it shards.

one sharded dim           1-D mesh, ranks in the order of their shards; ranks without a shard have
                          an empty one
n-D grid of shards        n-D mesh of the same shape
no grid, or several       no placements: NotExpressibleError
shards on a rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from shoal_dtensor import Shard
from shoal_dtensor.internal import Box, format_box, grid, spans, volume

from ..errors import NotExpressibleError
from ..spec.metadata import Layout


class Grid(NamedTuple):
    """Shards that are the cells of a grid, on a mesh of the same shape.

    Attributes:
        mesh_shape: The number of shards along every mesh axis.
        ranks: The global rank at every mesh coordinate, row-major.
        placements: For every mesh axis, the tensor dim that it shards and the shard sizes.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Shard, ...]


@lru_cache(maxsize=4096)
def grid_of(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Grid:
    """Return the grid of a layout, whose mesh has every member of the process group.

    Ranks without elements hold empty shards at the end of one axis, if they fill whole rows of the
    mesh: 2 x 2 shards on 6 ranks have a (3, 2) mesh whose last row is empty; on 5 ranks they have
    no mesh.

    Raises:
        NotExpressibleError: The shards are not a grid, or a rank has several of them.

    Example:
        >>> from shoal_shard_api.ops.grids import grid_of
        >>> grid_of(((1, ((0, 2),)), (0, ((2, 3),))), (3,), (0, 1)).placements
        (Shard(dim=0, sizes=(2, 1)),)
    """
    if not shape:
        raise NotExpressibleError("a tensor of 0 dims cannot have a Shard placement")
    holders = _holders(layout)
    cells = _cells(holders, shape)
    dims = [dim for dim, sizes in enumerate(cells) if len(sizes) > 1]
    if not dims:
        dims = [_dim_of_empty_shards(layout, shape)]
    # Shard sizes along every mesh axis.
    axes = [list(cells[dim]) if holders else [] for dim in dims]
    ranks_of_layout = [rank for rank, _ in layout]
    candidates = dict.fromkeys([*ranks_of_layout, *members])
    idle = [rank for rank in candidates if rank not in holders.values()]
    if idle:
        _add_empty_shards(axes, idle, len(holders), len(members))

    mesh_shape = tuple([len(sizes) for sizes in axes])
    spans_by_dim = [spans(sizes) for sizes in cells]
    idle_ranks = iter(idle)
    ranks = []
    for coordinate in product(*map(range, mesh_shape)):
        box = _box_at(coordinate, dims, spans_by_dim) if holders else None
        ranks.append(next(idle_ranks) if box is None else holders[box])
    pairs = zip(dims, axes, strict=True)
    placements = tuple([Shard(dim, sizes=tuple(sizes)) for dim, sizes in pairs])
    return Grid(mesh_shape, tuple(ranks), placements)


def _cells(holders: Mapping[Box, int], shape: tuple[int, ...]) -> Sequence[Sequence[int]]:
    """Return the sizes of the cells along every tensor dim.

    Raises:
        NotExpressibleError: The shards are not all cells of a grid.
    """
    # Example: shards 0:2 and 2:3 of a tensor of size (3,) -> ((2, 1),).
    cells = grid(list(holders), shape)
    if cells is None:
        held = ", ".join([f"{format_box(box)} on rank {rank}" for box, rank in holders.items()])
        raise NotExpressibleError(
            f"the shards are not all cells of a grid over size {shape}: {held}"
        )
    return cells


def _box_at(
    coordinate: Sequence[int],
    dims: Sequence[int],
    spans_by_dim: Sequence[Sequence[tuple[int, int]]],
) -> Box | None:
    """Return the cell at a mesh coordinate; None if the mesh is larger than the grid there."""
    # Example: in a mesh of (3, 2) over 2 x 2 cells, (2, 0) and (2, 1) do not have a cell.
    index_by_dim = dict(zip(dims, coordinate, strict=True))
    if any(index >= len(spans_by_dim[dim]) for dim, index in index_by_dim.items()):
        return None
    # A dim that the mesh does not shard has one cell.
    return tuple([pairs[index_by_dim.get(dim, 0)] for dim, pairs in enumerate(spans_by_dim)])


def _holders(layout: Layout) -> dict[Box, int]:
    """Return the rank that holds each box with elements.

    Raises:
        NotExpressibleError: A rank holds several of them.
    """
    filled = [(rank, box) for rank, box in layout if volume(box) > 0]
    counts = Counter(rank for rank, _ in filled)
    several = [rank for rank, count in counts.items() if count > 1]
    if several:
        raise NotExpressibleError(
            f"ranks {several} hold several shards each; a DTensor has one shard on each rank"
        )
    return {box: rank for rank, box in sorted(filled)}


def _dim_of_empty_shards(layout: Layout, shape: tuple[int, ...]) -> int:
    """Return the dim to shard if one rank holds every element, or if there is no element.

    The dim is one along which the other shards are empty.
    """
    if 0 in shape:
        return shape.index(0)
    for _, box in layout:
        for dim, (start, stop) in enumerate(box):
            if start == stop:
                return dim
    return 0


def _add_empty_shards(axes: list[list[int]], idle: list[int], filled: int, members: int) -> None:
    """Add shards of size 0 to the first axis whose rows the idle ranks fill.

    Args:
        axes: Shard sizes along every mesh axis; one of them is extended in place.
        idle: The ranks without elements.
        filled: The number of ranks with elements.
        members: The number of all ranks.

    Raises:
        NotExpressibleError: The idle ranks fill the rows of no axis.
    """
    for sizes in axes:
        # Number of ranks at one index of the axis. Example: in a 2 x 2 grid, 2 ranks are a row.
        row = max(filled, 1) // max(len(sizes), 1)
        if len(idle) % row == 0:
            sizes += [0] * (len(idle) // row)
            return
    counts = " x ".join(str(len(sizes)) for sizes in axes)
    raise NotExpressibleError(
        f"a grid of {counts} shards on {members} ranks leaves the ranks {idle} idle, which do not "
        "fill a row of a mesh of all ranks"
    )
