"""`HeadShares`: the heads of queries and of keys that each rank attends with (Ulysses)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_dtensor import Shard
from shoal_dtensor.internal import shard_sizes, spans

from ..sequence_layout import Range


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The heads of each rank, as ranges of indices.

    Attributes:
        queries: query heads of each rank, distributed as by `torch.chunk`.
        keys: heads of keys that the query heads of each rank read; several ranks may read a head.
        group: number of query heads that share a head of keys.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    group: int

    @classmethod
    def of(cls, query_heads: int, key_heads: int, ranks: int) -> HeadShares:
        """Distribute heads over ranks.

        Example:
            A group of 2 query heads shares each head of keys. The last rank gets no heads.

            >>> shares = HeadShares.of(6, 3, ranks=4)
            >>> shares.queries
            ((0, 2), (2, 4), (4, 6), (6, 6))
            >>> shares.keys
            ((0, 1), (1, 2), (2, 3), (0, 0))
        """
        queries = spans(shard_sizes(query_heads, Shard(0), ranks))
        group = query_heads // max(key_heads, 1)
        keys: list[Range] = []
        for start, stop in queries:
            if start == stop:
                keys.append((0, 0))
            else:
                first_key = start // group
                last_key = (stop - 1) // group
                keys.append((first_key, last_key + 1))
        return cls(tuple(queries), tuple(keys), group)

    def keys_of_queries(self, rank: int) -> list[int] | None:
        """Return the head of keys of each of a rank's query heads, as a local index.

        None if the rank has complete groups: query head i then reads head `i // group`.

        Example:
            Rank 1 has the query heads 2 and 3. In groups of 2 they are one group; in groups of 3
            they belong to two groups.

            >>> print(HeadShares.of(8, 4, ranks=4).keys_of_queries(1))
            None
            >>> HeadShares.of(6, 2, ranks=4).keys_of_queries(1)
            [0, 1]
        """
        start, stop = self.queries[rank]
        if start == stop:
            return None
        first_key, end_key = self.keys[rank]
        begins_with_group = start % self.group == 0
        has_complete_groups = stop - start == (end_key - first_key) * self.group
        if begins_with_group and has_complete_groups:
            return None
        return [head // self.group - first_key for head in range(start, stop)]
