"""Types of the results of operators on replicated tensors whose parts are R and I (see `Parts`).

A `cat` joins R and I operands to such a tensor. Views take it apart again, and operators on each
element keep the parts. Every other operator would mix gradients that are partial with gradients
that are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import ShoalTensorError, SpmdTypeError
from ..layout.tensor_meta import mapped
from ..rules.language.op_call import schema_of
from .axis_types import AnyAxisType, AxisType, I, Parts, R, joined_type
from .declared import tensors_in
from .mesh_axes import MeshAxis
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
    has_parts = any(isinstance(kind, Parts) for kind in kinds)
    joins = call.op is _CAT and kinds >= {R, I}
    if not has_parts and not joins:
        return None
    deciding = {operand.on(axis) for operand in typed if operand.takes_gradient}
    are_replicated = all(kind in (R, I) or isinstance(kind, Parts) for kind in kinds)
    if are_replicated and len(deciding) <= 1 and not any(map(_has_parts, deciding)):
        # Without a gradient, parts of different types have equal values like R.
        return [next(iter(deciding), R)] * len(call.outputs)
    found = _types_of_results(call, axis) if are_replicated else None
    if found is not None:
        return found
    return None if not has_parts else _refuse(call, axis)


def _has_parts(kind: AnyAxisType) -> bool:
    return isinstance(kind, Parts)


def _types_of_results(call: LocalOperatorCall, axis: MeshAxis) -> list[AnyAxisType] | None:
    """Return the types of the outputs of an operator that keeps parts apart; None for others."""
    typed = [operand for operand in call.operands if operand.tensor_type is not None]
    if call.op is _CAT:
        joined = _type_of_concatenation(call, axis)
        if joined is not None:
            return [joined]
    if len(typed) == 1 and schema_of(call.op).is_view:
        return _types_of_views(call, typed[0], axis)
    kinds = {operand.on(axis) for operand in typed}
    shapes = {operand.meta.shape for operand in typed} | {output.shape for output in call.outputs}
    along_other_dims = call.op is _CAT and _concatenated_dim(call) != _dim_of_parts(kinds)
    is_elementwise = call.op in _COPIES or torch.Tag.pointwise in call.op.tags
    if len(kinds) == 1 and (along_other_dims or (is_elementwise and len(shapes) == 1)):
        return [*kinds] * len(call.outputs)
    return None


def _dim_of_parts(kinds: Iterable[AnyAxisType]) -> int:
    """Return the dim of the first type with parts."""
    return next(kind.dim for kind in kinds if isinstance(kind, Parts))


def _type_of_concatenation(call: LocalOperatorCall, axis: MeshAxis) -> AxisType | None:
    """Return the type of a `cat` along the dim of the parts; None if they are along another dim."""
    dim = _concatenated_dim(call)
    runs: list[tuple[int, AxisType]] = []
    for operand in call.operands:
        kind = operand.on(axis)
        if isinstance(kind, Parts) and kind.dim == dim:
            runs.extend(kind.runs)
        elif kind in (R, I) and isinstance(kind, AxisType):
            runs.append((operand.meta.shape[dim], kind))
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
    positions = torch.arange(shape[parts.dim]).as_strided(shape, strides)
    args, kwargs = mapped((call.args, {**call.kwargs}), Operand, lambda _: positions)
    try:
        views = tensors_in(call.op(*args, **kwargs))
    except (ShoalTensorError, RuntimeError):
        return None
    found = [_type_of_view(view, parts) for view in views]
    listed: list[AnyAxisType] = [kind for kind in found if kind is not None]
    return listed if len(listed) == len(found) else None


def _type_of_view(view: torch.Tensor, parts: Parts) -> AxisType | None:
    """Return the type of a view of positions; None if it divides their dim, or skips positions."""
    first = int(view.storage_offset())
    dims = [dim for dim, stride in enumerate(view.stride()) if stride and view.shape[dim] > 1]
    if not dims:
        return joined_type(0, parts.between(first, first + 1))
    if len(dims) > 1 or view.stride(dims[0]) != 1:
        return None
    (dim,) = dims
    return joined_type(dim, parts.between(first, first + view.shape[dim]))


def _refuse(call: LocalOperatorCall, axis: MeshAxis) -> NoReturn:
    """Raise the error about an operator that mixes parts."""
    kinds: Sequence[Any] = [operand.on(axis) for operand in call.operands]
    parts = next(kind for kind in kinds if isinstance(kind, Parts))
    sizes = [size for size, _ in parts.runs]
    raise SpmdTypeError(
        f"{describe_call(call, axis)}: an operand is {parts} over {axis!r}: the gradient of the R "
        "part is a partial sum and the gradient of the I part is complete, and this operator "
        f"would mix them. Way out: torch.split(x, {sizes}, dim={parts.dim}) first"
    )
