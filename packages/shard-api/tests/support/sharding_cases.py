"""Specs with short names, random specs, and a tensor sharded by them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from shoal_shard_api import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    _shard_tensor,
)

WORLD = (0, 1, 2, 3)
FULL = torch.arange(30.0).reshape(6, 5)
KINDS = ("chunk", "uneven", "grid", "several", "bricks")
"""Kinds of random specs.

They are torch.chunk in any order on some ranks; ragged slabs; a 2 x 2 grid; any number of shards
per rank; shards in no grid, one per rank."""


def placements(*ranks: int) -> list[str]:
    """The CPUs of ranks."""
    return [f"rank:{rank}/cpu" for rank in ranks]


def shard(offsets: Sequence[int], sizes: Sequence[int], rank: int = 0) -> ShardMetadata:
    """A shard on the CPU of a rank."""
    return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")


def chunk(dim: int, ranks: Sequence[int] = WORLD) -> ChunkShardingSpec:
    """One dim sharded into one chunk per rank, on CPU."""
    return ChunkShardingSpec(dim, placements(*ranks))


def enumerable(*shards: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Shards as (offsets, sizes, rank)."""
    return EnumerableShardingSpec([shard(*each) for each in shards])


def bricks(rows: int, columns: int, first: int = 2) -> EnumerableShardingSpec:
    """Three columns on rank 3 in two shards, the others on rank 1: what no DTensor can express."""
    return enumerable(
        ([0, 0], [first, 3], 3),
        ([0, 3], [rows, columns - 3], 1),
        ([first, 0], [rows - first, 3], 3),
    )


def random_spec(
    random: Random, kind: str, shape: Sequence[int], ranks: Sequence[int] = WORLD
) -> ShardingSpec:
    """A spec of one kind for a tensor of this shape.

    It is the same on every rank that has the same random state.
    """
    order = random.sample(list(ranks), len(ranks))
    if kind == "chunk":
        return chunk(random.randrange(len(shape)), order[: random.randint(1, len(order))])
    if kind == "uneven":
        dim = random.randrange(len(shape))
        edges = sorted({0, shape[dim], *(random.randint(0, shape[dim]) for _ in order[1:])})
        spans = list(pairwise(edges))
        return enumerable(
            *(_slab(shape, dim, a, b, rank) for (a, b), rank in zip(spans, order, strict=False))
        )
    if kind == "grid" and len(shape) > 1 and min(shape[:2]) > 1 and len(ranks) == 4:
        row, column = random.randint(1, shape[0] - 1), random.randint(1, shape[1] - 1)
        cells = [
            ((a, b), (c, d))
            for a, b in ((0, row), (row, shape[0]))
            for c, d in ((0, column), (column, shape[1]))
        ]
        return enumerable(
            *(_cell(shape, cell, rank) for cell, rank in zip(cells, order, strict=True))
        )
    return _tiling(
        random, shape, order, splits=2 if kind == "bricks" else 6, repeat=kind == "several"
    )


def _slab(
    shape: Sequence[int], dim: int, start: int, stop: int, rank: int
) -> tuple[list[int], list[int], int]:
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, stop - start
    return offsets, sizes, rank


def _cell(
    shape: Sequence[int], cell: tuple[tuple[int, int], ...], rank: int
) -> tuple[list[int], list[int], int]:
    box = [*cell, *((0, n) for n in shape[len(cell) :])]
    return [a for a, _ in box], [b - a for a, b in box], rank


def _tiling(
    random: Random, shape: Sequence[int], order: Sequence[int], *, splits: int, repeat: bool
) -> ShardingSpec:
    """Boxes split again and again, each on a random rank (``repeat``), or one on each rank."""
    boxes = [[(0, n) for n in shape]]
    while len(boxes) < (splits if repeat else min(splits + 1, len(order))):
        box = boxes.pop(random.randrange(len(boxes)))
        dims = [d for d, (a, b) in enumerate(box) if b - a > 1]
        if not dims:
            boxes.append(box)
            break
        dim = random.choice(dims)
        a, b = box[dim]
        at = random.randint(a + 1, b - 1)
        boxes += [[*box[:dim], (a, at), *box[dim + 1 :]], [*box[:dim], (at, b), *box[dim + 1 :]]]
    ranks = [random.choice(order) for _ in boxes] if repeat else order
    return enumerable(
        *(
            ([a for a, _ in box], [b - a for a, b in box], rank)
            for box, rank in zip(boxes, ranks, strict=False)
        )
    )


def sharded(
    spec: ChunkShardingSpec | EnumerableShardingSpec, full: torch.Tensor = FULL
) -> ShardedTensor:
    """A tensor that every rank has, sharded."""
    return _shard_tensor(full, spec)


def full_of(value: Any) -> torch.Tensor:
    """The global tensor of a result, which may be plain."""
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def backward(loss: Any) -> None:
    """`loss.backward()`, which torch leaves untyped."""
    loss.backward()


def on_rank(rank: int, there: Any, elsewhere: Any) -> Any:
    """A value on one rank, another one on all others."""
    return there if dist.get_rank() == rank else elsewhere


# Of a tensor of 8 x 6.
SPECS = {
    "rows": chunk(0),
    "columns, any order": chunk(1, (2, 0, 3, 1)),
    "uneven rows on some ranks": enumerable(([0, 0], [1, 6], 3), ([1, 0], [7, 6], 1)),
    "grid": enumerable(
        ([0, 0], [3, 4], 1), ([0, 4], [3, 2], 0), ([3, 0], [5, 4], 2), ([3, 4], [5, 2], 3)
    ),
}

BRICKS = bricks(8, 6)
