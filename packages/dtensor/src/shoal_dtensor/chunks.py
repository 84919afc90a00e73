"""How one tensor dim is cut over mesh axes: integers only.

A `Cut` lists the mesh axes that cut the dim, outermost first, and the sizes of all pieces.
Whatever the cut (nested, uneven, ragged, any order of axes), piece `k` is the contiguous
interval `[offsets[k], offsets[k] + sizes[k])`, so every rank holds one box of the global
tensor.  Redistribution, random numbers, checkpoints and views all build on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .errors import PlacementError
from .placements import Placement, Shard, StridedShard

__all__ = ["Cut", "canonical_placements", "chunk_sizes", "cut_dim", "normalize_placements", "order_of"]

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


def chunk_sizes(length: int, pieces: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of the `pieces` that `torch.chunk` makes of `length` elements, cutting only at multiples of `unit`.

    Trailing pieces are smaller, or empty when there are fewer units than pieces.

    Example:
        >>> chunk_sizes(10, 4), chunk_sizes(2, 4), chunk_sizes(10, 2, unit=4)
        ((3, 3, 3, 1), (1, 1, 0, 0), (8, 2))
    """
    units = -(-length // unit)
    step = -(-units // pieces) * unit
    return tuple(max(0, min(step, length - i * step)) for i in range(pieces))


@dataclass(frozen=True)
class Cut:
    """One tensor dim, cut over mesh axes.

    Attributes:
        axes: mesh axes that cut the dim, outermost first; empty when the dim is whole.
        axis_sizes: their sizes.
        sizes: elements of every piece, row-major over `axes`; `(length,)` when the dim is whole.

    Example:
        >>> cut = Cut((0, 1), (2, 2), (2, 2, 2, 1))
        >>> cut.offsets, cut.interval((1, 0))
        ((0, 2, 4, 6), (4, 6))
    """

    axes: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Global index of the first element of every piece."""
        return (0, *accumulate(self.sizes[:-1]))

    @cached_property
    def length(self) -> int:
        """Global number of elements."""
        return sum(self.sizes)

    @cached_property
    def even(self) -> bool:
        """Whether all pieces are equally large."""
        return len(set(self.sizes)) == 1

    def index(self, coordinate: Sequence[int]) -> int:
        """The piece that the rank at a mesh coordinate holds."""
        piece = 0
        for axis, size in zip(self.axes, self.axis_sizes, strict=True):
            piece = piece * size + coordinate[axis]
        return piece

    def interval(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Global `[start, stop)` that the rank at a mesh coordinate holds."""
        piece = self.index(coordinate)
        start = self.offsets[piece]
        return start, start + self.sizes[piece]

    def size(self, coordinate: Sequence[int]) -> int:
        """Number of elements that the rank at a mesh coordinate holds."""
        return self.sizes[self.index(coordinate)]

    def indices(self, coordinate: Sequence[int]) -> list[int]:
        """Global indices of the elements that the rank at a mesh coordinate holds."""
        return [*range(*self.interval(coordinate))]

    def scaled(self, unit: int) -> Cut:
        """The same cut where every element became `unit` elements."""
        return self if unit == 1 else Cut(self.axes, self.axis_sizes, tuple(size * unit for size in self.sizes))

    def divided(self, unit: int) -> Cut | None:
        """The same cut counted in units of `unit` elements; None if a piece is no whole number of units."""
        if unit == 1:
            return self
        if any(size % unit for size in self.sizes):
            return None
        return Cut(self.axes, self.axis_sizes, tuple(size // unit for size in self.sizes))

    def placements(self, dim: int, *, explicit: bool = False) -> dict[int, Shard]:
        """The placement on tensor dim `dim` that each of the cut's axes has: sizes where needed, or `explicit`."""
        found: dict[int, Shard] = {}
        default: tuple[int, ...] = (self.length,)
        inner = len(self.sizes)
        for axis, axis_size in zip(self.axes, self.axis_sizes, strict=True):
            inner //= axis_size
            default = tuple(piece for whole in default for piece in chunk_sizes(whole, axis_size))
            sizes = tuple(sum(self.sizes[i : i + inner]) for i in range(0, len(self.sizes), inner))
            found[axis] = Shard(dim, sizes=sizes) if explicit or sizes != default else Shard(dim)
            default = sizes
        return found


def cut_dim(length: int, axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> Cut:
    """The cut of a dim of `length` elements by `axes`, outermost first, as their `Shard` placements say.

    Raises:
        PlacementError: if explicit sizes do not add up to what the outer axes leave.
    """
    pieces: tuple[int, ...] = (length,)
    for axis in axes:
        placement, ways = placements[axis], mesh_shape[axis]
        assert isinstance(placement, Shard), "only Shard placements cut a dim"
        if placement.sizes is None:
            pieces = tuple(part for whole in pieces for part in chunk_sizes(whole, ways, placement.multiple_of))
            continue
        sizes = placement.sizes
        if len(sizes) != len(pieces) * ways:
            raise PlacementError(
                f"{placement!r} on mesh axis {axis}: expected {len(pieces) * ways} sizes (the axis has {ways} "
                f"coordinates, outer axes make {len(pieces)} pieces), got {len(sizes)}"
            )
        for i, whole in enumerate(pieces):
            part = sizes[i * ways : (i + 1) * ways]
            if sum(part) != whole:
                raise PlacementError(
                    f"{placement!r} on mesh axis {axis}: sizes {part} add up to {sum(part)}, but the piece has {whole}"
                )
        pieces = sizes
    return Cut(tuple(axes), tuple(mesh_shape[axis] for axis in axes), pieces)


def order_of(placements: Sequence[Placement], shard_order: ShardOrder | None = None) -> ShardOrder:
    """For every cut tensor dim, ascending: the axes that cut it, outermost first (ascending unless `shard_order` says).

    Raises:
        PlacementError: if `shard_order` names other axes than the placements do.
    """
    asked = dict(shard_order or ())
    axes_of: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            axes_of[placement.dim] = (*axes_of.get(placement.dim, ()), axis)
    for dim, axes in asked.items():
        if sorted(axes) != list(axes_of.get(dim, ())):
            raise PlacementError(
                f"shard_order: axes {tuple(axes)} given for tensor dim {dim}, but the placements "
                f"{tuple(map(str, placements))} cut it by axes {axes_of.get(dim, ())}"
            )
    return tuple((dim, tuple(asked.get(dim, axes_of[dim]))) for dim in sorted(axes_of))


def normalize_placements(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    ndim: int,
    shard_order: ShardOrder | None = None,
) -> tuple[tuple[Placement, ...], ShardOrder]:
    """Placements with non-negative dims and without torch's strided spelling, and the order in which axes cut each dim.

    Args:
        placements: one per mesh axis, as a user wrote them.
        mesh_shape: coordinates per mesh axis.
        ndim: number of tensor dims.
        shard_order: pairs (tensor dim, axes outermost first); dims left out are cut in ascending axis order.

    Raises:
        PlacementError: if the number of placements, a dim, the order or a strided placement does not fit.
    """
    if len(placements) != len(mesh_shape):
        raise PlacementError(
            f"expected one placement for each of the {len(mesh_shape)} axes of the mesh of shape "
            f"{tuple(mesh_shape)}, got {len(placements)}: {list(placements)}"
        )
    resolved: list[Placement] = []
    strided: dict[int, int] = {}
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Placement):
            raise PlacementError(f"mesh axis {axis}: expected Shard, Replicate or Partial, got {placement!r}")
        if isinstance(placement, Shard | StridedShard):
            dim = placement.dim + ndim if placement.dim < 0 else placement.dim
            if not 0 <= dim < ndim:
                raise PlacementError(f"{placement!r} on mesh axis {axis}: the tensor has {ndim} dims")
            if isinstance(placement, StridedShard) and placement.sizes is None:
                strided[axis] = placement.split_factor
                placement = Shard(dim)
            else:
                placement = placement.on_dim(dim)
        resolved.append(placement)
    order = {d % ndim if ndim else d: tuple(axes) for d, axes in shard_order or ()}
    if strided:
        order = _order_of_strided(resolved, strided, mesh_shape) | order
    return tuple(resolved), order_of(resolved, tuple(order.items()))


def _order_of_strided(
    placements: Sequence[Placement], strided: dict[int, int], mesh_shape: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Place each axis behind those to its right whose sizes multiply to its split factor."""
    order: dict[int, tuple[int, ...]] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard):
            continue
        before, factor, position = order.get(placement.dim, ()), 1, 0
        while factor != strided.get(axis, 1) and position < len(before):
            factor *= mesh_shape[before[position]]
            position += 1
        if factor != strided.get(axis, 1):
            raise PlacementError(
                f"StridedShard(dim={placement.dim}, split_factor={strided[axis]}) on mesh axis {axis}: the axes to its "
                f"right that cut dim {placement.dim} have sizes {[mesh_shape[a] for a in before]}; "
                f"no leading part of them multiplies to {strided[axis]}"
            )
        order[placement.dim] = (*before[:position], axis, *before[position:])
    return order


def canonical_placements(placements: Sequence[Placement], cuts: Sequence[object]) -> tuple[Placement, ...]:
    """`placements` with explicit sizes dropped where they say what `torch.chunk` would do anyway."""
    result = list(placements)
    for dim, cut in enumerate(cuts):
        if isinstance(cut, Cut) and any(getattr(placements[axis], "sizes", None) is not None for axis in cut.axes):
            for axis, placement in cut.placements(dim).items():
                result[axis] = placement
    return tuple(result)
