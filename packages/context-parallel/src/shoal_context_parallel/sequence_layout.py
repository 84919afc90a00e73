"""`SequenceLayout`: which positions of a sequence each rank of an axis holds, and in which order; integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes, spans

Range = tuple[int, int]  # first position, and the one behind the last


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The positions of a sequence that each rank holds, as ranges in the order in which it holds them.

    Attributes:
        ranges: for each rank its ranges; together they hold every position once.

    Raises:
        LayoutError: if the ranges overlap or leave positions out.

    Example:
        Under a causal mask late positions have more to do; with the head and the tail, ranks have equal work:

        >>> SequenceLayout.head_tail(8, ranks=2).ranges
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
        >>> SequenceLayout.head_tail(8, ranks=2).positions(0)
        tensor([0, 1, 6, 7])
    """

    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        ordered = sorted(each for own in self.ranges for each in own)
        if any(start >= stop for start, stop in ordered) or any(a[1] != b[0] for a, b in pairwise([(0, 0), *ordered])):
            raise LayoutError(
                f"a sequence layout holds every position once, in non-empty ranges (start, stop); got {ordered}"
            )

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> SequenceLayout:
        """One range per rank, of the sizes that `torch.chunk` and `Shard(dim)` give; the last ranks may have none."""
        return cls._of([[own] for own in spans(shard_sizes(length, Shard(0), ranks))])  # 10 on 4 ranks: 3, 3, 3, 1

    @classmethod
    def head_tail(cls, length: int, ranks: int) -> SequenceLayout:
        """Of `2 * ranks` chunks of equal size (give or take one position), chunk `r` and the `r`-th from the end."""
        return cls.per_document([length], ranks)

    @classmethod
    def per_document(cls, lengths: Sequence[int], ranks: int) -> SequenceLayout:
        """`head_tail` of each of several documents that follow one another in a packed sequence.

        Args:
            lengths: of the documents, in order.
            ranks: of the axis.

        Example:
            >>> SequenceLayout.per_document([4, 8], ranks=2).positions(0)
            tensor([ 0,  3,  4,  5, 10, 11])
        """
        held: list[list[Range]] = [[] for _ in range(ranks)]
        chunks = 2 * ranks
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            bounds = [start + length * i // chunks for i in range(chunks + 1)]  # 8 from 4 on, 2 ranks: 4 6 8 10 12
            for rank, own in enumerate(held):
                own += [(bounds[i], bounds[i + 1]) for i in (rank, chunks - 1 - rank)]  # rank 0 of 2: 4:6, 10:12
        return cls._of(held)

    @classmethod
    def _of(cls, held: Sequence[Sequence[Range]]) -> SequenceLayout:
        return cls(tuple(tuple((start, stop) for start, stop in own if start < stop) for own in held))

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
        """(sizes[rank],): the global positions that a rank holds, for rotary embeddings and the like."""
        own = [torch.arange(start, stop, device=device) for start, stop in self.ranges[rank]]
        return torch.cat(own) if own else torch.empty(0, dtype=torch.long, device=device)

    def shard(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """A copy of what a rank holds of a global tensor whose dim `dim` is the sequence.

        Raises:
            LayoutError: if that dim has another length.
        """
        if tensor.shape[dim] != self.length:
            raise LayoutError(
                f"dim {dim} of shape {tuple(tensor.shape)} is no sequence of {self.length} positions, the length of "
                "this layout"
            )
        return torch.cat(
            [tensor.narrow(dim, start, stop - start) for start, stop in self.ranges[rank] or ((0, 0),)], dim
        )

    def in_order(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The global tensor of the ranks' shards, in index order.

        Example:
            >>> layout = SequenceLayout.head_tail(4, ranks=1)
            >>> layout.in_order([torch.tensor([0, 1, 2, 3])], 0)
            tensor([0, 1, 2, 3])
        """
        found = []
        for own, shard in zip(self.ranges, shards, strict=True):
            blocks = torch.split_with_sizes(shard, [stop - start for start, stop in own] or [0], dim)  # 0:2, 6:8: 2, 2
            found += list(zip(own, blocks, strict=False))  # later sorted by range: 0:2, 2:4, 4:6, 6:8
        return torch.cat([block for _, block in sorted(found, key=lambda each: each[0])] or [shards[0]], dim)
