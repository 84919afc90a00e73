"""Moving ranges of a sharded dim to other coordinates: one all-to-all with exact blocks.

What an operator like `roll` or `flip` does to a dim is a list of runs: output positions that are input
positions, forwards or backwards.  Who sends what to whom follows from the runs and the two cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from shoal_mesh import all_to_all_v

from ..chunks import Cut
from ..spec import Spec

__all__ = ["Run", "relocate"]


@dataclass(frozen=True, slots=True)
class Run:
    """Output positions `target + i` are input positions `source + i` (`source - i` if `back`), for `i < length`."""

    source: int
    target: int
    length: int
    back: bool = False

    def between(self, held: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
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


def _blocks(runs: Sequence[Run], held: tuple[int, int], wanted: tuple[int, int]) -> Iterator[Block]:
    for run in runs:
        first, last = run.between(held, wanted)
        if last > first:
            source = run.source - last + 1 if run.back else run.source + first
            yield Block(source - held[0], run.target + first - wanted[0], last - first, run.back)


def _intervals(cut: Cut) -> list[tuple[int, int]]:
    return [(start, start + size) for start, size in zip(cut.offsets, cut.sizes, strict=True)]


def relocate(dim: int, source: Spec, target: Spec, runs: Sequence[Run]) -> Callable[[Tensor], Tensor]:
    """The function from this rank's piece to its piece of the rearranged tensor; every rank of the axes calls it.

    Args:
        dim: the dim, in both; its cuts are over the same axes.
        source: spec of the input.
        target: spec of the output.
        runs: where every output position comes from; positions that no run names stay undefined.
    """
    cut, result = source.cut(dim), target.cut(dim)
    assert cut.axes == result.axes, "ranges move between the coordinates of the axes that cut the dim"
    coordinate = source.coordinate or (0,) * source.mesh.ndim
    mine, held, wanted = cut.index(coordinate), _intervals(cut), _intervals(result)
    sends = [[*_blocks(runs, held[mine], there)] for there in wanted]
    receives = [[*_blocks(runs, there, wanted[mine])] for there in held]
    shape = target.local_shape
    width = prod(n for d, n in enumerate(shape) if d != dim)
    sent, received = ([width * sum(b.length for b in blocks) for blocks in side] for side in (sends, receives))

    def run(x: Tensor) -> Tensor:
        rows = x.movedim(dim, 0)
        flat = x.new_empty(sum(sent))
        at = 0
        for block in (block for blocks in sends for block in blocks):
            piece = rows.narrow(0, block.source, block.length)
            size = block.length * width
            flat.narrow(0, at, size).view(piece.shape).copy_(piece.flip(0) if block.back else piece)
            at += size
        moved = all_to_all_v(flat, source.mesh.comm(cut.axes), sent, received)
        result, at = x.new_empty(shape), 0
        rows = result.movedim(dim, 0)
        for block in (block for blocks in receives for block in blocks):
            piece = rows.narrow(0, block.target, block.length)
            size = block.length * width
            piece.copy_(moved.narrow(0, at, size).view(piece.shape))
            at += size
        return result

    return run
