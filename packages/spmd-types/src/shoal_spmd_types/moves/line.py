"""`Line`: the ranks along one mesh axis, for collectives of typed tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal_dtensor.internal import FakeTensor, spmd
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.errors import NoGroupError


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks along one mesh axis.

    Attributes:
        axis: the axis.
        rank: the position of this rank along the axis; 0 if this rank does not have a coordinate in
            the current mesh, or if the axis is not in the mesh.
        comm: the communicator; None if the mesh does not have process groups, or does not have the
            axis.
    """

    axis: spmd.MeshAxis
    rank: int
    comm: Comm | None

    @property
    def size(self) -> int:
        """The number of ranks along the axis."""
        return self.axis.size()

    def must_send(self, tensor: torch.Tensor) -> bool:
        """Return whether a collective along the line must send a tensor.

        It sends nothing along an axis of one rank. For a tensor without memory it only computes the
        shape of the result.

        Raises:
            NoGroupError: if the tensor has memory, and the axis has several ranks and no
                communicator.
        """
        has_memory = not tensor.is_meta and not isinstance(tensor, FakeTensor)
        if not has_memory or self.size == 1:
            return False
        if self.comm is None:
            raise NoGroupError(
                f"a collective along {self.axis!r} needs process groups, but the mesh is "
                "abstract. Use tensors without memory (device='meta' or a FakeTensorMode) to "
                "check a program in one process, or a mesh with process groups to run it"
            )
        return True


# The cache is emptied when it has more lines. Each communicator adds a line, and where one process
# simulates many ranks, every simulated rank has communicators of its own.
_MOST_LINES = 1024


class _Cache:
    """The lines by group or communicator, under one default group.

    A line keeps its group alive. The cache is therefore emptied after `torch.distributed` has been
    initialized again, which makes another default group.
    """

    world: ProcessGroup | None = None
    lines: ClassVar[dict[ProcessGroup | Comm, Line]] = {}


def line_along(axis: Any) -> Line:
    """Return the ranks along an axis.

    Args:
        axis: a process group, a communicator, or a name or `MeshAxis` of the current mesh.

    Raises:
        SpmdTypeError: if `axis` is a name that the current mesh does not have. A `MeshAxis` that is
            not in the current mesh has a line without a communicator.
        ArgumentTypeError: for other arguments.
    """
    if isinstance(axis, Comm | ProcessGroup):
        return _line_of(axis)
    current = spmd.MESH.get()
    # `CurrentMesh.lines` is a cache by name. Most programs give names; a `MeshAxis` is rare.
    if current is None or not isinstance(axis, str):
        return _line_in(current, axis)
    line: Line | None = current.lines.get(axis)
    if line is None:
        line = _line_in(current, axis)
        current.lines[axis] = line
    return line


def _line_in(current: spmd.CurrentMesh | None, axis: Any) -> Line:
    """Return the ranks along an axis of the current mesh."""
    found = spmd.normalize_axis(axis)
    if current is None or current.mesh is None:
        return Line(found, 0, None)
    axes = list(current.names.values())
    if found not in axes:
        return Line(found, 0, None)
    index = axes.index(found)
    mesh = current.mesh
    # The program may have given torch's DeviceMesh, which does not have communicators of shoal.
    if not isinstance(mesh, DeviceMesh):
        return _line_of(mesh.get_group(index))
    coordinate = mesh.get_coordinate()
    rank = coordinate[index] if coordinate is not None else 0
    try:
        return Line(found, rank, mesh.comm(index))
    except NoGroupError:
        return Line(found, rank, None)


def _line_of(group: ProcessGroup | Comm) -> Line:
    """Return the cached line of a group or communicator."""
    world = dist.group.WORLD
    is_of_other_world = world is not _Cache.world
    is_full = len(_Cache.lines) > _MOST_LINES
    if is_of_other_world or is_full:
        _Cache.lines.clear()
        _Cache.world = world
    line = _Cache.lines.get(group)
    if line is None:
        line = _new_line(group)
        _Cache.lines[group] = line
    return line


def _new_line(group: ProcessGroup | Comm) -> Line:
    """Make the line of a group or communicator."""
    axis = spmd.normalize_axis(group)
    if isinstance(group, Comm):
        return Line(axis, group.rank, group)
    name = spmd.group_name(group) or "group"
    comm = Comm.over(group, (name,), spmd.group_ranks(group))
    return Line(axis, comm.rank, comm)
