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

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import LayoutError
from shoal_mesh import DeviceMesh

from .data_axes import DataAxes

if TYPE_CHECKING:
    from shoal_dtensor.internal import spmd


class DeclaredLayout(NamedTuple):
    """The type of a parameter, its layout and its gradients' placements on the axes without data."""

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
    axis_of = {name: _axis(mesh, name) for name in mesh.axis_names}
    _check_data_axes(declared, [axis_of[name] for name in kept])
    placements = [_placement_of(declared, axis_of[name], name) for name in kept]
    shape = list(param.shape)
    for name, placement in zip(kept, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(mesh.axis_names.index(name))
    index = {axis_of[name]: position for position, name in enumerate(kept)}
    order: list[tuple[int, tuple[int, ...]]] = []
    for dim, sharding in declared.dims.items():
        sharding_axes = [index[axis] for axis in sharding if axis in index]
        order.append((dim, tuple(sharding_axes)))
    spec = Spec(
        mesh[tuple(kept)], placements, shape, None, dtype=param.dtype, shard_order=tuple(order)
    )
    # placements of the spec tell the order of axes that shard one dim
    gradient = [
        Partial() if declared.by_axis.get(axis_of[name]) is R else placement
        for name, placement in zip(kept, spec.placements, strict=True)
    ]
    return DeclaredLayout(declared, spec, tuple(gradient))


def _axis(mesh: DeviceMesh, name: str) -> spmd.MeshAxis:
    from shoal_dtensor.internal import spmd

    return spmd.axis_over(mesh.ranks_along(mesh.axis_names.index(name)), name)


def _check_data_axes(declared: spmd.TensorType, kept: list[spmd.MeshAxis]) -> None:
    """Raise LayoutError if a type along data axes is not R."""
    from shoal_dtensor.internal import R

    for axis, axis_type in declared.by_axis.items():
        if axis not in kept and axis_type is not R:
            raise LayoutError(
                f"fully_shard: a parameter has the type {axis_type!r} over the data axis {axis!r}; "
                "it must be R there, because each rank computes with its own rows"
            )


def _placement_of(declared: spmd.TensorType, axis: spmd.MeshAxis, name: str) -> Placement:
    """Return the placement of a parameter on one axis.

    Raises:
        LayoutError: if the type on the axis is missing, or neither R, I nor a shard.
    """
    from shoal_dtensor.internal import I, R, ShardType

    axis_type: Any = declared.by_axis.get(axis)
    if axis.size() == 1 or axis_type is I or axis_type is R:
        return Replicate()
    if isinstance(axis_type, ShardType):
        return Shard(axis_type.dim)
    has = "no type" if axis_type is None else f"the type {axis_type!r}"
    raise LayoutError(
        f"fully_shard: a parameter of type {declared!r} has {has} over {name!r}; expected R, I or "
        "S(dim) on every axis that dp_mesh_dims does not name. Assert it with "
        "shoal_spmd_types.assert_type before fully_shard"
    )
