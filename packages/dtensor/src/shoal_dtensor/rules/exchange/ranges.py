"""Moving ranges of a sharded dim to other coordinates: one all-to-all with exact blocks.

What an operator like `roll` or `flip` does to a dim is a list of runs: output positions that are input positions,
forwards or backwards.  Who sends what to whom follows from the runs and the two shardings.  `roll` by 1 of 6 elements
on 2 ranks is the runs 0..4 -> 1..5 and 5 -> 0:

    rank 0: a b c  ->  f a b        sends c to rank 1
    rank 1: d e f  ->  c d e        sends f to rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shoal_mesh import all_to_all_blocks
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


def _blocks(runs: Sequence[Run], held: Interval, wanted: Interval) -> Iterator[Block]:
    for run in runs:
        first, last = run.between(held, wanted)
        if last > first:
            source = run.source - last + 1 if run.back else run.source + first
            yield Block(source - held[0], run.target + first - wanted[0], last - first, run.back)


def _intervals(sharding: DimSharding) -> list[Interval]:
    return [(start, start + size) for start, size in zip(sharding.offsets, sharding.sizes, strict=True)]


def relocate(dim: int, source: Spec, target: Spec, runs: Sequence[Run]) -> Callable[[Tensor], Tensor]:
    """The function from this rank's shard to its shard of the rearranged tensor; every rank of the axes calls it.

    Args:
        dim: the dim, in both; it is sharded over the same axes.
        source: spec of the input.
        target: spec of the output.
        runs: where every output position comes from; positions that no run names stay undefined.
    """
    before, after = source.dim_sharding(dim), target.dim_sharding(dim)
    assert before.axes == after.axes, "ranges move between the coordinates of the axes that shard the dim"
    index, held, wanted = before.index(source.coordinate or (0,) * source.mesh.ndim), *map(_intervals, (before, after))
    sends = [[*_blocks(runs, held[index], there)] for there in wanted]
    receives = [[*_blocks(runs, there, wanted[index])] for there in held]
    shape = target.local_shape

    def run(x: Tensor) -> Tensor:
        result = x.new_empty(shape)
        blocks = [[_block(x, dim, block) for block in to_rank] for to_rank in sends]
        out = [[result.narrow(dim, block.target, block.length) for block in from_rank] for from_rank in receives]
        blocks[index].append(x.narrow(dim, 0, 0))  # so that a rank that has and gets nothing knows the dtype
        out[index].append(result.narrow(dim, 0, 0))
        all_to_all_blocks(blocks, source.mesh.comm(before.axes), out)
        return result

    return run


def _block(x: Tensor, dim: int, block: Block) -> Tensor:
    view = x.narrow(dim, block.source, block.length)
    return view.flip(dim) if block.back else view
