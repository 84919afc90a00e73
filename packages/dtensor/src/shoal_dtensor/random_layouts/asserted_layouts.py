"""Layouts that a program asserts as types of plain tensors (`spmd.types.axis_types`).

A type says less than a layout: S(i) stands for shards of equal sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal_mesh import DeviceMesh

from .._torch.tensors import unwatched_functions
from ..errors import SpmdTypeError
from ..layout.spec import Spec
from ..spmd.inference.messages import user_line
from ..spmd.inference.operand_layouts import spec_of_type
from ..spmd.types.axis_types import AnyAxisType, I, R, Shard, V
from ..spmd.types.mesh_axes import AxisLike, MeshAxis, axes_of
from ..spmd.types.tensor_types import TensorType, describe_axes, read_type
from ..tensor.dtensor import DTensor
from .layouts import (
    UNSEEN,
    UNSHARDED,
    LocalLayout,
    global_stride,
    known_layout,
    note_layout,
    sized_placement,
)


def assert_layout(
    tensor: Tensor,
    mesh: DeviceMesh,
    types: Mapping[AxisLike, AnyAxisType],
    partition_spec: Sequence[Any] | None,
) -> None:
    """Note the layout of a plain tensor that a program asserts, or compare with the known one.

    Args:
        tensor: the tensor; a DTensor has its layout, and is left alone.
        mesh: the mesh of the layouts.
        types: types by axis; other axes of the mesh do not shard the tensor.
        partition_spec: for each tensor dim the axes that shard it.

    Raises:
        SpmdTypeError: if the type is not valid for the tensor, contradicts its known layout, or
            lacks an axis along which its layout is unknown.
    """
    with unwatched_functions():
        if not isinstance(tensor, DTensor):
            note_layout(tensor, _asserted_layout(tensor, mesh, types, partition_spec))


def _asserted_layout(
    tensor: Tensor,
    mesh: DeviceMesh,
    types: Mapping[AxisLike, AnyAxisType],
    partition_spec: Sequence[Any] | None,
) -> LocalLayout:
    """Return the layout of a plain tensor with an asserted type, or the layout that is known."""
    asserted = read_type(types, tensor.ndim, partition_spec)
    axes = axes_of(mesh)
    present = known_layout(tensor)
    if present.spec is not None:
        _compare(present.spec, asserted, axes)
        return present
    missing = [axis for axis in axes if axis.size() > 1 and axis not in asserted.by_axis]
    if present.unknown_reason and 0 < len(missing) < len(axes):
        raise SpmdTypeError(
            f"{user_line()}: assert_type: the layout of the tensor is unknown over "
            f"{describe_axes(axes)}, but the asserted type {asserted!r} leaves out "
            f"{describe_axes(missing)}. Assert the types over all of these axes at once"
        )
    if missing and (present.unknown_reason or present is UNSEEN):
        return present
    return _layout_of_type(asserted, axes, mesh, tensor)


def _compare(spec: Spec, asserted: TensorType, axes: Sequence[MeshAxis]) -> None:
    """Raise an error if an asserted type contradicts a known layout."""
    for index, axis in enumerate(axes):
        axis_type = asserted.by_axis.get(axis)
        if axis_type is None:
            continue
        shard = sized_placement(spec, index)
        known = R if shard is None else Shard(shard.dim)
        # I and R differ in their gradients only, and S(i) is more specific than V.
        agrees = (
            axis_type is known
            or (known is R and axis_type is I)
            or (axis_type is V and shard is not None)
        )
        if not agrees:
            raise SpmdTypeError(
                f"{user_line()}: assert_type: the tensor is {known} over {axis!r}, but {axis_type} is "
                "asserted"
            )


def _layout_of_type(
    asserted: TensorType, axes: Sequence[MeshAxis], mesh: DeviceMesh, tensor: Tensor
) -> LocalLayout:
    """Return the layout of a tensor with a type over the axes of a mesh."""
    for axis in axes:
        axis_type = asserted.by_axis.get(axis, R)
        if axis_type not in (R, I) and not isinstance(axis_type, Shard):
            return LocalLayout(unknown_reason=f"it is asserted to be {axis_type} over {axis!r}")
    spec = spec_of_type(asserted, mesh, axes, tensor.shape, dtype=tensor.dtype)
    if not spec.shard_order:
        return UNSHARDED
    return LocalLayout(spec.with_(stride=global_stride(tensor, spec.shape)))
