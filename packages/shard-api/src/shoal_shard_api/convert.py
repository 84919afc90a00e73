"""Sharding specs and DTensor placements, each expressed in the other.  Pure: no process group, no data.

The bridge is a ``Grid``: a mesh of ranks, and for every mesh axis the tensor dim it cuts and the sizes of the pieces.
One cut dim is a 1-D mesh with the ranks in the order of their pieces (ranks that hold nothing get pieces of size 0); a
full n-D grid of boxes is an n-D mesh.  Bricks, holes and several shards on a rank have no counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod

from shoal_dtensor import Shard

from ._torch import RemoteDevice
from .boxes import Box, grid, show, volume
from .chunk_spec import ChunkShardingSpec
from .enumerable_spec import EnumerableShardingSpec, _infer_sharding_spec_from_shards_metadata
from .errors import NotExpressibleError
from .metadata import Layout, ShardMetadata
from .spec import ShardingSpec


@dataclass(frozen=True, slots=True)
class Grid:
    """Boxes that are the cells of a grid, on a mesh of the same shape.

    Attributes:
        mesh_shape: Number of pieces along every mesh axis.
        ranks: Global rank at every mesh coordinate, row-major.
        placements: For every mesh axis, the tensor dim it cuts and the pieces' sizes.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Shard, ...]


@lru_cache(maxsize=4096)
def grid_of(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Grid:
    """The grid that a layout is, with every member of the process group in it.

    Args:
        layout: Holder and box of every shard.
        shape: Size of the tensor.
        members: Global ranks of the process group.

    Raises:
        NotExpressibleError: The layout is no grid; says what stands in the way.
    """
    if not shape:
        raise NotExpressibleError("a 0-dim tensor has no dim that a Shard placement could cut")
    filled = {rank: box for rank, box in layout if volume(box) > 0}
    several = [rank for rank in filled if sum(1 for r, box in layout if r == rank and volume(box) > 0) > 1]
    if several:
        raise NotExpressibleError(f"ranks {several} hold several shards each; a DTensor has one box a rank")
    pieces = grid(list(filled.values()), shape)
    if pieces is None:
        raise NotExpressibleError(
            f"the {len(filled)} shards are not all cells of a grid over a tensor of size {shape}: "
            + ", ".join(f"{show(box)} on rank {rank}" for rank, box in sorted(filled.items()))
        )
    cut = [dim for dim, sizes in enumerate(pieces) if len(sizes) > 1]
    if len(cut) <= 1:
        return _line(layout, filled, cut[0] if cut else _only_dim(layout, shape), members)
    return _block(filled, pieces, cut, members)


def _only_dim(layout: Layout, shape: tuple[int, ...]) -> int:
    """The dim to call cut where one shard holds all: the one along which the others are empty, else the first."""
    for _, box in layout:
        for dim, (start, stop) in enumerate(box):
            if start == stop and shape[dim] > 0:
                return dim
    return 0


def _line(layout: Layout, filled: dict[int, Box], dim: int, members: tuple[int, ...]) -> Grid:
    """Pieces along one dim: ranks ordered by their pieces, then those without, in the order of the layout and group."""
    order = sorted(filled, key=lambda rank: filled[rank][dim][0])
    rest = [rank for rank, _ in layout if rank not in filled] + [rank for rank in members if rank not in filled]
    ranks = tuple(dict.fromkeys([*order, *rest]))
    sizes = tuple(filled[rank][dim][1] - filled[rank][dim][0] if rank in filled else 0 for rank in ranks)
    return Grid((len(ranks),), ranks, (Shard(dim, sizes=sizes),))


def _block(
    filled: dict[int, Box], pieces: tuple[tuple[int, ...], ...], cut: list[int], members: tuple[int, ...]
) -> Grid:
    """Cells of an n-D grid.  Idle ranks become empty cells at the end of an axis, where their number allows it."""
    sizes = [list(pieces[dim]) for dim in cut]
    idle = [rank for rank in members if rank not in filled]
    holder = {box: rank for rank, box in filled.items()}
    if idle:
        fits = [axis for axis, n in enumerate(sizes) if len(idle) % (len(filled) // len(n)) == 0]
        if not fits:
            raise NotExpressibleError(
                f"a grid of {' x '.join(str(len(n)) for n in sizes)} shards on {len(members)} ranks leaves the ranks "
                f"{idle} idle, which no mesh of all ranks can express"
            )
        sizes[fits[0]] += [0] * (len(idle) // (len(filled) // len(sizes[fits[0]])))
    spans = [_spans(n) for n in pieces]
    spare = iter(idle)
    ranks = []
    for coordinate in product(*(range(len(n)) for n in sizes)):
        at = dict(zip(cut, coordinate, strict=True))
        inside = all(at[dim] < len(pieces[dim]) for dim in cut)
        ranks.append(holder[tuple(spans[d][at.get(d, 0)] for d in range(len(pieces)))] if inside else next(spare))
    placements = tuple(Shard(dim, sizes=tuple(n)) for dim, n in zip(cut, sizes, strict=True))
    mesh_shape = tuple(len(n) for n in sizes)
    assert prod(mesh_shape) == len(ranks) == len(members), "every member has one cell"
    return Grid(mesh_shape, tuple(ranks), placements)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    stops = list(accumulate(sizes))
    return [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def spec_of(layout: Sequence[tuple[int, Box]], devices: dict[int, RemoteDevice]) -> ShardingSpec:
    """The sharding spec of these boxes: a ChunkShardingSpec where it can be one, else an EnumerableShardingSpec.

    Args:
        layout: Holder and box of every shard, at most one a rank.
        devices: Placement to write for every global rank.
    """
    shards = [
        ShardMetadata([start for start, _ in box], [stop - start for start, stop in box], devices[rank])
        for rank, box in layout
    ]
    inferred = _infer_sharding_spec_from_shards_metadata(shards)
    if isinstance(inferred, ChunkShardingSpec):
        return inferred
    # Empty boxes stay only where torch.chunk would make them: elsewhere they say nothing.
    return EnumerableShardingSpec([shard for shard in shards if volume(shard.box) > 0] or shards[:1])
