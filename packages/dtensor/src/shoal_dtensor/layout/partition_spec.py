"""Placements written per tensor dim: `PartitionSpec("dp", None)` instead of one placement per mesh axis.

The spelling is that of JAX's partition specs.  It says the order of axes on a dim where several shard it, so it stands
for placements and shard order together.  Inside the library there are only those: it is translated where it enters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import constant_when_compiled, dataclass

from ..errors import ArgumentTypeError, PlacementError
from .dim_sharding import ShardOrder
from .placements import Partial, Placement, Replicate, Shard

Axis = str | int
DimAxes = None | Axis | tuple[Axis, ...]


@constant_when_compiled
@dataclass(frozen=True, slots=True, init=False)
class PartitionSpec:
    """For each tensor dim, the mesh axes that shard it, outermost first.

    Args:
        dims: one entry per leading tensor dim: an axis name or index, a tuple of them, or None for a replicated
            dim. Dims that are not listed are replicated.
        partial: mesh axes over which values are still to be reduced, and how.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> mesh = abstract_mesh((2, 4), ("dp", "tp"))
        >>> PartitionSpec(None, ("tp", "dp")).resolve(mesh)
        ((Shard(dim=1), Shard(dim=1)), ((1, (1, 0)),))
        >>> PartitionSpec("dp", partial={"tp": "sum"}).resolve(mesh)[0]
        (Shard(dim=0), Partial(sum))
    """

    dims: tuple[tuple[Axis, ...], ...]
    partial: tuple[tuple[Axis, str], ...]

    def __init__(self, *dims: DimAxes, partial: Mapping[Axis, str] | None = None) -> None:
        listed = tuple(() if d is None else d if isinstance(d, tuple) else (d,) for d in dims)
        object.__setattr__(self, "dims", listed)
        object.__setattr__(self, "partial", tuple((partial or {}).items()))

    def resolve(self, mesh: DeviceMesh) -> tuple[tuple[Placement, ...], ShardOrder]:
        """One placement per axis of `mesh`, and the order of axes on every dim that is sharded.

        Raises:
            PlacementError: if an axis is used twice.
            AxisError: if the mesh has no such axis.
        """
        placements: list[Placement] = [Replicate()] * mesh.ndim
        used: set[int] = set()
        order: list[tuple[int, tuple[int, ...]]] = []
        wanted: list[tuple[tuple[Axis, ...], Placement]] = [(axes, Shard(dim)) for dim, axes in enumerate(self.dims)]
        wanted += [((axis,), Partial(op)) for axis, op in self.partial]
        for axes, placement in wanted:
            indices = tuple(mesh.axis_index(axis) for axis in axes)
            for axis in indices:
                if axis in used:
                    raise PlacementError(f"{self!r}: mesh axis {mesh.axis_names[axis]!r} is used twice")
                used.add(axis)
                placements[axis] = placement
            if indices and isinstance(placement, Shard):
                order.append((placement.dim, indices))
        return tuple(placements), tuple(order)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """How code that torch.compile generates spells it."""
        return repr(self), {"PartitionSpec": PartitionSpec}

    def __repr__(self) -> str:
        dims = [repr(None if not axes else axes[0] if len(axes) == 1 else axes) for axes in self.dims]
        return f"PartitionSpec({', '.join([*dims, *([f'partial={dict(self.partial)}'] if self.partial else [])])})"


Placements = Sequence[Placement] | PartitionSpec


def read_placements(
    mesh: DeviceMesh, placements: Placements | None, shard_order: ShardOrder | None = None
) -> tuple[tuple[Placement, ...], ShardOrder | None]:
    """What a user passed as placements (nothing: all replicated), and the shard order that goes with it.

    Raises:
        ArgumentTypeError: if it is neither a list of placements nor a `PartitionSpec`.
        PlacementError: if a `PartitionSpec`, which says the order itself, comes with a shard order.
    """
    if type(placements) in (list, tuple):  # at once: an abstract class takes 0.3 us to ask
        return tuple(placements), shard_order  # type: ignore[arg-type]  # a list or tuple
    if placements is None:
        return (Replicate(),) * mesh.ndim, shard_order
    if not isinstance(placements, PartitionSpec):
        given: object = placements
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ArgumentTypeError(
                f"expected placements to be a list with one for each mesh axis, or a PartitionSpec, got {placements!r}"
            )
        return tuple(placements), shard_order
    if shard_order is not None:
        raise PlacementError(f"{placements!r} says the order of axes itself: give no shard_order with it")
    return placements.resolve(mesh)
