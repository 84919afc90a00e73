"""Layouts of plain parameters whose SPMD types a program has asserted.

Hand-written code computes with plain tensors, and `shoal_spmd_types.assert_type` gives a parameter
a type on each axis. `fully_shard` with `dp_mesh_dims` reads these types: it stores the parameter as
a DTensor, gathers it over the data axes, and shows modules the plain tensor again. On an axis that
is not a data axis:

    type      the parameter     its gradient before the reduction
    S(i)      Shard(i)          Shard(i)
    I         Replicate()       Replicate(): every rank has the whole of it
    R         Replicate()       Partial(): every rank has an addend of the sum

Along data axes each rank computes with its own rows, so the type there is R or left out.

May import: data_axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from shoal_dtensor import DTensor, Partial, Placement, Spec
from shoal_dtensor.errors import LayoutError

from .data_axes import DataAxes

if TYPE_CHECKING:
    from shoal_dtensor.internal import spmd


class DeclaredLayout(NamedTuple):
    """The type of a parameter, its layout and its gradient's placements, on axes without data."""

    type: spmd.TensorType
    parameter: Spec
    gradient: tuple[Placement, ...]


def declared_layout(param: nn.Parameter, axes: DataAxes) -> DeclaredLayout | None:
    """Return the layout that types declare for a plain parameter.

    Returns:
        None if the parameter is a DTensor or has no type, or all axes of the mesh are data axes.

    Raises:
        LayoutError: if the parameter has no type on an axis, or a type that no layout has.
    """
    mesh = axes.spmd_mesh
    if mesh is None or isinstance(param, DTensor):
        return None
    # few programs assert types
    from shoal_dtensor.internal import R, spmd

    declared = spmd.type_of(param)
    kept = [name for name in mesh.axis_names if name not in axes.names]
    if declared is None or not kept:
        return None
    by_name = dict(zip(mesh.axis_names, spmd.axes_of(mesh), strict=True))
    without_data = {name: by_name[name] for name in kept}
    _check_types(declared, without_data)
    axes_of_spec = [*without_data.values()]
    spec = spmd.spec_of_type(
        declared, mesh[tuple(kept)], axes_of_spec, param.shape, dtype=param.dtype
    )
    # placements of the spec tell the order of axes that shard one dim
    gradient = [*spec.placements]
    for index, axis in enumerate(axes_of_spec):
        if declared.by_axis.get(axis) is R:
            gradient[index] = Partial()
    return DeclaredLayout(declared, spec, tuple(gradient))


def _check_types(declared: spmd.TensorType, without_data: Mapping[str, spmd.MeshAxis]) -> None:
    """Raise LayoutError unless a type is R on data axes, and R, I or a shard on the others.

    Args:
        declared: the type of a parameter.
        without_data: the axes that are not data axes, by name.
    """
    from shoal_dtensor.internal import I, R, ShardType

    for axis, axis_type in declared.by_axis.items():
        if axis not in without_data.values() and axis_type is not R:
            raise LayoutError(
                f"fully_shard: a parameter has the type {axis_type!r} over the data axis {axis!r}; "
                "it must be R there, because each rank computes with its own rows"
            )
    for name, axis in without_data.items():
        found: Any = declared.by_axis.get(axis)
        if axis.size() == 1 or found is I or found is R or isinstance(found, ShardType):
            continue
        has = "no type" if found is None else f"the type {found!r}"
        raise LayoutError(
            f"fully_shard: a parameter of type {declared!r} has {has} over {name!r}; expected "
            "R, I or S(dim) on every axis that dp_mesh_dims does not name. Assert it with "
            "shoal_spmd_types.assert_type before fully_shard"
        )
