"""The order in which one device fills a global tensor, and a rank's box in this order.

torch's random kernels walk a tensor in memory order: dims by descending stride, not by number. The
walk is a flat range of integers; `stretches` yields the parts of a subrange that belong to a box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from ..layout.boxes import Box, intersect, shape_of, slices_of, volume, whole_box
from ..layout.memory_order import is_contiguous, walking_order
from ..layout.spec import Spec
from ..layout.tensor_meta import cache_last


class MemoryWalk(NamedTuple):
    """A global tensor in memory order, and one rank's box of it."""

    order: tuple[int, ...]  # the tensor's dims, slowest first
    shape: tuple[int, ...]  # global extents, in that order
    # the rank's `(start, stop)` per dim, in that order
    box: Box
    # whether the global tensor is row-major; torch's normal kernel differs for tensors that are not
    contiguous: bool

    @property
    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """The shortest flat range `[first, last + 1)` of the walk that contains the whole box.

        It is `(0, 0)` for an empty box.
        """
        if volume(self.box) == 0:
            return 0, 0
        first = 0
        last = 0
        for (start, stop), n in zip(self.box, self.shape, strict=True):
            # Example: 2 and 11 for the columns 2:4 of (3, 4).
            first = first * n + start
            last = last * n + stop - 1
        return first, last + 1

    def in_walking_order(self, local: Tensor) -> Tensor:
        """Return a view of the rank's local tensor with its dims in walking order."""
        return local.permute(self.order) if self.has(local) else local

    def has(self, local: Tensor) -> bool:
        """Tell whether the rank has a box; outside the mesh it has an empty tensor of one dim."""
        return local.ndim == len(self.order)

    def positions_of_dims(self) -> list[int]:
        """Return the position of each tensor dim in walking order.

        Permuting by these positions reverts the permutation of `in_walking_order`.
        """
        # Example: [2, 0, 1] for the order (1, 2, 0).
        return sorted(range(len(self.order)), key=lambda position: self.order[position])

    def stretches(
        self, start: int, stop: int, flat: Tensor, held: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of the rank's box in the flat range `[start, stop)`; see `stretches`."""
        return stretches(self.shape, self.box, start, stop, flat=flat, held=held)


@cache_last(1024)
def memory_walk_of(spec: Spec) -> MemoryWalk:
    """Return the memory order of the tensor of `spec`, with this rank's box.

    The box is empty for a rank outside the mesh.
    """
    order = walking_order(spec.shape, spec.stride)
    if spec.coordinate is None:
        box: Box = ((0, 0),) * spec.ndim
    else:
        box = spec.box(spec.coordinate)
    shape_in_order = tuple(spec.shape[dim] for dim in order)
    box_in_order = tuple(box[dim] for dim in order)
    contiguous = is_contiguous(spec.shape, spec.stride)
    return MemoryWalk(order, shape_in_order, box_in_order, contiguous)


def stretches(
    shape: Sequence[int], box: Box, start: int, stop: int, flat: Tensor, held: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of `box` in the flat range `[start, stop)` of a row-major walk over `shape`.

    Each part is a pair of views of the two tensors.

    `flat` has the elements of the range, `held` the elements of the box. A range of a walk over n
    dims is at most 2n - 1 boxes: partial rows at both ends and whole rows between them.
    """
    for base, block in _blocks(tuple(shape), start, stop):
        wanted = intersect(block, box)
        if wanted is not None:
            stretch = flat[base : base + volume(block)].view(shape_of(block))
            yield stretch[slices_of(wanted, block)], held[slices_of(wanted, box)]


def _blocks(
    shape: tuple[int, ...], start: int, stop: int, base: int = 0
) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of a flat range in order, each with its distance from the range's start."""
    # Example: in a (3, 4) tensor, the range 2:10 is the end of row 0 (2:4), all of row 1 (4:8) and
    # the start of row 2 (8:10).
    if not shape:
        yield base, ()
        return
    inner = prod(shape[1:])
    while start < stop:
        row, offset = divmod(start, inner)
        rows = 0 if offset else (stop - start) // inner
        if rows:
            # one or more whole rows
            length = rows * inner
            yield base, ((row, row + rows), *whole_box(shape[1:]))
        else:
            # a part of one row
            length = min(inner - offset, stop - start)
            for at, block in _blocks(shape[1:], offset, offset + length, base):
                yield at, ((row, row + 1), *block)
        start += length
        base += length
