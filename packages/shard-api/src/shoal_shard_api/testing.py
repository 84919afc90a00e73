"""For tests of this package and of what builds on it: specs with short names, random specs, collectives counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from random import Random

from shoal_mesh import Event, observe, unobserve

from .chunk_spec import ChunkShardingSpec
from .enumerable_spec import EnumerableShardingSpec
from .metadata import ShardMetadata
from .spec import ShardingSpec

WORLD = (0, 1, 2, 3)
KINDS = ("chunk", "uneven", "grid", "several", "bricks")
"""Kinds of random specs: torch.chunk in any order on some ranks; ragged slabs; a 2 x 2 grid; boxes of which a rank
holds any number; boxes in no grid, one a rank."""


def chunk(dim: int, ranks: Sequence[int] = WORLD) -> ChunkShardingSpec:
    """One dim in as many chunks as there are ranks, on CPU."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def enumerable(*shards: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Shards as (offsets, sizes, rank)."""
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{rank}/cpu") for o, s, rank in shards])


def random_spec(random: Random, kind: str, shape: Sequence[int], ranks: Sequence[int] = WORLD) -> ShardingSpec:
    """A spec of one kind for a tensor of this shape; the same on every rank that has the same random state."""
    order = random.sample(list(ranks), len(ranks))
    if kind == "chunk":
        return chunk(random.randrange(len(shape)), order[: random.randint(1, len(order))])
    if kind == "uneven":
        dim = random.randrange(len(shape))
        edges = sorted({0, shape[dim], *(random.randint(0, shape[dim]) for _ in order[1:])})
        pieces = list(pairwise(edges))
        return enumerable(*(_slab(shape, dim, a, b, rank) for (a, b), rank in zip(pieces, order, strict=False)))
    if kind == "grid" and len(shape) > 1 and min(shape[:2]) > 1 and len(ranks) == 4:
        row, column = random.randint(1, shape[0] - 1), random.randint(1, shape[1] - 1)
        cells = [((a, b), (c, d)) for a, b in ((0, row), (row, shape[0])) for c, d in ((0, column), (column, shape[1]))]
        return enumerable(*(_cell(shape, cell, rank) for cell, rank in zip(cells, order, strict=True)))
    return _tiling(random, shape, order, splits=2 if kind == "bricks" else 6, repeat=kind == "several")


def _slab(shape: Sequence[int], dim: int, start: int, stop: int, rank: int) -> tuple[list[int], list[int], int]:
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, stop - start
    return offsets, sizes, rank


def _cell(shape: Sequence[int], cell: tuple[tuple[int, int], ...], rank: int) -> tuple[list[int], list[int], int]:
    box = [*cell, *((0, n) for n in shape[len(cell) :])]
    return [a for a, _ in box], [b - a for a, b in box], rank


def _tiling(random: Random, shape: Sequence[int], order: Sequence[int], *, splits: int, repeat: bool) -> ShardingSpec:
    """Boxes split again and again; ``repeat``: on ranks drawn anew for each, else one box a rank."""
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
        *(([a for a, _ in box], [b - a for a, b in box], rank) for box, rank in zip(boxes, ranks, strict=False))
    )


class _Names:
    """An observer that writes down names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def before(self, event: Event) -> None:
        self.names.append(event.op)

    def after(self, event: Event) -> None:
        """Nothing to do: the name is known before."""


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that run inside the ``with``, in their order."""
    observer = _Names()
    observe(observer)
    try:
        yield observer.names
    finally:
        unobserve(observer)
