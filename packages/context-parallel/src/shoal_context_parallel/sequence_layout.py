"""`SequenceLayout`: the positions of each rank; `AttentionMask`: the keys that queries read.

`tiles` returns the queries and keys that both leave to compute. A mask is not a tensor of queries
times keys: it splits ranges of positions into tiles, most of which are full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes, spans

# first position, and the one behind the last
Range = tuple[int, int]
# reach of a query to keys of any position
UNBOUNDED = 1 << 62
# queries of one tile at a window's edge; its mask has 512 x (512 + window) elements
_BAND_ROWS = 512


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The positions of a sequence that each rank holds, as ranges in the rank's own order.

    Attributes:
        ranges: for each rank its ranges; together they hold every position once.

    Raises:
        LayoutError: if the ranges overlap or leave positions out.

    Example:
        Under a causal mask late positions have more to do; with the head and the tail, ranks have
        equal work:

        >>> SequenceLayout.head_tail(8, ranks=2).ranges
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
        >>> SequenceLayout.head_tail(8, ranks=2).positions(0)
        tensor([0, 1, 6, 7])
    """

    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        ordered = sorted(each for own in self.ranges for each in own)
        if any(start >= stop for start, stop in ordered) or any(
            a[1] != b[0] for a, b in pairwise([(0, 0), *ordered])
        ):
            raise LayoutError(
                "a sequence layout holds every position once, in non-empty ranges (start, stop); "
                f"got {ordered}"
            )

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> SequenceLayout:
        """Return one range per rank, of the sizes of `torch.chunk` and `Shard(dim)`.

        The last ranks may have no positions.
        """
        # 10 on 4 ranks: 3, 3, 3, 1
        return cls._of([[own] for own in spans(shard_sizes(length, Shard(0), ranks))])

    @classmethod
    def head_tail(cls, length: int, ranks: int) -> SequenceLayout:
        """Give rank `r` chunk `r` and the `r`-th chunk from the end, of `2 * ranks` chunks.

        The sizes of chunks differ by at most one position.
        """
        return cls.per_document([length], ranks)

    @classmethod
    def per_document(cls, lengths: Sequence[int], ranks: int) -> SequenceLayout:
        """Return `head_tail` of each of several consecutive documents of a packed sequence.

        Args:
            lengths: lengths of the documents, in order.
            ranks: number of ranks of the axis.

        Example:
            >>> SequenceLayout.per_document([4, 8], ranks=2).positions(0)
            tensor([ 0,  3,  4,  5, 10, 11])
        """
        held: list[list[Range]] = [[] for _ in range(ranks)]
        chunks = 2 * ranks
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            # 8 from 4 on, 2 ranks: 4 6 8 10 12
            bounds = [start + length * i // chunks for i in range(chunks + 1)]
            for rank, own in enumerate(held):
                # rank 0 of 2: 4:6, 10:12
                own += [(bounds[i], bounds[i + 1]) for i in (rank, chunks - 1 - rank)]
        return cls._of(held)

    @classmethod
    def _of(cls, held: Sequence[Sequence[Range]]) -> SequenceLayout:
        return cls(
            tuple(tuple((start, stop) for start, stop in own if start < stop) for own in held)
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Positions on each rank."""
        return tuple(sum(stop - start for start, stop in own) for own in self.ranges)

    @property
    def length(self) -> int:
        """Positions on all ranks."""
        return sum(self.sizes)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions that a rank holds, (sizes[rank],).

        Rotary embeddings and similar code need them.
        """
        own = [torch.arange(start, stop, device=device) for start, stop in self.ranges[rank]]
        return torch.cat(own) if own else torch.empty(0, dtype=torch.long, device=device)

    def shard(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """Copy a rank's shard of a global tensor whose dim `dim` is the sequence.

        Raises:
            LayoutError: if that dim has another length.
        """
        if tensor.shape[dim] != self.length:
            raise LayoutError(
                f"dim {dim} of shape {tuple(tensor.shape)} is no sequence of {self.length} "
                "positions, the length of this layout"
            )
        ranges = self.ranges[rank] or ((0, 0),)
        return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)

    def in_order(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the global tensor of the ranks' shards, in index order.

        Example:
            >>> layout = SequenceLayout.head_tail(4, ranks=1)
            >>> layout.in_order([torch.tensor([0, 1, 2, 3])], 0)
            tensor([0, 1, 2, 3])
        """
        found = []
        for own, shard in zip(self.ranges, shards, strict=True):
            # 0:2, 6:8: 2, 2
            blocks = torch.split_with_sizes(
                shard, [stop - start for start, stop in own] or [0], dim
            )
            # later sorted by range: 0:2, 2:4, 4:6, 6:8
            found += list(zip(own, blocks, strict=False))
        return torch.cat(
            [block for _, block in sorted(found, key=lambda each: each[0])] or [shards[0]], dim
        )


class TileKind(Enum):
    """The keys that a query of a tile reads.

    These are all keys, keys up to the query's own index, or keys in a band around it.
    """

    FULL = 0
    CAUSAL = 1
    BAND = 2


class Tile(NamedTuple):
    """Local queries and keys of one block of keys; each has at least one partner."""

    row: int | None  # batch row; None for all
    queries: slice  # slice of the rank's queries
    keys: slice  # slice of the block's keys
    kind: TileKind  # which keys each query reads
    # position of the first query less that of the first key
    offset: int
    first_key: int  # global position of the first key


class _Segment(NamedTuple):
    start: int
    stop: int
    document: int


@dataclass(frozen=True, slots=True)
class Documents:
    """The document of each position of a packed sequence.

    Queries read keys of their own document only.

    Attributes:
        rows: for each batch row, or once for all of them, runs of positions: (start, stop,
            document).

    Example:
        >>> Documents.from_cu_seqlens([0, 3, 8]) == Documents.from_ids([7, 7, 7, 9, 9, 9, 9, 9])
        True
    """

    rows: tuple[tuple[_Segment, ...], ...]

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | Tensor) -> Documents:
        """Make documents from cumulative lengths: 0, ..., the full length.

        This is the format of flash-attention's variable-length calls.

        Raises:
            LayoutError: if the lengths do not start with 0 or if they decrease.
        """
        bounds = [int(bound) for bound in cu_seqlens]
        if bounds[:1] != [0] or any(a > b for a, b in pairwise(bounds)):
            raise LayoutError(
                f"cumulative lengths of documents start with 0 and do not go down, got {bounds}"
            )
        filled = [span for span in pairwise(bounds) if span[0] < span[1]]
        return cls((tuple(_Segment(*span, number) for number, span in enumerate(filled)),))

    @classmethod
    def from_ids(cls, ids: Sequence[int] | Tensor) -> Documents:
        """Make documents from the document id of each position, the same on all ranks.

        The ids have the shape (length,), or (batch, length), of global length.

        Raises:
            LayoutError: if `ids` has other dims.
        """
        table = torch.as_tensor(ids, device="cpu")
        if table.ndim not in (1, 2):
            raise LayoutError(
                f"ids of documents are (length,) or (batch, length), got {tuple(table.shape)}"
            )
        rows = []
        for row in table if table.ndim == 2 else [table]:
            documents, counts = (
                each.tolist() for each in row.unique_consecutive(return_counts=True)
            )
            numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
            # 7 7 9: 0:2 of document 0, 2:3 of document 1
            runs = zip(spans(counts), documents, strict=True)
            rows.append(tuple(_Segment(*span, numbers[document]) for span, document in runs))
        return cls(tuple(rows))

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return self.rows[0][-1].stop if self.rows and self.rows[0] else 0

    def ids(self, device: torch.device | str | None = None) -> Tensor:
        """Return the document of each position, (batch rows or 1, length).

        Example:
            >>> Documents.from_cu_seqlens([0, 1, 3]).ids()
            tensor([[0, 1, 1]])
        """
        table = torch.empty(len(self.rows), self.length, dtype=torch.long)
        for row, segments in zip(table, self.rows, strict=True):
            for start, stop, document in segments:
                row[start:stop] = document
        return table.to(device)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The keys that a query reads, by global positions."""

    causal: bool = False  # keys up to the query's own position
    # (left, right): so many keys before and behind the query's own position; None: no bound
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None  # keys of the query's own document

    def __post_init__(self) -> None:
        if any(side is not None and side < 0 for side in self.window):
            raise LayoutError(
                f"a window is (left, right), each None or at least 0, got {self.window}"
            )

    @property
    def reach(self) -> tuple[int, int]:
        """Keys before and behind the query's own position that it may read."""
        left, right = (UNBOUNDED if side is None else side for side in self.window)
        return left, 0 if self.causal else right


@lru_cache(maxsize=1024)
def tiles(layout: SequenceLayout, rank: int, owner: int, mask: AttentionMask) -> tuple[Tile, ...]:
    """Return the tiles of attention from the queries of `rank` to the keys of `owner`.

    Example:
        >>> layout = SequenceLayout.head_tail(8, ranks=2)
        >>> [(t.queries, t.keys, t.kind.name) for t in tiles(layout, 0, 1, AttentionMask(causal=True))]
        [(slice(2, 4, None), slice(0, 2, None), 'FULL'), (slice(2, 4, None), slice(2, 4, None), 'FULL')]
    """
    rows = (
        mask.documents.rows if mask.documents is not None else ((_Segment(0, layout.length, 0),),)
    )
    found = []
    for number, segments in enumerate(rows):
        row = number if len(rows) > 1 else None
        queries, keys = (list(_local(layout.ranges[holder], segments)) for holder in (rank, owner))
        for q_span, q_at, q_document in queries:
            for k_span, k_at, k_document in keys:
                if q_document == k_document:
                    for q, k, kind in _pairs(q_span, k_span, *mask.reach):
                        at = slice(q[0] - q_span[0] + q_at, q[1] - q_span[0] + q_at)
                        to = slice(k[0] - k_span[0] + k_at, k[1] - k_span[0] + k_at)
                        found.append(Tile(row, at, to, kind, offset=q[0] - k[0], first_key=k[0]))
    return tuple(found)


def _local(own: Sequence[Range], segments: Sequence[_Segment]) -> Iterator[tuple[Range, int, int]]:
    """Yield a rank's part of each document.

    The items are positions, the index of the first position on the rank, and the document.
    """
    at = 0
    for start, stop in own:
        for segment in segments:
            low = max(start, segment.start)
            high = min(stop, segment.stop)
            if low < high:
                yield (low, high), at + low - start, segment.document
        at += stop - start


def _pairs(
    queries: Range, keys: Range, left: int, right: int
) -> Iterator[tuple[Range, Range, TileKind]]:
    """Yield the tiles of a range of queries and a range of keys; every query has a key to read."""
    # Queries 4 to 8, keys 0 to 4, left 2, right 0: queries 4 and 5 alone have keys to read, which
    # are 2 and 3.
    c, d = keys
    a = max(queries[0], c - right)
    b = min(queries[1], d + left)
    if a >= b:
        return
    if left == right == UNBOUNDED:
        yield (a, b), keys, TileKind.FULL
    elif left == UNBOUNDED and right == 0:
        # two ranges of a layout are the same, or apart
        yield (a, b), keys, TileKind.CAUSAL if a == c else TileKind.FULL
    else:
        for start in range(a, b, _BAND_ROWS):
            stop = min(start + _BAND_ROWS, b)
            low = max(c, start - left)
            high = min(d, stop + right)
            inside = stop - 1 - left <= low and start + right >= high - 1
            yield (start, stop), (low, high), TileKind.FULL if inside else TileKind.BAND
