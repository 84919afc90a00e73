"""Types of the results of operators on tensors whose parts have types of their own (see `Parts`).

A `cat` joins R and I operands to such a tensor, and a lowered module may return one. Views take it
apart again, and operators on each element keep the parts. Every other operator would mix parts: a
gradient that is partial with one that is complete, or shards of different tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from ...errors import ShoalTensorError, SpmdTypeError
from ...layout.tensor_meta import map_instances
from ...rules.language.op_call import schema_of
from ..types.axis_types import AnyAxisType, I, Parts, R, Run, V, joined_type
from ..types.mesh_axes import MeshAxis
from ..types.tensor_types import tensors_in
from .messages import describe_call
from .operator_call import LocalOperatorCall, Operand

_CAT = torch.ops.aten.cat.default
# operators on each element that torch does not tag as such
_COPIES = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.native_dropout.default,
    }
)


def results_in_parts(call: LocalOperatorCall, axis: MeshAxis) -> list[AnyAxisType] | None:
    """Return the types of the outputs on an axis, if parts of an operand or output differ there.

    Args:
        call: the call.
        axis: the axis.

    Returns:
        A type for each output; None if no operand has parts and the outputs have none either.

    Raises:
        SpmdTypeError: if the operator would mix parts of different types.
    """
    typed = [operand for operand in call.operands if operand.tensor_type is not None]
    kinds = {operand.on(axis) for operand in typed}
    has_parts = any(map(_has_parts, kinds))
    joins = call.op is _CAT and kinds >= {R, I}
    if not has_parts and not joins:
        return None
    deciding = {operand.on(axis) for operand in typed if operand.takes_gradient}
    are_replicated = all(map(_is_replicated, kinds))
    if are_replicated and len(deciding) <= 1 and not any(map(_has_parts, deciding)):
        # Without a gradient, parts of different types have equal values like R.
        return [next(iter(deciding), R)] * len(call.outputs)
    if joins and are_replicated:
        joined = _type_of_concatenation(call, axis)
        if joined is not None:
            return [joined]
    if not has_parts:
        return None
    return _types_of_results(call, typed, axis) or _refuse(call, axis)


def _is_replicated(axis_type: AnyAxisType) -> bool:
    return axis_type.is_replicated if isinstance(axis_type, Parts) else axis_type in (R, I)


def _has_parts(axis_type: AnyAxisType) -> bool:
    return isinstance(axis_type, Parts)


def _types_of_results(
    call: LocalOperatorCall, typed: Sequence[Operand], axis: MeshAxis
) -> list[AnyAxisType] | None:
    """Return the types of the outputs of an operator that keeps parts apart; None for others."""
    if len(typed) == 1 and schema_of(call.op).is_view:
        return _types_of_views(call, typed[0], axis)
    kinds = {operand.on(axis) for operand in typed}
    if call.op is _CAT:
        joined = _type_of_concatenation(call, axis)
        if joined is not None:
            return [joined]
        keeps_parts = _concatenated_dim(call) != _dim_of_parts(kinds)
    else:
        metas = [*[operand.meta for operand in typed], *call.outputs]
        is_elementwise = call.op in _COPIES or torch.Tag.pointwise in call.op.tags
        keeps_parts = is_elementwise and len({meta.shape for meta in metas}) == 1
    return [*kinds] * len(call.outputs) if keeps_parts and len(kinds) == 1 else None


def _dim_of_parts(kinds: Iterable[AnyAxisType]) -> int:
    """Return the dim of the first type with parts."""
    return next(axis_type.dim for axis_type in kinds if isinstance(axis_type, Parts))


def _type_of_concatenation(call: LocalOperatorCall, axis: MeshAxis) -> AnyAxisType | None:
    """Return the type of a `cat` along the dim of the parts; None if they are along another dim."""
    dim = _concatenated_dim(call)
    runs: list[Run] = []
    for operand in call.operands:
        axis_type = operand.on(axis)
        if isinstance(axis_type, Parts) and axis_type.dim == dim and axis_type.is_replicated:
            runs.extend(axis_type.runs)
        elif axis_type in (R, I):
            runs.append((operand.meta.shape[dim], axis_type))
        else:
            return None
    return joined_type(dim, runs)


def _concatenated_dim(call: LocalOperatorCall) -> int:
    """Return the dim of a `cat`, counted from the front."""
    dim: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return dim % len(call.outputs[0].shape)


def _types_of_views(
    call: LocalOperatorCall, operand: Operand, axis: MeshAxis
) -> list[AnyAxisType] | None:
    """Return the types of views of a tensor with parts; None if a view mixes them.

    The operator runs on a tensor that has the operand's shape, and whose elements are positions
    along the dim of the parts: a view of the positions, expanded along the other dims. In the
    results, the offset, the size and the strides say which positions a view has, and along which
    dim.
    """
    parts = operand.on(axis)
    assert isinstance(parts, Parts), "an operand with parts"
    shape = operand.meta.shape
    strides = [0] * len(shape)
    strides[parts.dim] = 1
    positions = torch.arange(shape[parts.dim], device="cpu").as_strided(shape, strides)
    args, kwargs = map_instances((call.args, {**call.kwargs}), Operand, lambda _: positions)
    try:
        views = tensors_in(call.op(*args, **kwargs))
    except (ShoalTensorError, RuntimeError):
        return None
    found = [_type_of_view(view, parts) for view in views]
    listed: list[AnyAxisType] = [axis_type for axis_type in found if axis_type is not None]
    return listed if len(listed) == len(found) else None


def _type_of_view(view: torch.Tensor, parts: Parts) -> AnyAxisType | None:
    """Return the type of a view of positions; None if it divides the dim or has part of a shard."""
    first = int(view.storage_offset())
    strides = [*enumerate(view.stride())]
    # The strides of dims of one element say nothing, unless there is no other dim.
    dims = [dim for dim, stride in strides if stride and view.shape[dim] > 1]
    dims = dims or [dim for dim, stride in strides if stride == 1]
    if len(dims) > 1:
        return None
    if not dims:
        # One element without the dim of the parts: a part that is a shard needs the dim.
        found = parts.between(first, first + 1, parts.dim)
        return found[0][1] if found is not None and found[0][1] in (R, I, V) else None
    (dim,) = dims
    if view.stride(dim) != 1:
        return None
    runs = parts.between(first, first + view.shape[dim], dim)
    return None if runs is None else joined_type(dim, runs)


def _refuse(call: LocalOperatorCall, axis: MeshAxis) -> NoReturn:
    """Raise the error about an operator that mixes parts."""
    kinds: Sequence[Any] = [operand.on(axis) for operand in call.operands]
    parts = next(axis_type for axis_type in kinds if isinstance(axis_type, Parts))
    sizes = [size for size, _ in parts.runs]
    reason = "its parts are shards of different tensors"
    if parts.is_replicated:
        reason = (
            "the gradient of an R part is a partial sum and the gradient of an I part is complete"
        )
    raise SpmdTypeError(
        f"{describe_call(call, axis)}: an operand is {parts} over {axis!r}: {reason}, and this "
        f"operator would mix them. Way out: torch.split(x, {sizes}, dim={parts.dim}) first"
    )
