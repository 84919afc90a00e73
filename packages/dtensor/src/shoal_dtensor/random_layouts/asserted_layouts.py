"""Layouts that a program asserts as types of plain tensors (`spmd.types.axis_types`).

For example, `assert_type(x, {"tensor": S(1)})` for a local `x` of shape (3, 4) on 2 ranks asserts
that it is a shard of a tensor of shape (3, 8). A type can describe fewer layouts than a spec: S(i)
stands for shards of equal sizes.
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
            asserted_type = read_type(types, tensor.ndim, partition_spec)
            note_layout(tensor, _asserted_layout(tensor, mesh, asserted_type))


def _asserted_layout(tensor: Tensor, mesh: DeviceMesh, asserted_type: TensorType) -> LocalLayout:
    """Return the layout of a plain tensor with an asserted type, or the layout that is known."""
    axes = axes_of(mesh)
    present_layout = known_layout(tensor)
    if present_layout.spec is not None:
        _check_agreement(present_layout.spec, asserted_type, axes)
        return present_layout
    missing_axes = [axis for axis in axes if axis.size() > 1 and axis not in asserted_type.by_axis]
    has_some_axes = 0 < len(missing_axes) < len(axes)
    if present_layout.unknown_reason and has_some_axes:
        raise SpmdTypeError(
            f"{user_line()}: assert_type: the layout of the tensor is unknown over "
            f"{describe_axes(axes)}, but the asserted type {asserted_type!r} leaves out "
            f"{describe_axes(missing_axes)}. Assert the types over all of these axes at once"
        )
    # No function has shown that the other axes do not shard the tensor.
    if missing_axes and (present_layout.unknown_reason or present_layout is UNSEEN):
        return present_layout
    return _layout_of_type(asserted_type, axes, mesh, tensor)


def _check_agreement(spec: Spec, asserted_type: TensorType, axes: Sequence[MeshAxis]) -> None:
    """Raise an error if an asserted type contradicts a known layout."""
    for index, axis in enumerate(axes):
        axis_type = asserted_type.by_axis.get(axis)
        if axis_type is None:
            continue
        placement = sized_placement(spec, index)
        if placement is None:
            known_type: AnyAxisType = R
            # I and R differ in their gradients only.
            agrees = axis_type in (R, I)
        else:
            known_type = Shard(placement.dim)
            # S(i) is more specific than V.
            agrees = axis_type in (known_type, V)
        if not agrees:
            raise SpmdTypeError(
                f"{user_line()}: assert_type: the tensor is {known_type} over {axis!r}, but "
                f"{axis_type} is asserted"
            )


def _layout_of_type(
    asserted_type: TensorType, axes: Sequence[MeshAxis], mesh: DeviceMesh, tensor: Tensor
) -> LocalLayout:
    """Return the layout of a tensor with a type over the axes of a mesh."""
    for axis in axes:
        axis_type = asserted_type.by_axis.get(axis, R)
        has_placement = axis_type in (R, I) or isinstance(axis_type, Shard)
        if not has_placement:
            return LocalLayout(unknown_reason=f"it is asserted to be {axis_type} over {axis!r}")
    spec = spec_of_type(asserted_type, mesh, axes, tensor.shape, dtype=tensor.dtype)
    is_sharded = bool(spec.shard_order)
    if not is_sharded:
        return UNSHARDED
    return LocalLayout(spec.with_(stride=global_stride(tensor, spec.shape)))
