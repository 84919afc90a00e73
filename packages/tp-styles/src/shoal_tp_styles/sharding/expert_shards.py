"""Placements of the parameters of experts, over a number of ranks that is known when a style is applied."""

from __future__ import annotations

from shoal_dtensor import Placement, Shard, StridedShard
from shoal_mesh.internal import dataclass


def experts_per_rank(experts: int, ranks: int) -> list[int]:
    """How many experts each rank holds: neighbouring ones, as `Shard(0)` shards them.

    Example:
        >>> experts_per_rank(6, 4)
        [2, 2, 2, 0]
    """
    step = -(-experts // ranks)
    return [max(0, min(step, experts - rank * step)) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A dim that holds several blocks behind each other (gate, up), each of them sharded.

    Attributes:
        dim: the dim.
        blocks: number of blocks.
        features: elements of one block.
    """

    dim: int
    blocks: int
    features: int

    def on(self, ranks: int) -> Placement:
        """The placement over so many ranks.

        Example:
            >>> PackedShard(1, 2, 6).on(4)
            StridedShard(dim=1, split_factor=2, sizes=(2, 2, 2, 0))
        """
        return StridedShard(self.dim, split_factor=self.blocks, sizes=experts_per_rank(self.features, ranks))


@dataclass(frozen=True, slots=True)
class ExpertOwner:
    """A parameter of one expert of a list: the rank that holds the expert holds all rows, the others none.

    Attributes:
        expert: index of the expert.
        experts: number of experts.
        rows: elements of dim 0.
    """

    expert: int
    experts: int
    rows: int

    def on(self, ranks: int) -> Placement:
        """The placement over so many ranks.

        Example:
            >>> ExpertOwner(2, 3, 8).on(2)
            Shard(dim=0, sizes=(0, 8))
        """
        owner = self.expert // -(-self.experts // ranks)  # 3 experts on 2 ranks: 0 0 1
        return Shard(0, sizes=tuple(self.rows * (rank == owner) for rank in range(ranks)))
