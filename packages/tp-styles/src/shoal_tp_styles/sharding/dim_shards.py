"""How a dim of heads or of experts is sharded, once a style is applied to a number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_dtensor import Placement, Replicate, Shard, StridedShard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes
from shoal_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Heads:
    """Features that belong to heads; a shard holds complete heads.

    With at least as many heads as ranks, each rank holds some, as equally as possible (six heads on four ranks: 2, 2,
    1, 1).  With fewer (the key and value heads of grouped-query attention), each head is replicated over several
    neighbouring ranks; the number of ranks must then be a multiple of the number of heads.

    Attributes:
        count: number of heads.
        size: features of one head.
        chunked: whether these are plain features, `size` of them together: divided as `torch.chunk` does, like the
            row-wise weight behind them.

    Example:
        >>> heads = Heads(count=2, size=8)
        >>> heads.features, heads.replicated(4)
        (16, True)
    """

    count: int
    size: int
    chunked: bool = field(default=False, repr=False)

    @property
    def features(self) -> int:
        """Number of features of all heads."""
        return self.count * self.size

    def replicated(self, ranks: int) -> bool:
        """Whether each head is held by several of so many ranks."""
        return not self.chunked and self.count < ranks and ranks % self.count == 0  # 2 heads on 4 ranks

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The one-axis mesh itself, or the same ranks as (heads, ranks that hold the same head)."""
        ranks = mesh.size()
        if not self.replicated(ranks):
            return mesh
        names = mesh.mesh_dim_names and (f"{mesh.axis_names[0]}_heads", f"{mesh.axis_names[0]}_replicas")
        return mesh.unflatten(0, (self.count, ranks // self.count), names)  # 2 heads on 4 ranks: (2, 2)

    def placements(self, mesh: DeviceMesh, dim: int = 0) -> tuple[Placement, ...]:
        """Placements on `self.mesh(mesh)` of a parameter with these features along `dim`."""
        if self.replicated(mesh.size()):
            return Shard(dim, multiple_of=self.size), Replicate()  # 2 heads of 8 on (2, 2): rows 0:8, 0:8, 8:16, 8:16
        return (HeadShard(dim, self).on(mesh.size()),)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A parameter dim sharded by heads, over a number of ranks that is known when the style is applied."""

    dim: int  # the dim
    heads: Heads  # of one block
    blocks: int = 1  # number of equal blocks that the dim holds behind each other (gate, up), each of them sharded

    def on(self, ranks: int) -> Shard | StridedShard:
        """The placement over so many ranks.

        Raises:
            LayoutError: if there are fewer heads than ranks.

        Example:
            >>> HeadShard(0, Heads(6, 8)).on(4)
            Shard(dim=0, sizes=(16, 16, 8, 8))
            >>> HeadShard(1, Heads(6, 1), blocks=2).on(3)
            StridedShard(dim=1, split_factor=2, sizes=(2, 2, 2))
        """
        count, size = self.heads.count, self.heads.size
        if count < ranks and not self.heads.chunked:
            raise LayoutError(
                f"{count} heads cannot be sharded over {ranks} ranks; fewer heads than ranks are replicated only where "
                "the number of ranks is a multiple of the number of heads, and not by row-wise styles"
            )
        if count % ranks == 0 or self.heads.chunked:
            shard = Shard(self.dim, multiple_of=size)
        else:
            sizes = tuple(size * (count // ranks + (rank < count % ranks)) for rank in range(ranks))  # 2, 2, 1, 1
            shard = Shard(self.dim, sizes=sizes)
        if self.blocks == 1:
            return shard
        in_block = shard_sizes(self.heads.features, shard, ranks)  # gate and up of 6 on 3: [2, 2, 2] of each
        return StridedShard(self.dim, split_factor=self.blocks, sizes=in_block)


@dataclass(frozen=True, slots=True)
class ExpertOwner:
    """A parameter of one expert of a list: the rank that holds the expert holds all rows, the others none."""

    expert: int  # index of the expert
    experts: int  # number of experts
    rows: int  # elements of dim 0

    def on(self, ranks: int) -> Placement:
        """The placement over so many ranks.

        Example:
            >>> ExpertOwner(2, 3, 8).on(2)
            Shard(dim=0, sizes=(0, 8))
        """
        owner = self.expert // -(-self.experts // ranks)  # 3 experts on 2 ranks: 0 0 1
        return Shard(0, sizes=tuple(self.rows * (rank == owner) for rank in range(ranks)))
