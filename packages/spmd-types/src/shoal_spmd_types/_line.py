"""`Line`: the ranks along one mesh axis, as collectives of typed tensors use them.

May import: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from shoal_dtensor.internal import FakeTensor, spmd
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.errors import NoGroupError

_COMMS: WeakKeyDictionary[ProcessGroup, Comm] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks along one mesh axis.

    Attributes:
        axis: the axis.
        rank: the position of this rank; 0 on an abstract mesh without a coordinate.
        comm: the communicator; None where nothing can be sent.
    """

    axis: spmd.MeshAxis
    rank: int
    comm: Comm | None

    @property
    def size(self) -> int:
        """The number of ranks along the axis."""
        return self.axis.size()

    def sends(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is sent; tensors without memory only get the result's shape.

        Raises:
            NoGroupError: if the tensor has memory, and the axis has several ranks and no
                communicator.
        """
        if tensor.is_meta or isinstance(tensor, FakeTensor) or self.size == 1:
            return False
        if self.comm is None:
            raise NoGroupError(
                f"nothing can be sent along {self.axis!r}: the mesh is abstract. Use tensors "
                "without memory (device='meta' or a FakeTensorMode) to check a program in one "
                "process, or a mesh with process groups to run it"
            )
        return True


def line_along(axis: Any) -> Line:
    """Return the ranks along an axis.

    Args:
        axis: a process group, a communicator, or a name or `MeshAxis` of the current mesh.

    Raises:
        SpmdTypeError: if the current mesh does not have the axis.
        ArgumentTypeError: for other arguments.
    """
    if isinstance(axis, Comm):
        return Line(spmd.normalize_axis(axis), axis.rank, axis)
    if isinstance(axis, ProcessGroup):
        comm = _comm_over(axis)
        return Line(spmd.normalize_axis(axis), comm.rank, comm)
    found = spmd.normalize_axis(axis)
    current = spmd.MESH.get()
    if current is None or current.mesh is None:
        return Line(found, 0, None)
    index = next((i for i, name in enumerate(current.names) if current.names[name] == found), None)
    if index is None:
        return Line(found, 0, None)
    mesh = current.mesh
    if not isinstance(mesh, DeviceMesh):
        comm = _comm_over(mesh.get_group(index))
        return Line(found, comm.rank, comm)
    coordinate = mesh.get_coordinate()
    rank = coordinate[index] if coordinate is not None else 0
    try:
        return Line(found, rank, mesh.comm(index))
    except NoGroupError:
        return Line(found, rank, None)


def _comm_over(group: ProcessGroup) -> Comm:
    comm = _COMMS.get(group)
    if comm is None:
        ranks = spmd.group_ranks(group)
        comm = Comm.over(group, (spmd.group_name(group) or "group",), ranks)
        _COMMS[group] = comm
    return comm
