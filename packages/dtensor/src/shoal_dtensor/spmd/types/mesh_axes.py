"""Mesh axes as sets of ranks, and the current mesh of a program.

An axis is identified by the ranks that it joins, relative to the first: (0, 4, 8, 12) for four
ranks at a distance of four. Two process groups over the same ranks are therefore one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import ScopedValue

from ..._torch.process_groups import ProcessGroup, group_name, group_ranks
from ...errors import ArgumentTypeError, SpmdTypeError

# names that programs have given to an axis, by its offsets; for texts only
_NAMES: dict[tuple[int, ...], dict[str, None]] = {}


@dataclass(frozen=True, slots=True, repr=False)
class MeshAxis:
    """A mesh axis: the ranks that it joins, relative to the first.

    Attributes:
        offsets: the distance of each rank to the first one, ascending, beginning with 0.

    Example:
        >>> MeshAxis.of(4, 2).offsets
        (0, 2, 4, 6)
    """

    offsets: tuple[int, ...]

    @staticmethod
    def of(size_or_pg: int | ProcessGroup, stride: int | None = None) -> MeshAxis:
        """Return the axis of a process group, or of `size` ranks at a distance of `stride`.

        Args:
            size_or_pg: a process group, or the number of ranks.
            stride: the distance of neighbors; only with a number of ranks.

        Raises:
            ArgumentTypeError: for other arguments.
        """
        if isinstance(size_or_pg, ProcessGroup) and stride is None:
            return axis_over(group_ranks(size_or_pg), group_name(size_or_pg))
        if isinstance(size_or_pg, int) and isinstance(stride, int):
            return MeshAxis(tuple(range(0, size_or_pg * stride, stride)))
        raise ArgumentTypeError(
            f"MeshAxis.of: expected a process group, or size and stride, got {size_or_pg!r} and "
            f"{stride!r}"
        )

    def size(self) -> int:
        """Return the number of ranks along the axis."""
        return len(self.offsets)

    def names(self) -> tuple[str, ...]:
        """Return the names that programs have given to the axis."""
        return tuple(_NAMES.get(self.offsets, ()))

    @property
    def argument(self) -> str:
        """The axis as an argument in advice: its name in quotes, or the axis without a name."""
        text = repr(self)
        return text if text.startswith("MeshAxis(") else repr(text)

    def isorthogonal(self, *others: MeshAxis) -> bool:
        """Tell whether no two of the axes join the same pair of ranks."""
        return are_orthogonal((self, *others))

    def __le__(self, other: MeshAxis) -> bool:
        return {*self.offsets} <= {*other.offsets}

    def __repr__(self) -> str:
        current = MESH.get()
        for name, axis in current.names.items() if current is not None else ():
            if axis.offsets == self.offsets:
                return name
        names = self.names()
        if names:
            return names[0]
        if len(self.offsets) == 1:
            return "MeshAxis(1)"
        return f"MeshAxis({len(self.offsets)}:{self.offsets[1]})"


AxisLike = MeshAxis | ProcessGroup | Comm | str


def axis_over(ranks: Sequence[int], name: str = "") -> MeshAxis:
    """Return the axis that joins these global ranks, and note its name.

    Args:
        ranks: the global ranks, in the order of the axis.
        name: its name in texts; empty if it does not have one.
    """
    axis = MeshAxis(tuple([rank - ranks[0] for rank in ranks]))
    if name:
        _NAMES.setdefault(axis.offsets, {}).setdefault(name)
    return axis


def axes_of(mesh: DeviceMesh) -> list[MeshAxis]:
    """Return the axes of a mesh in order, and note their names."""
    return [axis_over(mesh.ranks_along(index), name) for index, name in enumerate(mesh.axis_names)]


def flatten_axes(axes: Iterable[MeshAxis]) -> MeshAxis:
    """Return the axis that joins all ranks of several orthogonal axes."""
    offsets = [0]
    for axis in axes:
        offsets = [first + second for first in offsets for second in axis.offsets]
    return MeshAxis(tuple(sorted(offsets)))


def are_orthogonal(axes: Sequence[MeshAxis]) -> bool:
    """Tell whether every combination of positions on the axes is a different rank."""
    flat = flatten_axes(axes)
    return len({*flat.offsets}) == prod(axis.size() for axis in axes)


@dataclass(frozen=True, slots=True)
class CurrentMesh:
    """The mesh that a region of a program computes on.

    Attributes:
        axes: the axes with more than one rank, outermost first.
        names: all axes by name, also axes of one rank.
        local: axes along which every coordinate has a tensor of its own, also in global mode.
        mesh: the device mesh, if the program gave one; it has the communicators.
        lines: objects that packages above this one store for the name of an axis.
    """

    axes: tuple[MeshAxis, ...]
    names: Mapping[str, MeshAxis]
    local: frozenset[MeshAxis] = frozenset()
    mesh: Any = None
    lines: dict[str, Any] = field(default_factory=dict, compare=False)


MESH: ScopedValue[CurrentMesh | None] = ScopedValue("shoal_spmd_mesh", default=None)
MeshLike = DeviceMesh | Mapping[str, MeshAxis] | Iterable[Any] | None


def read_mesh(axes: Any, local_axes: Sequence[AxisLike] = ()) -> CurrentMesh:
    """Return the mesh that a user described.

    Args:
        axes: a device mesh of shoal or torch, axes by name, a set of axes, a sequence of process
            groups, or None for the current mesh.
        local_axes: the axes that stay local in global mode.

    Raises:
        SpmdTypeError: if the axes are not orthogonal, or None is given without a current mesh.
        ArgumentTypeError: for other arguments.
    """
    if axes is None:
        current = MESH.get()
        if current is None:
            raise SpmdTypeError("set_current_mesh() without axes needs a current mesh; pass axes")
        found = [*current.axes]
        names = dict(current.names)
        mesh = current.mesh
    else:
        found, names, mesh = _axes_of(axes)
    active = tuple([axis for axis in found if axis.size() > 1])
    if not are_orthogonal(active):
        raise SpmdTypeError(
            f"set_current_mesh: the axes {_describe(active)} join the same ranks; every "
            "combination of coordinates must be a different rank"
        )
    outside = CurrentMesh(active, names, frozenset(), mesh)
    local = frozenset([_read_axis(axis, outside) for axis in local_axes])
    return CurrentMesh(active, names, local, mesh)


class _DescribedAxes(NamedTuple):
    """The axes of a description, their names, and the device mesh if the description is one."""

    axes: list[MeshAxis]
    by_name: dict[str, MeshAxis]
    mesh: Any


def _axes_of(axes: Any) -> _DescribedAxes:
    """Return the axes that a user describes by a mesh, a dict, a set or groups."""
    if isinstance(axes, Mapping):
        named = {name: _note_name(axis, name) for name, axis in axes.items()}
        return _DescribedAxes([*named.values()], named, None)
    if hasattr(axes, "mesh_dim_names") and hasattr(axes, "get_group"):
        return _axes_of_mesh(axes)
    if isinstance(axes, Iterable) and not isinstance(axes, str):
        listed = [axis if isinstance(axis, MeshAxis) else MeshAxis.of(axis) for axis in axes]
        return _DescribedAxes(listed, {}, None)
    raise ArgumentTypeError(
        "set_current_mesh: expected a device mesh, a dict of names to MeshAxis, a set of MeshAxis "
        f"or a sequence of process groups, got {type(axes).__name__}"
    )


def _axes_of_mesh(mesh: Any) -> _DescribedAxes:
    """Return the axes of a device mesh, of shoal or of torch."""
    names = tuple(mesh.mesh_dim_names or [str(axis) for axis in range(mesh.ndim)])
    found = []
    for index, name in enumerate(names):
        if isinstance(mesh, DeviceMesh):
            ranks: Sequence[int] = mesh.ranks_along(index)
        else:
            ranks = group_ranks(mesh.get_group(index))
        found.append(axis_over(ranks, name))
    by_name = dict(zip(names, found, strict=True))
    return _DescribedAxes(found, by_name, mesh)


def _note_name(axis: Any, name: str) -> MeshAxis:
    """Return an axis, and note its name."""
    if not isinstance(axis, MeshAxis):
        raise ArgumentTypeError(
            f"set_current_mesh: {name!r} is a {type(axis).__name__}; use MeshAxis.of(group)"
        )
    _NAMES.setdefault(axis.offsets, {}).setdefault(name)
    return axis


@contextmanager
def set_current_mesh(
    axes: Any = None, *, local_axes: Sequence[AxisLike] = ()
) -> Iterator[CurrentMesh]:
    """Make a mesh the current mesh of a block.

    Args:
        axes: a device mesh, axes by name, a set of axes, a sequence of process groups, or None for
            the current mesh.
        local_axes: axes along which every coordinate has a tensor of its own in global mode.

    Raises:
        SpmdTypeError: if the axes are not orthogonal, or None is given without a current mesh.
        ArgumentTypeError: for other arguments.
    """
    mesh = read_mesh(axes, local_axes)
    with MESH.entered(mesh):
        yield mesh


def normalize_axis(axis: AxisLike) -> MeshAxis:
    """Return the axis that a name, a process group, a communicator or an axis stands for.

    Args:
        axis: a name is looked up in the current mesh.

    Raises:
        SpmdTypeError: if the current mesh does not have an axis of this name.
        ArgumentTypeError: for other arguments.
    """
    return _read_axis(axis, MESH.get())


def _read_axis(axis: Any, current: CurrentMesh | None) -> MeshAxis:
    """Return what `normalize_axis` returns, with `current` as the current mesh."""
    if isinstance(axis, MeshAxis):
        return axis
    if isinstance(axis, str):
        if current is None:
            raise SpmdTypeError(
                f"the mesh axis {axis!r} is a name, but no mesh is current; set one with "
                "set_current_mesh(mesh)"
            )
        found = current.names.get(axis)
        if found is None:
            raise SpmdTypeError(
                f"the current mesh does not have an axis {axis!r}; its axes are "
                f"{', '.join(current.names) or 'without names'}"
            )
        return found
    if isinstance(axis, Comm):
        return axis_over(axis.ranks, "_".join(axis.axes))
    if isinstance(axis, ProcessGroup):
        return MeshAxis.of(axis)
    raise ArgumentTypeError(
        "a mesh axis must be a name, a process group, a communicator or a MeshAxis, got "
        f"{type(axis).__name__}"
    )


def normalize_mesh(axes: Iterable[MeshAxis]) -> frozenset[MeshAxis]:
    """Return the axes with more than one rank, checked to be orthogonal.

    Raises:
        SpmdTypeError: if they are not.
    """
    active = [axis for axis in axes if axis.size() > 1]
    if not are_orthogonal(active):
        raise SpmdTypeError(f"the axes {_describe(active)} are not orthogonal")
    return frozenset(active)


def regroup(
    source: Iterable[MeshAxis], target: Iterable[MeshAxis]
) -> list[tuple[list[MeshAxis], list[MeshAxis]]] | None:
    """Return pairs of groups: source axes, and the target axes that join the same ranks.

    Every axis is in one group, and no group can be divided. Return None if the axes cannot be
    grouped in this way.
    """
    groups: list[tuple[list[MeshAxis], list[MeshAxis]]] = []
    left = [*source]
    right = [*target]
    while left:
        found = _smallest_group(left, right)
        if found is None:
            return None
        groups.append(found)
        left = [axis for axis in left if axis not in found[0]]
        right = [axis for axis in right if axis not in found[1]]
    return None if right else groups


def _smallest_group(
    left: Sequence[MeshAxis], right: Sequence[MeshAxis]
) -> tuple[list[MeshAxis], list[MeshAxis]] | None:
    """Return the smallest group of each side that join the same ranks; None if there are none."""
    for count in range(1, len(left) + len(right)):
        for subset in _subsets(left, count):
            flat = flatten_axes(subset)
            for others in _subsets(right, count):
                if flatten_axes(others) == flat:
                    return [*subset], [*others]
    return None


def _subsets(axes: Sequence[MeshAxis], most: int) -> Iterator[tuple[MeshAxis, ...]]:
    for count in range(1, min(most, len(axes)) + 1):
        yield from combinations(axes, count)


def _describe(axes: Iterable[MeshAxis]) -> str:
    return ", ".join(map(repr, axes))
