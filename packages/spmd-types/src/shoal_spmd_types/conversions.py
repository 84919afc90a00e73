"""Changes of the type that send nothing in the forward: `convert` and `reinterpret`.

The types are R (equal on all ranks), I (equal, and used alike on all ranks), V (may differ), P
(addends of a pending sum) and S(i) (shards along dim i); see `shoal_dtensor.spmd.types.axis_types`.

May import: moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd

from .moves.dtypes import read_dtypes, with_async
from .moves.line import Line, line_along
from .moves.moves import Kind, TypeStep, move

AxisType = spmd.AnyAxisType
# the changes of `convert` that need `expert_mode`, and the reasons; V includes S(i)
_FOR_EXPERTS = {
    (
        "R",
        "I",
    ): "the gradient of R is partial, and the backward would keep it on the first rank only",
    (
        "I",
        "P",
    ): "the values of all ranks but the first become zero; this is the backward of convert(R, I)",
    ("V", "P"): "the shard is padded with zeros; this is the backward of convert(R, V)",
}
# the same for `reinterpret`, which keeps the bytes
_FOR_EXPERTS_OF_BYTES = {
    ("R", "I"): "use convert for a change of meaning",
    ("I", "R"): "use convert(I, R), which keeps the meaning",
    (
        "R",
        "P",
    ): "the result means the tensor times the number of ranks; convert(R, P) keeps the meaning",
    ("R", "V"): "every rank has the whole tensor; convert(R, S(i)) shards it",
}

# The steps of the gradients of `reinterpret`, by the source and the target type.
_GRADIENTS_OF_BYTES = {
    ("R", "I"): TypeStep("keep_first"),
    ("R", "V"): TypeStep("keep"),
    ("R", "P"): TypeStep("keep"),
    ("V", "P"): TypeStep("keep"),
    ("I", "R"): TypeStep("all_reduce"),
    ("I", "V"): TypeStep("all_reduce"),
    ("I", "P"): TypeStep("all_reduce"),
}


def _needs_expert_mode(refusal: str, reason: str) -> ArgumentValueError:
    return ArgumentValueError(f"{refusal}: {reason}. Pass expert_mode=True if it is intended")


def convert(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType,
    dst: AxisType,
    expert_mode: bool = False,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`src -> dst`: change the type and keep the meaning, without communication in the forward.

    The changes, and their gradients:

    - I -> R: the same values; gradient: all_reduce to I
    - R -> I: the same values; gradient: zero except on the first rank
    - R -> S(i), R -> V: this rank's shard; gradient: the gradient padded with zeros
    - I -> S(i), I -> V: this rank's shard; gradient: all_gather to I
    - R -> P: zero except on the first rank; gradient: zero except on the first rank
    - I -> P: zero except on the first rank; gradient: the same values
    - S(i) -> P, V -> P: padded with zeros; gradient: this rank's shard

    Args:
        x: this rank's tensor.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: the type that the tensor has.
        dst: the type that the result has. If it is V, dim 0 of `x` has one entry per rank. The
            result is this rank's entry, without the dim.
        expert_mode: whether R -> I, I -> P, V -> P and S(i) -> P are allowed, which forwards rarely
            need.
        op_dtype: the dtype of the conversion; the result keeps it if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: accepted; nothing is sent in the forward.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        A tensor with the same meaning and the type `dst`.

    Raises:
        ArgumentValueError: if the change needs a collective, or needs `expert_mode`.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     convert(torch.zeros(8, 3, device="meta"), "tp", src=R, dst=S(0)).shape
        torch.Size([2, 3])
    """
    # the ranks along the axis
    line = line_along(axis)
    kinds = (spmd.local_type(src).name, spmd.local_type(dst).name)
    if kinds in _FOR_EXPERTS and not expert_mode:
        refusal = f"convert({src}, {dst}) is rarely intended in a forward"
        raise _needs_expert_mode(refusal, _FOR_EXPERTS[kinds])
    _check_source(x, line, src, "convert")
    if src is dst:
        return x
    steps = _conversion(src, dst, x.ndim)
    if steps is None:
        raise ArgumentValueError(
            f"convert({src}, {dst}) needs communication: use {_collective_for(src, dst)}, or "
            "redistribute"
        )
    dtypes = read_dtypes(steps, op_dtype, out_dtype, backward_options)
    moved = move(x, line, with_async(steps, async_op, backward_options), dtypes)
    return finish(moved, x, line.axis, dst)


def _conversion(src: AxisType, dst: AxisType, ndim: int) -> tuple[TypeStep, TypeStep] | None:
    """Return the steps of a conversion and of its gradient; None if it needs communication."""
    keep = TypeStep("keep")
    first = TypeStep("keep_first")
    if (src, dst) == (I, R):
        return keep, TypeStep("all_reduce")
    if (src, dst) == (R, I):
        return keep, first
    if dst is P and src in (R, I):
        gradient_step = first if src is R else keep
        return first, gradient_step
    if src in (R, I) and spmd.local_type(dst) is V:
        # A tensor of type V does not have the dim (`TypeStep.stacks`); a shard S(i) has it.
        stacks = dst is V
        dim = dst.resolve(ndim).dim if isinstance(dst, Shard) else 0
        back: Kind = "pad" if src is R else "all_gather"
        return TypeStep("slice", dim, stacks), TypeStep(back, dim, stacks)
    if dst is P and spmd.local_type(src) is V:
        stacks = src is V
        dim = src.resolve(ndim).dim if isinstance(src, Shard) else 0
        return TypeStep("pad", dim, stacks), TypeStep("slice", dim, stacks)
    return None


def _collective_for(src: AxisType, dst: AxisType) -> str:
    """Return the name of the collective that changes one type into another."""
    if src is P:
        return "all_reduce" if dst in (R, I) else "reduce_scatter"
    return "all_gather" if dst in (R, I) else "all_to_all"


def reinterpret(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType,
    dst: AxisType,
    expert_mode: bool = False,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`src -> dst`: change the type and keep the bytes; the meaning may change.

    The meaning of a tensor is the global value that its type and the tensors of all ranks stand
    for. For example, the meaning of P is the sum of the ranks' tensors.

    The changes, and their gradients:

    - V -> P: the meaning becomes the sum of the ranks' tensors; gradient: the same bytes, R -> V
    - R -> V: gradient: the same bytes, V -> P
    - R -> P: gradient: the same bytes, R -> P
    - I -> R, I -> V, I -> P: gradient: all_reduce to I
    - R -> I: gradient: zero except on the first rank

    Args:
        x: this rank's tensor.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: R, I, V or P: the type that the tensor has.
        dst: R, I, V or P: the type that the result has.
        expert_mode: whether R -> I, I -> R, R -> V and R -> P are allowed, which forwards rarely
            need.
        op_dtype: the dtype of the result if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: accepted; nothing is sent in the forward.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        A tensor with the same bytes and the type `dst`.

    Raises:
        ArgumentValueError: if `src` or `dst` is S(i); for a change that is not listed above, such
            as V -> R, whose result may not have the values that `dst` promises; or if the change
            needs `expert_mode`.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh), typecheck():
        ...     x = assert_type(torch.zeros(2, device="meta"), {"tp": V})
        ...     get_local_type(reinterpret(x, "tp", src=V, dst=P))
        {tp: P}
    """
    line = line_along(axis)
    if isinstance(src, Shard) or isinstance(dst, Shard):
        raise ArgumentValueError(
            "reinterpret keeps the bytes and does not accept S(i): pass V, or use convert, which "
            f"keeps the meaning; got {src} and {dst}"
        )
    kinds = (spmd.local_type(src).name, spmd.local_type(dst).name)
    if kinds in _FOR_EXPERTS_OF_BYTES and not expert_mode:
        refusal = f"reinterpret({src}, {dst}) is rarely intended"
        raise _needs_expert_mode(refusal, _FOR_EXPERTS_OF_BYTES[kinds])
    _check_source(x, line, src, "reinterpret")
    if src is dst:
        return x
    back = _GRADIENTS_OF_BYTES.get(kinds)
    if back is None:
        raise ArgumentValueError(
            f"reinterpret({src}, {dst}) would claim more about the values than {src} guarantees; "
            f"use {_collective_for(src, dst)}"
        )
    steps = (TypeStep("keep"), back)
    dtypes = read_dtypes(steps, op_dtype, out_dtype, backward_options)
    moved = move(x, line, with_async(steps, async_op, backward_options), dtypes)
    return finish(moved, x, line.axis, dst)


def shard(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType,
    dst: AxisType,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`R -> S(i)` or `I -> S(i)`: return this rank's shard of a tensor, as `convert` does.

    Args:
        x: the whole tensor, equal on all ranks.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: R or I.
        dst: S(i).
        op_dtype: the dtype of the result if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: accepted; nothing is sent in the forward.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        This rank's shard along dim i.

    Raises:
        ArgumentValueError: for other types, or a dim that does not divide.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     shard(torch.zeros(8, 3, device="meta"), "tp", src=I, dst=S(0)).shape
        torch.Size([2, 3])
    """
    if not isinstance(dst, Shard):
        raise ArgumentValueError(f"shard: dst must be S(i), got {dst}")
    return convert(
        x,
        axis,
        src=src,
        dst=dst,
        op_dtype=op_dtype,
        out_dtype=out_dtype,
        async_op=async_op,
        backward_options=backward_options,
    )


def invariant_to_replicate(
    x: Tensor,
    axis: Any,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`I -> R`, backward `P -> I`: `convert(I, R)`, Megatron's copy to the parallel region.

    Args:
        x: this rank's tensor, equal on all ranks.
        axis: the mesh axis: a process group, or a name of the current mesh.
        op_dtype: the dtype of the result if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: accepted; nothing is sent in the forward.
        backward_options: dtypes of the gradient's sum.

    Returns:
        The tensor; its gradient is summed over the ranks.

    Raises:
        ArgumentValueError: if `op_dtype` or `out_dtype` is a dtype other than float32, and
            `backward_options` does not have the dtype of the gradient's sum (`op_dtype`).
        SpmdTypeError: while types are checked, if `x` is not I.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh), typecheck():
        ...     x = assert_type(torch.zeros(2, device="meta"), {"tp": I})
        ...     get_local_type(invariant_to_replicate(x, "tp"))
        {tp: R}
    """
    return convert(
        x,
        axis,
        src=I,
        dst=R,
        op_dtype=op_dtype,
        out_dtype=out_dtype,
        async_op=async_op,
        backward_options=backward_options,
    )


def _check_source(x: Tensor, line: Line, src: AxisType, call: str) -> None:
    """Raise SpmdTypeError, while types are checked, if a tensor is not of type `src`."""
    if not spmd.is_type_checking():
        return
    if spmd.type_of(x) is not None or spmd.is_strict():
        spmd.check_source(x, line.axis, src, call)


def finish(result: Tensor, x: Tensor, axis: spmd.MeshAxis, dst: AxisType) -> Tensor:
    """Give the result of a move its type, and return it.

    Args:
        result: the result.
        x: the tensor before the move.
        axis: the axis.
        dst: the type after the move.
    """
    if spmd.is_type_checking() and spmd.type_of(x) is not None:
        after = spmd.moved_type(x, axis, dst, result.ndim)
        spmd.set_type(result, after)
    return result
