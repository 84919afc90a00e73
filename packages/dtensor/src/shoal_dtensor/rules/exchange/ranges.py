"""Moving ranges of a sharded dim to other coordinates: one all-to-all with exact blocks.

What an operator like `roll` or `flip` does to a dim is a list of runs: output positions that are input positions,
forwards or backwards.  Who sends what to whom follows from the runs, the ranges that ranks hold and those that they
want.  `roll` by 1 of 6 elements on 2 ranks is the runs 0..4 -> 1..5 and 5 -> 0:

    rank 0: a b c  ->  f a b        sends c to rank 1
    rank 1: d e f  ->  c d e        sends f to rank 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from shoal_mesh import Comm, DeviceMesh, all_to_all_blocks
from shoal_mesh.internal import dataclass

from ...layout.dim_sharding import DimSharding
from ...layout.spec import Spec

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """Output positions `target + i` are input positions `source + i` (`source - i` if `back`), for `i < length`."""

    source: int
    target: int
    length: int
    back: bool = False

    def between(self, held: Interval, wanted: Interval) -> Interval:
        """The range of `i` with the input position in `held` and the output position in `wanted`."""
        start, stop = wanted[0] - self.target, wanted[1] - self.target
        if self.back:
            low, high = self.source - held[1] + 1, self.source - held[0] + 1
        else:
            low, high = held[0] - self.source, held[1] - self.source
        first = max(0, start, low)
        return first, max(first, min(self.length, stop, high))


@dataclass(frozen=True, slots=True)
class Block:
    """`length` elements from local position `source` of the sender, to local position `target` of the receiver."""

    source: int
    target: int
    length: int
    back: bool


def intervals(sharding: DimSharding) -> list[Interval]:
    """The range of positions of every shard."""
    return [sharding.interval_of(shard) for shard in range(sharding.shards)]


def _blocks(runs: Sequence[Run], held: Interval, wanted: Interval) -> Iterator[Block]:
    for run in runs:
        first, last = run.between(held, wanted)
        if last > first:
            source = run.source - last + 1 if run.back else run.source + first
            yield Block(source - held[0], run.target + first - wanted[0], last - first, run.back)


class Relocation:
    """The exchange from the shards of a dim to the ranges that ranks want; every rank of the dim's axes takes part.

    Args:
        spec: of the input.
        dim: its sharded dim.
        wanted: for every shard the range of output positions that its rank wants; ranges may overlap.
        runs: where every output position comes from; positions that no run names stay undefined.
    """

    __slots__ = ("axes", "dim", "held", "index", "mesh", "receives", "sends", "wanted")

    def __init__(self, spec: Spec, dim: int, wanted: Sequence[Interval], runs: Sequence[Run]) -> None:
        sharding = spec.dim_sharding(dim)
        held = intervals(sharding)
        self.mesh: DeviceMesh = spec.mesh
        self.axes: tuple[int, ...] = sharding.axes
        self.dim = dim
        self.index: int = sharding.index(spec.coordinate or (0,) * spec.mesh.ndim)
        self.held: Interval = held[self.index]
        self.wanted: Interval = wanted[self.index]
        self.sends: list[list[Block]] = [[*_blocks(runs, self.held, there)] for there in wanted]
        self.receives: list[list[Block]] = [[*_blocks(runs, there, self.wanted)] for there in held]

    @property
    def comm(self) -> Comm:
        """The communicator of the shards; asked for when the exchange runs, so that a plan needs no process group."""
        return self.mesh.comm(self.axes)

    def forwards(self, x: Tensor) -> Tensor:
        """What this rank wants, out of the shards."""
        result = self._resized(x, self.wanted[1] - self.wanted[0])
        blocks = [[self._block(x, block) for block in to_rank] for to_rank in self.sends]
        out = [[result.narrow(self.dim, block.target, block.length) for block in each] for each in self.receives]
        self._exchange(blocks, out, x, result)
        return result

    def backwards(self, gradient: Tensor) -> Tensor:
        """The gradient of this rank's shard: what all ranks' gradients say of it, added up.  For runs forwards."""
        total = self._resized(gradient, self.held[1] - self.held[0]).zero_()
        blocks = [[gradient.narrow(self.dim, block.target, block.length) for block in each] for each in self.receives]
        out = [[self._resized(gradient, block.length) for block in to_rank] for to_rank in self.sends]
        self._exchange(blocks, out, gradient, total)
        for sent, parts in zip(self.sends, out, strict=True):
            for block, part in zip(sent, parts, strict=False):  # behind the parts of this rank stands an empty one
                total.narrow(self.dim, block.source, block.length).add_(part)
        return total

    def _exchange(self, blocks: list[list[Tensor]], out: list[list[Tensor]], source: Tensor, result: Tensor) -> None:
        blocks[self.index].append(source.narrow(self.dim, 0, 0))  # a rank that has and gets nothing knows the dtype
        out[self.index].append(result.narrow(self.dim, 0, 0))
        all_to_all_blocks(blocks, self.comm, out)

    def _block(self, x: Tensor, block: Block) -> Tensor:
        view = x.narrow(self.dim, block.source, block.length)
        return view.flip(self.dim) if block.back else view

    def _resized(self, like: Tensor, length: int) -> Tensor:
        return like.new_empty([length if d == self.dim else n for d, n in enumerate(like.shape)])
