"""`SequenceLayout`: the positions of each rank; `AttentionMask`: the keys that queries read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError, LayoutTypeError
from shoal_dtensor.internal import shard_sizes, spans
from shoal_mesh.internal import require, require_each

# The first position, and the position after the last one.
Range = tuple[int, int]
# Names of layouts that are computed from the length of the sequence.
LayoutName = Literal["contiguous", "head_tail"]
# The reach of a query that reads keys at any distance; larger than every length.
UNBOUNDED = 1 << 62
# Integers of numpy are allowed too, and those of a compiler.
_INTEGERS = (int, Integral, torch.SymInt)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The positions of a sequence that each rank holds, as ranges in the rank's own order.

    Attributes:
        ranges: the ranges of each rank; together they hold every position once.

    Raises:
        LayoutError: if the ranges overlap or leave positions out.
        LayoutTypeError: if they are not pairs of integers.

    Example:
        Under a causal mask late queries read more keys. If each rank has a part of the head and a
        part of the tail, all ranks have equal work:

        >>> SequenceLayout.head_tail(8, ranks=2).ranges
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
        >>> SequenceLayout.head_tail(8, ranks=2).positions(0)
        tensor([0, 1, 6, 7])
    """

    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        ordered: list[Range] = []
        allowed = "a sequence layout holds for each rank a tuple of ranges (start, stop)"
        require_each(self.ranges, Sequence, allowed, LayoutTypeError)
        for ranges in self.ranges:
            require_each(ranges, Sequence, allowed, LayoutTypeError)
            for bounds in ranges:
                _require_integers(bounds, allowed, count=2)
            ordered += ranges
        ordered.sort()
        has_empty_range = any(start >= stop for start, stop in ordered)
        # Each range must begin where the range before it ends, and the first range at 0.
        neighbors = pairwise([(0, 0), *ordered])
        overlaps_or_has_gap = any(before[1] != after[0] for before, after in neighbors)
        if has_empty_range or overlaps_or_has_gap:
            raise LayoutError(
                "a sequence layout must hold every position exactly once, in non-empty ranges "
                f"(start, stop); got {ordered}"
            )

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> SequenceLayout:
        """Return one range per rank, of the sizes of `torch.chunk` and `Shard(dim)`.

        The last ranks may have no positions.
        """
        _require_integers((length, ranks), "SequenceLayout: length and ranks are integers")
        # Example: 10 positions on 4 ranks -> 3, 3, 3, 1.
        sizes = shard_sizes(length, Shard(0), ranks)
        return cls._without_empty_ranges([[span] for span in spans(sizes)])

    @classmethod
    def head_tail(cls, length: int, ranks: int) -> SequenceLayout:
        """Split the sequence into `2 * ranks` chunks; rank `r` holds chunk `r` and chunk `-1 - r`.

        The sizes of chunks differ by at most one position.
        """
        _require_integers((length, ranks), "SequenceLayout: length and ranks are integers")
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
        _require_integers((ranks,), "SequenceLayout: ranks is an integer")
        _require_integers(lengths, "SequenceLayout: lengths of documents are a list of integers")
        ranges: list[list[Range]] = [[] for _ in range(ranks)]
        chunks = 2 * ranks
        # `accumulate` also yields the end of the last document, which `strict=False` ignores.
        starts = accumulate(lengths, initial=0)
        for start, length in zip(starts, lengths, strict=False):
            # Example: a document of the 8 positions from 4 on, 2 ranks -> bounds 4 6 8 10 12.
            bounds = [start + length * chunk // chunks for chunk in range(chunks + 1)]
            ranges_of_chunks = [*pairwise(bounds)]
            for rank in range(ranks):
                # Example, continued: rank 0 gets 4:6 and 10:12.
                early = ranges_of_chunks[rank]
                late = ranges_of_chunks[-1 - rank]
                ranges[rank] += [early, late]
        return cls._without_empty_ranges(ranges)

    @classmethod
    def _without_empty_ranges(cls, ranges_of_ranks: Sequence[Sequence[Range]]) -> SequenceLayout:
        """Return the layout of each rank's ranges that are not empty."""
        filled_ranges = []
        for ranges in ranges_of_ranks:
            filled = [(start, stop) for start, stop in ranges if start < stop]
            filled_ranges.append(tuple(filled))
        return cls(tuple(filled_ranges))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Positions on each rank."""
        return tuple(sum(map(_size, ranges)) for ranges in self.ranges)

    @property
    def length(self) -> int:
        """Positions on all ranks."""
        return sum(self.sizes)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions that a rank holds, a tensor (sizes[rank],).

        Pass them to rotary embeddings, which would otherwise count from 0 on every rank.
        """
        if not self.ranges[rank]:
            return torch.empty(0, dtype=torch.long, device=device)
        held = [torch.arange(start, stop, device=device) for start, stop in self.ranges[rank]]
        return torch.cat(held)

    def shard(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """Copy a rank's shard of a global tensor whose dim `dim` is the sequence.

        Raises:
            LayoutError: if that dim has another length.
        """
        if tensor.shape[dim] != self.length:
            raise LayoutError(
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} must have {self.length} "
                "positions, the length of this layout"
            )
        # `cat` needs a tensor, so a rank without positions gets one empty range.
        ranges = self.ranges[rank] or ((0, 0),)
        blocks = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        return torch.cat(blocks, dim)

    def in_order(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the global tensor of all ranks' shards, with positions in order.

        Args:
            shards: the shard of each rank, as `shard` returns it.
            dim: the dim that is the sequence.

        Example:
            >>> layout = SequenceLayout.head_tail(8, ranks=2)
            >>> layout.in_order([torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])], 0)
            tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        blocks: list[tuple[Range, Tensor]] = []
        for ranges, shard in zip(self.ranges, shards, strict=True):
            # Example: the ranges 0:2 and 6:8 -> sizes 2 and 2.
            # A rank without positions has one empty block. It has no range, so `strict=False` drops
            # it.
            sizes = [*map(_size, ranges)] or [0]
            blocks_of_rank = torch.split_with_sizes(shard, sizes, dim)
            blocks += zip(ranges, blocks_of_rank, strict=False)
        if not blocks:
            # The sequence is empty. `cat` copies, so that the result is never a shard itself.
            return torch.cat([shards[0]], dim)
        # The ranges are disjoint, so their order is the order of their first positions.
        blocks.sort(key=lambda range_and_block: range_and_block[0])
        return torch.cat([block for _, block in blocks], dim)


def layout_named(name: LayoutName, length: int, ranks: int) -> SequenceLayout:
    """Return the layout with a name, of so many positions on so many ranks."""
    if name == "contiguous":
        return SequenceLayout.contiguous(length, ranks)
    return SequenceLayout.head_tail(length, ranks)


def order_gathered(gathered: Tensor, layout: SequenceLayout, dim: int) -> Tensor:
    """Return the global tensor, with positions in order, of the result of an all-gather.

    Args:
        gathered: the shards of all ranks along `dim`, in the order of the ranks.
        layout: the positions of each rank.
        dim: the dim that is the sequence.
    """
    shards = torch.split_with_sizes(gathered, list(layout.sizes), dim)
    return layout.in_order(shards, dim)


def _require_integers(values: object, allowed: str, count: int | None = None) -> None:
    """Raise LayoutTypeError unless given a sequence of integers, `count` of them if it is given."""
    require_each(values, _INTEGERS, allowed, LayoutTypeError)
    assert isinstance(values, Sequence), "required"
    if count is not None and len(values) != count:
        raise LayoutTypeError(f"{allowed}, got {values!r:.80}")


def _size(positions: Range) -> int:
    """Return the number of positions of a range."""
    start, stop = positions
    return stop - start


class Segment(NamedTuple):
    """A run of positions of one document, from `start` to before `stop`.

    Attributes:
        start: the first position.
        stop: the position after the last one.
        document: the number of the document in its row, from 0.
    """

    start: int
    stop: int
    document: int


@dataclass(frozen=True, slots=True)
class Documents:
    """The document of each position of a packed sequence.

    Queries read keys of their own document only.

    Attributes:
        rows: runs of positions (start, stop, document) of each batch row; one entry if all batch
            rows have the same documents.

    Example:
        >>> Documents.from_cu_seqlens([0, 3, 8]) == Documents.from_ids([7, 7, 7, 9, 9, 9, 9, 9])
        True
    """

    rows: tuple[tuple[Segment, ...], ...]

    def __post_init__(self) -> None:
        allowed = "Documents holds for each batch row a tuple of Segment; make it by from_ids"
        require_each(self.rows, tuple, allowed, LayoutTypeError)
        for segments in self.rows:
            require_each(segments, tuple, allowed, LayoutTypeError)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | Tensor) -> Documents:
        """Make documents from cumulative lengths: 0, ..., the full length.

        This is the format of flash-attention's variable-length calls.

        Raises:
            LayoutError: if the lengths do not start with 0 or if they decrease.
            LayoutTypeError: if they are not integers.
        """
        if isinstance(cu_seqlens, Tensor):
            cu_seqlens = cu_seqlens.tolist()
        _require_integers(cu_seqlens, "cumulative lengths of documents are a list of integers")
        bounds = [int(bound) for bound in cu_seqlens]
        decreases = any(left > right for left, right in pairwise(bounds))
        if bounds[:1] != [0] or decreases:
            raise LayoutError(
                "cumulative lengths of documents must start with 0 and never decrease, got "
                f"{bounds}"
            )
        # Equal bounds, as those of padding, are documents without positions.
        filled = [(start, stop) for start, stop in pairwise(bounds) if start < stop]
        segments = [Segment(start, stop, number) for number, (start, stop) in enumerate(filled)]
        return cls((tuple(segments),))

    @classmethod
    def from_ids(cls, ids: Sequence[int] | Tensor) -> Documents:
        """Make documents from the document id of each position, the same on all ranks.

        The ids have the shape (length,), or (batch, length), of global length.

        Raises:
            LayoutError: if `ids` has other dims.
            LayoutTypeError: if `ids` does not consist of numbers.
        """
        allowed = "document ids are a list of integers, or a tensor"
        require(ids, (Sequence, Tensor), allowed, LayoutTypeError, without=str)
        try:
            table = torch.as_tensor(ids, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise LayoutTypeError(f"{allowed}, got {ids!r:.80}") from error
        if table.ndim not in (1, 2):
            raise LayoutError(
                "document ids must have the shape (length,) or (batch, length), got "
                f"{tuple(table.shape)}"
            )
        # Ids of the shape (length,) are one row.
        rows = table if table.ndim == 2 else [table]
        return cls(tuple([_segments_of_ids(row) for row in rows]))

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        if not self.rows or not self.rows[0]:
            return 0
        # The segments of a row are in order and cover the sequence.
        return self.rows[0][-1].stop

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


def _segments_of_ids(ids: Tensor) -> tuple[Segment, ...]:
    """Return the runs of equal document ids in one row, (length,).

    Documents are numbered in the order of their first positions, so that rows with other ids of the
    same documents are equal.
    """
    id_of_each_run, lengths = torch.unique_consecutive(ids, return_counts=True)
    numbers: dict[int, int] = {}
    segments = []
    # Example: ids 7 7 9 7 -> 0:2 is document 0, 2:3 is document 1, and 3:4 is document 0 again.
    for (start, stop), document_id in zip(
        spans(lengths.tolist()), id_of_each_run.tolist(), strict=True
    ):
        number = numbers.setdefault(document_id, len(numbers))
        segments.append(Segment(start, stop, number))
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The keys that a query reads, by global positions.

    Attributes:
        causal: whether a query reads only keys up to its own position.
        window: (left, right), the numbers of keys before and after its own position that a query
            reads; None for no bound.
        documents: the documents, if a query reads only keys of its own document; else None.

    Raises:
        LayoutError: if a bound of the window is negative.
        LayoutTypeError: if the window or the documents are of another type.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None

    def __post_init__(self) -> None:
        allowed = "window must be (left, right), each None or at least 0"
        kinds = (*_INTEGERS, type(None))
        require_each(self.window, kinds, allowed, LayoutTypeError, without=bool)
        is_negative = any(side is not None and side < 0 for side in self.window)
        if is_negative or len(self.window) != 2:
            raise LayoutError(f"{allowed}, got {self.window}")
        require(
            self.documents,
            (Documents, type(None)),
            "documents must be a Documents, from Documents.from_ids or from_cu_seqlens, or None",
            LayoutTypeError,
        )

    @property
    def reach(self) -> tuple[int, int]:
        """(left, right): numbers of keys before and after its own position that a query may read.

        `UNBOUNDED` stands for no bound. The reach does not consider documents.
        """
        left, right = [UNBOUNDED if side is None else side for side in self.window]
        if self.causal:
            right = 0
        return left, right
