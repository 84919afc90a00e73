"""Types, partition specs and errors, under the names of the public package.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_dtensor.errors import ArgumentValueError, SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd
from shoal_mesh import Comm

S = Shard
Replicate = R
Invariant = I
Varying = V
Partial = P
MeshAxis = spmd.MeshAxis
normalize_axis = spmd.normalize_axis
normalize_mesh = spmd.normalize_mesh
PerMeshAxisLocalSpmdType = spmd.AxisType
PerMeshAxisSpmdType = spmd.AnyAxisType
DeviceMeshAxis = spmd.AxisLike
PerMeshAxisSpmdTypes = dict[Any, spmd.AnyAxisType]
LocalSpmdType = dict[Any, spmd.AxisType]
DimSharding = None | str | Sequence[str]


def pending(reduce_op: str) -> spmd.AxisType:
    """Return the type of the terms of a reduction that is still to be done: P for a sum.

    Args:
        reduce_op: "sum", "avg", "max", "min", "product".

    Raises:
        ArgumentValueError: for another reduction.

    Example:
        >>> pending("max"), pending("sum")
        (P(max), P)
    """
    if reduce_op not in ("sum", "avg", "max", "min", "product"):
        raise ArgumentValueError(
            f"pending: reduce_op must be sum, avg, max, min or product, got {reduce_op!r}"
        )
    return spmd.pending(reduce_op)


class RedistributeError(SpmdTypeError):
    """A change of layout that is not possible by one collective per axis."""


class DTensorPropagationError(SpmdTypeError):
    """A placement of a DTensor that has no type, or a type that has no placement."""


class PartitionSpec(tuple[Any, ...]):
    """The mesh axes that shard each tensor dim.

    An entry is an axis, a tuple of axes (outermost first), or None. Entries are kept as they are
    written; names are looked up when the spec is used.

    Args:
        args: one entry for each tensor dim.

    Example:
        >>> PartitionSpec("dp", None, ("tp", "cp"))
        PartitionSpec('dp', None, ('tp', 'cp'))
    """

    __slots__ = ()

    def __new__(cls, *args: Any) -> PartitionSpec:
        return super().__new__(cls, args)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def axes_with_partition_spec(self) -> set[spmd.MeshAxis]:
        """Return the axes that shard a dim.

        Raises:
            SpmdTypeError: if a name is not an axis of the current mesh.
        """
        listed = normalize_partition_spec(self)
        return {axis for entry in listed for axis in spmd.axes_of_entry(entry)}

    def __repr__(self) -> str:
        return f"PartitionSpec({', '.join(map(repr, self))})"


def entry_of(axes: Sequence[Any]) -> Any:
    """Return an entry of a partition spec: None, an axis, or a tuple of axes, outermost first.

    Args:
        axes: the axes that shard a dim.

    Example:
        >>> entry_of([]), entry_of(["tp"]), entry_of(["dp", "tp"])
        (None, 'tp', ('dp', 'tp'))
    """
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def normalize_partition_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return a spec with axes in place of names, and without axes of one rank.

    Args:
        spec: the spec of a program.

    Raises:
        SpmdTypeError: if a name is not an axis of the current mesh, an entry is an empty tuple, an
            axis is named twice, or axes join the same ranks.

    Example:
        >>> mesh = abstract_mesh((2, 1), ("dp", "tp"))
        >>> with set_current_mesh(mesh):
        ...     normalize_partition_spec(PartitionSpec(("dp", "tp"), None))
        PartitionSpec(dp, None)
    """
    entries: list[Any] = []
    seen: list[spmd.MeshAxis] = []
    for dim, entry in enumerate(spec):
        if entry == ():
            raise SpmdTypeError(f"{spec}: entry {dim} is an empty tuple; write None")
        axes = [spmd.normalize_axis(axis) for axis in spmd.axes_of_entry(entry)]
        active = [axis for axis in axes if axis.size() > 1]
        repeated = [axis for axis in active if axis in seen]
        if repeated:
            raise SpmdTypeError(
                f"{spec} names the axis {repeated[0]!r} twice; an axis can shard one dim only"
            )
        seen += active
        entries.append(entry_of(active))
    spmd.normalize_mesh(seen)
    return PartitionSpec(*entries)


@dataclass(frozen=True, slots=True)
class SpmdType:
    """Types by axis together with a partition spec, as one value.

    Attributes:
        local_type: types by axis; S(i) only without a partition spec.
        partition_spec: the axes that shard each dim, or None.

    Raises:
        SpmdTypeError: if both name sharded dims, or contradict each other.
        ArgumentTypeError: for other types than R, I, V, P and S(i).

    Example:
        >>> SpmdType({"tp": I}, PartitionSpec("dp", None)).partition_spec
        PartitionSpec('dp', None)
    """

    local_type: Mapping[Any, spmd.AnyAxisType]
    partition_spec: PartitionSpec | None = None

    def __post_init__(self) -> None:
        for axis, axis_type in self.local_type.items():
            if not isinstance(axis_type, spmd.AxisType | Shard):
                raise SpmdTypeError(
                    f"SpmdType: the type on {axis!r} must be R, I, V, P or S(i), got {axis_type!r}"
                )
        if self.partition_spec is None:
            return
        for entry in self.partition_spec:
            for axis in spmd.axes_of_entry(entry):
                if self.local_type.get(axis, V) is not V:
                    raise SpmdTypeError(
                        f"SpmdType: {axis!r} is {self.local_type[axis]}, but shards a dim in "
                        f"{self.partition_spec}"
                    )
        has_shards = any(isinstance(axis_type, Shard) for axis_type in self.local_type.values())
        if has_shards:
            raise SpmdTypeError(
                "SpmdType: S(i) cannot be combined with a PartitionSpec; write the sharded dims "
                "in one of them"
            )


class TensorSharding:
    """The names of the mesh axes that shard each dim of a tensor.

    It is not a tuple, so that functions on nested arguments take it as one leaf.

    Args:
        dim_shardings: for each leading dim None, a name, or several names, outermost first.

    Example:
        >>> TensorSharding(None, ("dp", "tp"))
        TensorSharding(None, ('dp', 'tp'))
    """

    __slots__ = ("dim_shardings",)

    def __init__(self, *dim_shardings: DimSharding) -> None:
        self.dim_shardings: tuple[DimSharding, ...] = dim_shardings

    def __iter__(self) -> Any:
        return iter(self.dim_shardings)

    def __len__(self) -> int:
        return len(self.dim_shardings)

    def __getitem__(self, index: int) -> DimSharding:
        return self.dim_shardings[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSharding) and self.dim_shardings == other.dim_shardings

    def __hash__(self) -> int:
        return hash(self.dim_shardings)

    def __repr__(self) -> str:
        return f"TensorSharding({', '.join(map(repr, self.dim_shardings))})"


def normalize_dim_sharding(dim_sharding: DimSharding) -> Sequence[str]:
    """Return the names of the axes that shard a dim as a sequence.

    Args:
        dim_sharding: None, a name or several names.

    Example:
        >>> normalize_dim_sharding("tp"), normalize_dim_sharding(None)
        (('tp',), ())
    """
    if dim_sharding is None:
        return ()
    return (dim_sharding,) if isinstance(dim_sharding, str) else dim_sharding


def format_axis(axis: Any) -> str:
    """Return the name of an axis for texts.

    Args:
        axis: an axis, a name, a communicator or a process group.

    Example:
        >>> format_axis("tp")
        'tp'
    """
    if isinstance(axis, str):
        return axis
    if isinstance(axis, Comm):
        return "x".join(axis.axes)
    return repr(spmd.normalize_axis(axis))
