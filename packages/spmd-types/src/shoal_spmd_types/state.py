"""The current mesh, and the state of the checker.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from shoal_dtensor.internal import spmd

is_type_checking = spmd.is_type_checking


def set_current_mesh(
    axes: Any = None, *, local_axes: Sequence[Any] = ()
) -> AbstractContextManager[Any]:
    """Return a block that sets the current mesh: types are given along its axes.

    Args:
        axes: a device mesh of shoal or torch, a dict of names to `MeshAxis`, a set of `MeshAxis`, a
            sequence of process groups, or None for the current mesh.
        local_axes: outer axes along which ranks compute on tensors of their own, also in global
            mode.

    Returns:
        The block.

    Raises:
        SpmdTypeError: if axes join the same ranks, or None is given without a current mesh.
        ArgumentTypeError: for other arguments.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))):
        ...     sorted(current_mesh_names())
        ['dp', 'tp']
    """
    return spmd.set_current_mesh(axes, local_axes=local_axes)


def current_mesh() -> frozenset[spmd.MeshAxis] | None:
    """Return the axes of the current mesh that have several ranks; None without a mesh.

    Example:
        >>> current_mesh() is None
        True
    """
    mesh = spmd.MESH.get()
    return None if mesh is None else frozenset(mesh.axes)


def current_mesh_names() -> dict[str, spmd.MeshAxis] | None:
    """Return the axes of the current mesh that have several ranks, by name; None without a mesh.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 1), ("dp", "tp"))):
        ...     current_mesh_names()
        {'dp': dp}
    """
    mesh = spmd.MESH.get()
    if mesh is None:
        return None
    return {name: axis for name, axis in mesh.names.items() if axis.size() > 1}


def current_mesh_all_names() -> dict[str, spmd.MeshAxis] | None:
    """Return all axes of the current mesh by name; None without a mesh.

    Example:
        >>> with set_current_mesh(abstract_mesh((2, 1), ("dp", "tp"))):
        ...     sorted(current_mesh_all_names())
        ['dp', 'tp']
    """
    mesh = spmd.MESH.get()
    return None if mesh is None else dict(mesh.names)


class _TypeChecking:
    """An object that is true while types are checked."""

    def __bool__(self) -> bool:
        return spmd.is_type_checking()

    def __repr__(self) -> str:
        return f"TYPE_CHECKING({bool(self)})"


TYPE_CHECKING = _TypeChecking()
