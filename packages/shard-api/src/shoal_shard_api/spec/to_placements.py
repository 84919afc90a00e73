"""Sharding specs and DTensor placements, each expressed in the other.

Both are a ``Grid``: a mesh of ranks, and for every mesh axis the tensor dim that it shards and the shard sizes.

    one sharded dim           1-D mesh, ranks in the order of their shards; ranks without a shard have size 0
    n-D grid of shards        n-D mesh of the same shape
    bricks, several per rank  no placements: NotExpressibleError
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

from shoal_dtensor import Shard
from shoal_dtensor.internal import Box, format_box, grid, spans, volume
from shoal_mesh.internal import dataclass

from ..errors import NotExpressibleError
from .metadata import Layout


@dataclass(frozen=True, slots=True)
class Grid:
    """Shards that are the cells of a grid, on a mesh of the same shape.

    Attributes:
        mesh_shape: Number of shards along every mesh axis.
        ranks: Global rank at every mesh coordinate, row-major.
        placements: For every mesh axis, the tensor dim that it shards and the shard sizes.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Shard, ...]


@lru_cache(maxsize=4096)
def grid_of(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Grid:
    """The grid with this layout that has every member of the process group in its mesh.

    Args:
        layout: Global rank and box of every shard.
        shape: Global size of the tensor.
        members: Global ranks of the process group.

    Raises:
        NotExpressibleError: There is none; says why.

    Example:
        >>> from shoal_shard_api.spec.to_placements import grid_of
        >>> grid_of(((1, ((0, 2),)), (0, ((2, 3),))), (3,), (0, 1)).placements
        (Shard(dim=0, sizes=(2, 1)),)
    """
    if not shape:
        raise NotExpressibleError("a 0-dim tensor has no dim that a Shard placement could shard")
    filled = {rank: box for rank, box in layout if volume(box) > 0}
    several = [rank for rank in filled if sum(1 for r, box in layout if r == rank and volume(box) > 0) > 1]
    if several:
        raise NotExpressibleError(f"ranks {several} hold several shards each; a DTensor has one shard on each rank")
    sizes = grid(list(filled.values()), shape)
    if sizes is None:
        raise NotExpressibleError(
            f"the {len(filled)} shards are not all cells of a grid over a tensor of size {shape}: "
            + ", ".join(f"{format_box(box)} on rank {rank}" for rank, box in sorted(filled.items()))
        )
    sharded = [dim for dim, along in enumerate(sizes) if len(along) > 1]
    if len(sharded) <= 1:
        return _one_dim_grid(layout, filled, sharded[0] if sharded else _only_dim(layout, shape), members)
    return _n_dim_grid(filled, sizes, sharded, members)


def _only_dim(layout: Layout, shape: tuple[int, ...]) -> int:
    """The dim to shard if one rank holds every element: the dim along which the other shards are empty, else dim 0."""
    for _, box in layout:
        for dim, (start, stop) in enumerate(box):
            if start == stop and shape[dim] > 0:
                return dim
    return 0


def _one_dim_grid(layout: Layout, filled: dict[int, Box], dim: int, members: tuple[int, ...]) -> Grid:
    """Ranks in the order of their shards along ``dim``, then ranks with an empty shard, then those without a shard."""
    order = sorted(filled, key=lambda rank: filled[rank][dim][0])
    rest = [rank for rank, _ in layout if rank not in filled] + [rank for rank in members if rank not in filled]
    ranks = tuple(dict.fromkeys([*order, *rest]))
    sizes = tuple(filled[rank][dim][1] - filled[rank][dim][0] if rank in filled else 0 for rank in ranks)
    return Grid((len(ranks),), ranks, (Shard(dim, sizes=sizes),))


def _n_dim_grid(
    filled: dict[int, Box], shard_sizes: tuple[tuple[int, ...], ...], sharded: list[int], members: tuple[int, ...]
) -> Grid:
    """Cells of an n-D grid.  Idle ranks hold empty shards at the end of one axis, if they fill whole rows of the mesh.

    2 x 2 shards on 6 ranks: a (3, 2) mesh whose last row is empty.  On 5 ranks: no mesh.
    """
    sizes = [list(shard_sizes[dim]) for dim in sharded]
    idle = [rank for rank in members if rank not in filled]
    holder = {box: rank for rank, box in filled.items()}
    if idle:
        fits = [axis for axis, n in enumerate(sizes) if len(idle) % (len(filled) // len(n)) == 0]
        if not fits:
            raise NotExpressibleError(
                f"a grid of {' x '.join(str(len(n)) for n in sizes)} shards on {len(members)} ranks leaves the ranks "
                f"{idle} idle, and they do not fill a row of a mesh of all ranks"
            )
        sizes[fits[0]] += [0] * (len(idle) // (len(filled) // len(sizes[fits[0]])))
    cells = [spans(n) for n in shard_sizes]
    spare = iter(idle)
    ranks = []
    for coordinate in product(*(range(len(n)) for n in sizes)):
        at = dict(zip(sharded, coordinate, strict=True))
        inside = all(at[dim] < len(shard_sizes[dim]) for dim in sharded)
        ranks.append(holder[tuple(cells[d][at.get(d, 0)] for d in range(len(shard_sizes)))] if inside else next(spare))
    placements = tuple(Shard(dim, sizes=tuple(n)) for dim, n in zip(sharded, sizes, strict=True))
    mesh_shape = tuple(len(n) for n in sizes)
    assert prod(mesh_shape) == len(ranks) == len(members), "every member is at one coordinate"
    return Grid(mesh_shape, tuple(ranks), placements)
