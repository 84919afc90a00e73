"""Assertions about types of tensors, and types of results that functions declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import SpmdTypeError
from .checker_state import varying_axes
from .inference.messages import user_line, way_from
from .types.axis_types import AnyAxisType, Shard, V, local_type
from .types.mesh_axes import MESH, AxisLike, MeshAxis, normalize_axis, regroup
from .types.tensor_types import TensorType, describe_axes, read_type, refine, set_type, type_of


def assert_tensor_type(
    tensor: Any, types: Mapping[AxisLike, AnyAxisType], spec: Sequence[Any] | None = None
) -> None:
    """Give a tensor a type, or compare with the type that it has.

    Args:
        tensor: a tensor, or another object with `ndim`.
        types: types by axis.
        spec: for each tensor dim the axes that shard it.

    Raises:
        SpmdTypeError: if the type is not valid for the tensor, or contradicts its type.
    """
    try:
        asserted = read_type(types, tensor.ndim, spec)
        present = type_of(tensor)
        set_type(tensor, asserted if present is None else refine(present, asserted))
    except SpmdTypeError as error:
        raise SpmdTypeError(f"{user_line()}: assert_type: {error}") from None


def type_on(tensor: Any, axis: MeshAxis, call: str) -> AnyAxisType:
    """Return the type of a tensor on one axis.

    Args:
        tensor: the tensor.
        axis: the axis.
        call: the function that asks, for errors.

    Raises:
        SpmdTypeError: if the tensor does not have a type on the axis.
    """
    present = type_of(tensor)
    if present is None or axis not in present.by_axis:
        have = "it does not have a type" if present is None else f"its type is {present!r}"
        raise SpmdTypeError(
            f"{user_line()}: {call}: the tensor does not have a type over {axis!r} ({have}); "
            f"assert it with assert_type(x, {{{axis.argument}: ...}})"
        )
    return present.by_axis[axis]


def check_source(tensor: Any, axis: MeshAxis, src: AnyAxisType, call: str) -> None:
    """Compare the type of a tensor on an axis with the source type of a collective.

    V and S(i) count as equal on a local axis.

    Raises:
        SpmdTypeError: if they differ.
    """
    if axis.size() == 1:
        return
    present = type_on(tensor, axis, call)
    wanted = src.resolve(tensor.ndim) if isinstance(src, Shard) else src
    is_local = varying_axes()(axis)
    is_same = present is wanted
    if is_local:
        is_same = local_type(present) is local_type(wanted)
    if not is_same:
        raise SpmdTypeError(
            f"{user_line()}: {call}: the tensor is {present} over {axis!r}, but the source type "
            f"is {wanted}. Way out: {way_from(axis, present, wanted)}"
        )
    dims = {} if is_local else (type_of(tensor) or TensorType({})).dims
    if not isinstance(present, Shard) or not dims:
        return
    axes = dims[present.dim]
    innermost = axes[-1]
    if innermost != axis:
        raise SpmdTypeError(
            f"{user_line()}: {call}: dim {present.dim} is sharded by {axes}, and only the "
            f"innermost axis, {innermost!r}, can be moved; move it first"
        )


def moved_type(tensor: Any, axis: MeshAxis, dst: AnyAxisType, ndim: int) -> TensorType:
    """Return the type of a tensor after a move along one axis.

    Args:
        tensor: the tensor before the move, which has a type.
        axis: the axis.
        dst: the type after the move.
        ndim: the number of dims after the move.
    """
    present = type_of(tensor) or TensorType({})
    if axis.size() == 1:
        return present
    after: AnyAxisType = dst.resolve(ndim) if isinstance(dst, Shard) else dst
    if isinstance(after, Shard) and varying_axes()(axis):
        after = V
    if ndim != tensor.ndim:
        present = present.without_dims()
    return present.with_axis(axis, after)


def on_current_mesh(tensor: Any, call: str) -> TensorType:
    """Return the type of a tensor in terms of the axes of the current mesh.

    If the type is over other axes that join the same ranks, it is translated. This is possible if
    the tensor has the same type on all axes that are translated together.

    Raises:
        SpmdTypeError: if the type lacks axes of the mesh, or cannot be translated.
    """
    present = type_of(tensor) or TensorType({})
    mesh = MESH.get()
    if mesh is None or present.by_axis.keys() == {*mesh.axes}:
        return present
    missing = [axis for axis in mesh.axes if axis not in present.by_axis]
    others = [axis for axis in present.by_axis if axis not in mesh.axes]
    if not missing:
        return present
    translated = translate_type(present, mesh.axes) if others else None
    if translated is None:
        raise SpmdTypeError(
            f"{call}: the operand's type {present!r} lacks the axes {describe_axes(missing)} of "
            "the current mesh; assert its type on them"
        )
    set_type(tensor, translated)
    return translated


def translate_type(present: TensorType, axes: Iterable[MeshAxis]) -> TensorType | None:
    """Return a type in terms of other axes over the same ranks; None if it cannot be translated.

    Args:
        present: the type.
        axes: the other axes.
    """
    groups = regroup(present.by_axis, axes)
    if groups is None:
        return None
    by_axis: dict[MeshAxis, AnyAxisType] = {}
    for sources, targets in groups:
        kinds = {local_type(present.by_axis[axis]) for axis in sources}
        if sources == targets:
            by_axis[targets[0]] = present.by_axis[targets[0]]
            continue
        if len(kinds) > 1:
            return None
        axis_type = kinds.pop()
        by_axis.update(dict.fromkeys(targets, axis_type))
    return TensorType({axis: by_axis[axis] for axis in axes if axis in by_axis})


def types_by_axis(types: Mapping[AxisLike, AnyAxisType]) -> dict[MeshAxis, AnyAxisType]:
    """Return types with axes in place of names and process groups."""
    return {normalize_axis(axis): axis_type for axis, axis_type in types.items()}
