"""Placements in the forms that users write, and in the form that a spec stores.

`PartitionSpec("dp", None)` lists mesh axes for each tensor dim, like JAX's partition specs, and
`read_placements` translates it to placements and a shard order. Users also write `Shard(-1)`,
`Shard` placements together with a shard order, or explicit sizes that are the default sizes.
`resolved_layout` brings all of these to one normal form, so that equal layouts are equal specs. The
placements of the normal form determine the whole layout, including the order of axes: an axis that
shards a dim after axes to its right has a `StridedShard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import constant_when_compiled

from ..errors import ArgumentTypeError, PlacementError, PlacementIndexError
from .axis_order import order_of_axes, shards_before
from .dim_sharding import (
    AnyDimSharding,
    DimSharding,
    ShardOrder,
    chunk_sizes,
    in_order,
    runs_of,
    shard_any_dim,
)
from .placements import Partial, Placement, Replicate, Shard, StridedShard

Axis = str | int
DimAxes = None | Axis | tuple[Axis, ...]


@constant_when_compiled
@dataclass(frozen=True, slots=True, init=False)
class PartitionSpec:
    """The mesh axes that shard each tensor dim, outermost first.

    Args:
        dims: one entry per leading tensor dim: an axis name or index, a tuple of them, or None for
            a replicated dim. Dims that are not listed are replicated.
        partial: mesh axes over which values are still to be reduced, and how.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> mesh = abstract_mesh((2, 4), ("dp", "tp"))
        >>> PartitionSpec(None, ("tp", "dp")).resolve(mesh)
        ((StridedShard(dim=1, sf=4), Shard(dim=1)), ((1, (1, 0)),))
        >>> PartitionSpec("dp", partial={"tp": "sum"}).resolve(mesh)[0]
        (Shard(dim=0), Partial(sum))
    """

    dims: tuple[tuple[Axis, ...], ...]
    partial: tuple[tuple[Axis, str], ...]

    def __init__(self, *dims: DimAxes, partial: Mapping[Axis, str] | None = None) -> None:
        listed: list[tuple[Axis, ...]] = []
        for axes in dims:
            if axes is None:
                listed.append(())
            else:
                listed.append(axes if isinstance(axes, tuple) else (axes,))
        object.__setattr__(self, "dims", tuple(listed))
        object.__setattr__(self, "partial", tuple((partial or {}).items()))

    def resolve(self, mesh: DeviceMesh) -> tuple[tuple[Placement, ...], ShardOrder]:
        """Return one placement per axis of `mesh`, and the order of axes on every sharded dim.

        Raises:
            PlacementError: if an axis is used twice.
            AxisError: if the mesh has no such axis.
        """
        placements: list[Placement] = [Replicate()] * mesh.ndim
        order: list[tuple[int, tuple[int, ...]]] = []
        wanted: list[tuple[tuple[Axis, ...], Placement]] = [
            (axes, Shard(dim)) for dim, axes in enumerate(self.dims)
        ]
        wanted += [((axis,), Partial(op)) for axis, op in self.partial]
        for axes, placement in wanted:
            indices = tuple(mesh.axis_index(axis) for axis in axes)
            for axis in indices:
                if not placements[axis].is_replicate():
                    raise PlacementError(
                        f"{self!r}: mesh axis {mesh.axis_names[axis]!r} is used twice"
                    )
                placements[axis] = placement
            if indices and isinstance(placement, Shard):
                order.append((placement.dim, indices))
                sizes = [mesh.shape[axis] for axis in indices]
                for axis, outer_shards in shards_before(indices, sizes).items():
                    placements[axis] = in_order(placement, outer_shards)
        return tuple(placements), tuple(order)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return the source text of this value in code that torch.compile generates."""
        return repr(self), {"PartitionSpec": PartitionSpec}

    def __repr__(self) -> str:
        arguments = []
        for axes in self.dims:
            if not axes:
                arguments.append("None")
            else:
                arguments.append(repr(axes[0] if len(axes) == 1 else axes))
        if self.partial:
            arguments.append(f"partial={dict(self.partial)}")
        return f"PartitionSpec({', '.join(arguments)})"


Placements = Sequence[Placement] | PartitionSpec


def read_placements(
    mesh: DeviceMesh, placements: Placements | None, shard_order: ShardOrder | None = None
) -> tuple[tuple[Placement, ...], ShardOrder | None]:
    """Return the placements that a user passed, and the shard order that goes with them.

    None stands for all replicated.
    """
    # These are tested first, because `isinstance` with an abstract class takes 0.3 us.
    if type(placements) in (list, tuple):
        return tuple(placements), shard_order  # type: ignore[arg-type]  # a list or tuple
    if placements is None:
        return (Replicate(),) * mesh.ndim, shard_order
    if not isinstance(placements, PartitionSpec):
        untyped: object = placements
        if isinstance(untyped, str) or not isinstance(untyped, Iterable):
            raise ArgumentTypeError(
                "expected placements to be a list with one for each mesh axis, or a PartitionSpec, "
                f"got {placements!r}"
            )
        return tuple(placements), shard_order
    if shard_order is not None:
        raise PlacementError(
            f"{placements!r} already contains the order of axes; leave out shard_order"
        )
    return placements.resolve(mesh)


# --- the normal form that a spec stores -----------------------------------------------------------


def normalize_placements(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    ndim: int,
    shard_order: ShardOrder | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[tuple[Placement, ...], ShardOrder]:
    """Return placements that do not imply an order of axes, and the order of axes per dim.

    The dims of the placements are not negative. If `shard_order` is given, it determines the order,
    and placements that imply an order must agree with it.
    """
    count = len(placements)
    if count != len(mesh_shape):
        raise PlacementIndexError(
            f"expected one placement for each of the {len(mesh_shape)} axes of the mesh of shape "
            f"{tuple(mesh_shape)}, got {count}: {list(placements)}"
        )
    resolved: list[Placement] = []
    outer_shards: dict[int, int] = {}
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Placement):
            raise PlacementError(
                f"mesh axis {axis}: expected Shard, Replicate or Partial of shoal_dtensor, got "
                f"{placement!r} ({_class_name(placement)})"
            )
        if isinstance(placement, Shard | StridedShard):
            dim = placement.dim + ndim if placement.dim < 0 else placement.dim
            if not 0 <= dim < ndim:
                raise PlacementIndexError(
                    f"{placement!r} on mesh axis {axis}: the tensor has {ndim} dims"
                )
            placement = placement.on_dim(dim)
        if isinstance(placement, StridedShard):
            if placement.sizes is None:
                placement = _in_runs(placement, axis, placements, mesh_shape, shape=shape)
            placement, outer_shards[axis] = _without_order(placement)
        resolved.append(placement)
    order = _order_of(resolved, outer_shards, mesh_shape)
    for dim, axes in shard_order or ():
        asked_dim = dim % ndim if ndim else dim
        ascending = tuple(sorted(order.get(asked_dim, ())))
        if sorted(axes) != [*ascending]:
            texts = tuple(map(str, resolved))
            raise PlacementError(
                f"shard_order: axes {axes} given for tensor dim {asked_dim}, but the placements "
                f"{texts} shard it by axes {ascending}"
            )
        if axes:
            _check_agreed(asked_dim, axes, resolved, outer_shards, mesh_shape=mesh_shape)
            order[asked_dim] = tuple(axes)
    return tuple(resolved), tuple(sorted(order.items()))


def _class_name(value: object) -> str:
    """Return the full name of a value's class; torch's placements have the same short names."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _without_order(placement: StridedShard) -> tuple[Shard | StridedShard, int]:
    """Return a placement that does not imply an order, and the number of its outer shards.

    Outer shards are the shards that axes to the right of its axis make before it.
    """
    dim = placement.dim
    sizes = placement.sizes
    if sizes is None:
        return Shard(dim, multiple_of=placement.multiple_of), placement.split_factor
    if placement.split_factor == 1:
        return Shard(dim, sizes=sizes), placement.outer_shards
    runs = StridedShard(dim, split_factor=placement.split_factor, sizes=sizes)
    return runs, placement.outer_shards


def _check_agreed(
    dim: int,
    axes: Sequence[int],
    placements: Sequence[Placement],
    outer_shards: Mapping[int, int],
    mesh_shape: Sequence[int],
) -> None:
    """Raise PlacementError if placements imply another order of a dim's axes than a shard order.

    `axes` is the order that the shard order gives, `outer_shards` the order that placements imply.
    """
    ordered_before: dict[int, int] = {}
    for axes_of_level in _by_runs(axes, placements).values():
        ordered_before |= shards_before(axes_of_level, [mesh_shape[axis] for axis in axes_of_level])
    for axis, count in outer_shards.items():
        if axis in ordered_before and count not in (1, ordered_before[axis]):
            raise PlacementError(
                f"shard_order: axes {tuple(axes)} given for tensor dim {dim}, but by its "
                f"placement mesh axis {axis} shards the dim after axes to its right that make "
                f"{count} shards, and in this order they make {ordered_before[axis]}; pass the "
                "placements alone, which define the order, or Shard placements with a shard_order"
            )


def _by_runs(axes: Sequence[int], placements: Sequence[Placement]) -> dict[int, list[int]]:
    """Return the axes of a dim by the number of runs that they shard, ascending.

    The axes of each number of runs are in the given order.
    """
    by_runs: dict[int, list[int]] = {}
    for axis in axes:
        placement = placements[axis]
        by_runs.setdefault(runs_of(placement), []).append(axis)
    return dict(sorted(by_runs.items()))


def _in_runs(
    placement: StridedShard,
    axis: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    shape: Sequence[int] | None,
) -> StridedShard:
    """Return the placement with sizes if its factor counts runs, else the placement as it is.

    A factor without sizes counts runs if the dim is a multiple of it and all axes that shard the
    dim have the same factor. Otherwise it counts outer shards, so it implies an order of axes.
    """
    dim = placement.dim
    runs = placement.split_factor
    if shape is None or shape[dim] % runs:
        return placement
    same_dim = (dim, dim - len(shape))
    sharding = {}
    for other, other_placement in enumerate(placements):
        if not isinstance(other_placement, Shard | StridedShard):
            continue
        if other_placement.dim in same_dim:
            sharding[other] = other_placement
    if len(sharding) > 1:
        placements_in_runs = {StridedShard(d, split_factor=runs) for d in same_dim}
        if runs == 1 or set(sharding.values()) - placements_in_runs:
            return placement
    sizes: list[int] = [shape[dim] // runs]
    for other in sharding:
        if other <= axis:
            chunks = [chunk_sizes(n, mesh_shape[other], placement.multiple_of) for n in sizes]
            sizes = [*chain.from_iterable(chunks)]
    return StridedShard(dim, split_factor=runs, sizes=tuple(sizes))


def _order_of(
    placements: Sequence[Placement], outer_shards: Mapping[int, int], mesh_shape: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the axes that shard each dim, outermost first.

    They are ascending, except for axes with `outer_shards`.
    """
    axes_of: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            axes_of.setdefault(placement.dim, []).append(axis)
    order: dict[int, tuple[int, ...]] = {}
    for dim, axes in axes_of.items():
        order[dim] = ()
        for axes_of_level in _by_runs(axes, placements).values():
            counts = {axis: outer_shards.get(axis, 1) for axis in axes_of_level}
            order[dim] += order_of_axes(dim, counts, mesh_shape)
    return order


class ResolvedLayout(NamedTuple):
    """A layout in its one normal form.

    Attributes:
        placements: one per mesh axis, without sizes that are the default sizes.
        shard_order: the order of the axes of each sharded dim.
        dim_shardings: the sharding of every dim.
    """

    placements: tuple[Placement, ...]
    shard_order: ShardOrder
    dim_shardings: tuple[AnyDimSharding, ...]


def resolved_layout(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    shard_order: ShardOrder | None,
) -> ResolvedLayout:
    """Return the normal form of a layout of a tensor with a shape."""
    normal, order = normalize_placements(
        placements, mesh_shape, len(shape), shard_order, shape=shape
    )
    axes_of = dict(order)
    canonical = dict(enumerate(normal))
    shardings: list[AnyDimSharding] = []
    for dim, n in enumerate(shape):
        sharding = shard_any_dim(n, axes_of.get(dim, ()), normal, mesh_shape)
        has_sizes = any(getattr(normal[axis], "sizes", None) for axis in sharding.axes)
        if len(sharding.axes) > 1:
            sharding = sharding.in_written_order()
        if has_sizes:
            # Sizes that `torch.chunk` would give are dropped.
            canonical |= sharding.placements(dim)
        else:
            canonical |= _placements_in_order(sharding, normal)
        shardings.append(sharding)
    final_order = tuple([(dim, s.axes) for dim, s in enumerate(shardings) if s.axes])
    return ResolvedLayout(tuple(canonical.values()), final_order, tuple(shardings))


def _placements_in_order(
    sharding: AnyDimSharding, placements: Sequence[Placement]
) -> dict[int, Placement]:
    """Return the placements of the axes that shard a dim, so that they imply the order of axes.

    `placements` do not have sizes.
    """
    if not isinstance(sharding, DimSharding):
        return {}
    with_order: dict[int, Placement] = {}
    for axis, count in shards_before(sharding.axes, sharding.axis_sizes).items():
        placement = placements[axis]
        assert isinstance(placement, Shard), "placements with runs have sizes"
        with_order[axis] = in_order(placement, count)
    return with_order
