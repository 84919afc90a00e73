"""`tiles`: the parts of queries and keys between which attention has to be computed.

A mask is not a tensor of queries times keys. It splits ranges of positions into tiles, and in most
tiles every query reads every key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from ..sequence_layout import UNBOUNDED, AttentionMask, Range, Segment, SequenceLayout

# The queries of one tile (`Tile`) where the keys are limited by a window. Such a tile needs a mask
# of queries x keys, which has at most 512 x (512 + the keys of the window) elements.
_BAND_ROWS = 512


class TileKind(Enum):
    """The keys that a query of a tile reads.

    Attributes:
        FULL: all keys of the tile.
        CAUSAL: keys up to the query's own index; the tile has as many keys as queries.
        BAND: keys in the mask's reach of the query.
    """

    FULL = 0
    CAUSAL = 1
    BAND = 2


class Tile(NamedTuple):
    """Some queries of a rank, and some keys of one block, between which attention is computed.

    Each of the queries reads at least one of the keys, and each key is read by at least one query.

    Attributes:
        row: batch row; None for all.
        queries: slice of the rank's queries.
        keys: slice of the block's keys.
        kind: the keys that each query reads.
        offset: position of the first query minus the position of the first key.
        first_key: global position of the first key.
    """

    row: int | None
    queries: slice
    keys: slice
    kind: TileKind
    offset: int
    first_key: int


# Cached, because all layers of a model compute the same tiles.
@lru_cache(maxsize=1024)
def tiles(layout: SequenceLayout, rank: int, owner: int, mask: AttentionMask) -> tuple[Tile, ...]:
    """Return the tiles of attention from the queries of `rank` to the keys of `owner`.

    Example:
        >>> layout = SequenceLayout.head_tail(8, ranks=2)
        >>> for tile in tiles(layout, 0, 1, AttentionMask(causal=True)):
        ...     print(tile.queries, tile.keys, tile.kind.name)
        slice(2, 4, None) slice(0, 2, None) FULL
        slice(2, 4, None) slice(2, 4, None) FULL
    """
    rows: Sequence[Sequence[Segment]] = [[Segment(0, layout.length, 0)]]
    if mask.documents is not None:
        rows = mask.documents.rows
    found: list[Tile] = []
    for index, segments in enumerate(rows):
        # One row of documents stands for all batch rows.
        batch_row = index if len(rows) > 1 else None
        key_segments = [*_held_segments(layout.ranges[owner], segments)]
        for queries in _held_segments(layout.ranges[rank], segments):
            for keys in key_segments:
                if queries.document == keys.document:
                    found += _tiles_of_segments(batch_row, queries, keys, mask)
    return tuple(found)


class _HeldSegment(NamedTuple):
    """A run of positions of one document that a rank holds.

    Attributes:
        positions: global positions.
        first_index: index of the first position among the rank's positions.
        document: the document.
    """

    positions: Range
    first_index: int
    document: int

    def local_slice(self, positions: Range) -> slice:
        """Return the slice of the rank's positions for some positions of the run."""
        shift = self.first_index - self.positions[0]
        start, stop = positions
        return slice(start + shift, stop + shift)


def _held_segments(ranges: Sequence[Range], segments: Sequence[Segment]) -> Iterator[_HeldSegment]:
    """Yield the runs of positions of one document in a rank's ranges."""
    # Example: the ranges 0:2 and 6:8, and the segments 0:7 and 7:8 -> 0:2, 6:7 and 7:8, which begin
    # at the local indices 0, 2 and 3.
    range_index = 0
    for start, stop in ranges:
        for segment in segments:
            low = max(start, segment.start)
            high = min(stop, segment.stop)
            if low < high:
                first_index = range_index + low - start
                yield _HeldSegment((low, high), first_index, segment.document)
        range_index += stop - start


def _tiles_of_segments(
    batch_row: int | None, queries: _HeldSegment, keys: _HeldSegment, mask: AttentionMask
) -> Iterator[Tile]:
    """Yield the tiles of queries and keys of one document."""
    for tile in _split_into_tiles(queries.positions, keys.positions, *mask.reach):
        first_query = tile.queries[0]
        first_key = tile.keys[0]
        yield Tile(
            batch_row,
            queries.local_slice(tile.queries),
            keys.local_slice(tile.keys),
            tile.kind,
            offset=first_query - first_key,
            first_key=first_key,
        )


class _GlobalTile(NamedTuple):
    """A tile by the global positions of its queries and keys."""

    queries: Range
    keys: Range
    kind: TileKind


def _split_into_tiles(queries: Range, keys: Range, left: int, right: int) -> Iterator[_GlobalTile]:
    """Yield the tiles of a range of queries and a range of keys.

    A query at position p reads keys from p - left to p + right. Queries that read none of these
    keys are in no tile.
    """
    # Example: queries 4:8, keys 0:4, left 2, right 0 -> only the queries 4 and 5 have keys to read,
    # the keys 2 and 3.
    first_key, end_key = keys
    first_query = max(queries[0], first_key - right)
    end_query = min(queries[1], end_key + left)
    if first_query >= end_query:
        return
    readers = (first_query, end_query)
    if left == right == UNBOUNDED:
        yield _GlobalTile(readers, keys, TileKind.FULL)
        return
    is_causal = left == UNBOUNDED and right == 0
    if is_causal:
        # Runs of positions are equal or disjoint, so queries that do not begin with the first key
        # follow all keys.
        kind = TileKind.CAUSAL if first_query == first_key else TileKind.FULL
        yield _GlobalTile(readers, keys, kind)
        return
    for start in range(first_query, end_query, _BAND_ROWS):
        stop = min(start + _BAND_ROWS, end_query)
        low = max(first_key, start - left)
        high = min(end_key, stop + right)
        # Every query reads every key if the last query still reads the first key, and the first
        # query already reads the last key.
        last_reads_low = stop - 1 - left <= low
        first_reads_high = start + right >= high - 1
        is_full = last_reads_low and first_reads_high
        kind = TileKind.FULL if is_full else TileKind.BAND
        yield _GlobalTile((start, stop), (low, high), kind)
