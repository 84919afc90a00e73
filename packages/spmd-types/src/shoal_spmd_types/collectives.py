"""Collectives of typed tensors: the source and destination types select the gradient.

The first line of each docstring has these types along one axis: `P -> R` is from P to R.

May import: conversions, moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd

from .conversions import convert, finish
from .moves.dtypes import read_dtypes, with_async
from .moves.line import Line, line_along
from .moves.moves import TypeStep, move

AxisType = spmd.AnyAxisType


def all_reduce(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = P,
    dst: AxisType,
    inplace: bool = False,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`P -> R`, backward `P -> R`; or `P -> I`, backward `I -> R`: sum the ranks' tensors.

    Args:
        x: this rank's addend, which has the same shape on all ranks.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: P, or V, which counts as P. On a local axis a tensor of type V is accepted for P. The
            type of another pending reduction, such as `pending("max")`, is reduced by its own
            operator; such a tensor has no gradient.
        dst: R if each rank continues with a computation of its own, I if all ranks continue with
            the same computation.
        inplace: whether the sum is written to `x`; it is complete on return.
        op_dtype: the dtype of the sum; the result keeps it if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: whether the collective may still run when its result is returned; the first
            operator on the result waits for it. Before that, `x` must not be written to.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        The sum, equal on all ranks.

    Raises:
        ArgumentValueError: for other types, `inplace` with dtypes, or a missing backward dtype.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh), typecheck():
        ...     x = assert_type(torch.zeros(2, device="meta"), {"tp": P})
        ...     get_local_type(all_reduce(x, "tp", dst=R))
        {tp: R}
    """
    line = line_along(axis)
    reduce_op = getattr(src, "reduce_op", "") or "sum"
    if not (src is V or getattr(src, "name", "") == "P"):
        raise ArgumentValueError(
            f"all_reduce: src must be P or V, got {src}. Summing {line.size} equal tensors "
            f"multiplies the tensor by {line.size}; if this is intended, call reinterpret(x, "
            f"axis, src={src}, dst=P) first"
        )
    if dst not in (R, I):
        raise ArgumentValueError(f"all_reduce: dst must be R or I, got {dst}")
    if inplace and (op_dtype is not None or out_dtype is not None):
        raise ArgumentValueError(
            "all_reduce: inplace=True writes to x, so it cannot be combined with dtypes"
        )
    if reduce_op != "sum" and x.requires_grad and torch.is_grad_enabled():
        raise ArgumentValueError(
            f"all_reduce: the reduction {reduce_op!r} is not differentiable; pass x.detach()"
        )
    _check_source(x, line, src, "all_reduce")
    step = TypeStep("all_reduce", reduce_op=reduce_op, in_place=inplace)
    back = TypeStep("all_reduce" if dst is R else "keep")
    steps = (step, back)
    dtypes = read_dtypes(steps, op_dtype, out_dtype, backward_options)
    moved = move(x, line, with_async(steps, async_op, backward_options), dtypes)
    return finish(moved, x, line.axis, dst)


def all_gather(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = V,
    dst: AxisType,
    gather_dim: int | None = None,
    split_sizes: Sequence[int] | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`S(i) -> R`, backward `P -> S(i)`; or `S(i) -> I`, backward `I -> S(i)`: gather shards.

    From V, the ranks' tensors are stacked in a new dim.

    Args:
        x: this rank's shard.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: S(i) joins the shards along dim i; V stacks them.
        dst: R if each rank continues with a computation of its own, I if all ranks continue with
            the same computation.
        gather_dim: the dim; with S(i) it is i, with V it is 0 if left out.
        split_sizes: sizes of the ranks' shards along dim i, if they are not equal; only with S(i).
        op_dtype: the dtype that is sent; the result keeps it if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: whether the collective may still run when its result is returned; the first
            operator on the result waits for it. Before that, `x` must not be written to.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        The shards of all ranks.

    Raises:
        ArgumentValueError: for other types, a dim that contradicts them, or a missing backward
            dtype; on one rank, for a split size other than the size of `x`.
        CollectiveError: on several ranks, if `split_sizes` do not fit the ranks or the shard of
            this rank.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     all_gather(torch.zeros(2, 3, device="meta"), "tp", src=S(1), dst=R).shape
        torch.Size([2, 12])
    """
    line = line_along(axis)
    if dst not in (R, I):
        raise ArgumentValueError(f"all_gather: dst must be R or I, got {dst}")
    stacks = src is V
    ndim = x.ndim + 1 if stacks else x.ndim
    dim = _dim_of("all_gather: src", src, gather_dim, ndim)
    sizes = _read_sizes("all_gather", "src", src, split_sizes)
    _check_source(x, line, src, "all_gather")
    step = TypeStep("all_gather", dim, stacks, sizes=sizes)
    back = TypeStep("reduce_scatter" if dst is R else "slice", dim, stacks, sizes=sizes)
    steps = (step, back)
    dtypes = read_dtypes(steps, op_dtype, out_dtype, backward_options)
    moved = move(x, line, with_async(steps, async_op, backward_options), dtypes)
    return finish(moved, x, line.axis, dst)


def reduce_scatter(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = P,
    dst: AxisType = V,
    scatter_dim: int | None = None,
    split_sizes: Sequence[int] | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`P -> S(i)`, backward `S(i) -> R`: sum the ranks' tensors, and return this rank's shard.

    With V as destination, the dim has one entry for each rank. The result is this rank's entry, and
    does not have the dim.

    Args:
        x: this rank's addend, which has the same shape on all ranks.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: P, or V, which counts as P.
        dst: S(i) shards dim i; V takes one entry of a dim that has one entry for each rank.
        scatter_dim: the dim; with S(i) it is i, with V it is 0 if left out.
        split_sizes: sizes of the ranks' shards along dim i, if they are not equal; only with S(i).
        op_dtype: the dtype of the sum; the result keeps it if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: whether the collective may still run when its result is returned; the first
            operator on the result waits for it. Before that, `x` must not be written to.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        This rank's shard of the sum.

    Raises:
        ArgumentValueError: for other types, a dim that contradicts them or does not divide; on one
            rank or without memory, for split sizes that do not fit the ranks and `x`.
        CollectiveError: on several ranks, if `split_sizes` do not fit the ranks and `x`.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     reduce_scatter(torch.zeros(8, 3, device="meta"), "tp", dst=S(0)).shape
        torch.Size([2, 3])
    """
    line = line_along(axis)
    if src not in (P, V):
        raise ArgumentValueError(
            f"reduce_scatter: src must be P or V, got {src}. Summing {line.size} equal tensors "
            f"multiplies the tensor by {line.size}; if this is intended, call reinterpret(x, "
            f"axis, src={src}, dst=P) first"
        )
    dim = _dim_of("reduce_scatter: dst", dst, scatter_dim, x.ndim)
    sizes = _read_sizes("reduce_scatter", "dst", dst, split_sizes)
    stacks = dst is V
    if stacks and x.shape[dim] != line.size:
        raise ArgumentValueError(
            f"reduce_scatter to V: dim {dim} of {tuple(x.shape)} must have exactly one entry for "
            f"each of {line.size} ranks; use dst=S({dim}) for several"
        )
    _check_source(x, line, src, "reduce_scatter")
    step = TypeStep("reduce_scatter", dim, stacks, sizes=sizes)
    back = TypeStep("all_gather", dim, stacks, sizes=sizes)
    steps = (step, back)
    dtypes = read_dtypes(steps, op_dtype, out_dtype, backward_options)
    moved = move(x, line, with_async(steps, async_op, backward_options), dtypes)
    return finish(moved, x, line.axis, _type_for_sizes(dst, sizes))


def all_to_all(  # noqa: PLR0913  # the public package's arguments
    x: Tensor,
    axis: Any,
    *,
    src: AxisType = V,
    dst: AxisType = V,
    split_dim: int | None = None,
    concat_dim: int | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """`S(i) -> S(j)`, backward `S(j) -> S(i)`: move the sharding from one dim to another.

    From V to V, entry j of a dim goes to rank j, and the received entries are stacked along the
    concat dim.

    Args:
        x: this rank's shard.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: S(i), or V.
        dst: S(j), or V.
        split_dim: the dim that is split: j for S(i) -> S(j), otherwise 0 if left out.
        concat_dim: the dim along which blocks are joined: i for S(i) -> S(j), otherwise 0 if left
            out.
        output_split_sizes: the numbers of rows that each rank sends to this rank; for S(0) -> S(0)
            only.
        input_split_sizes: the numbers of rows that this rank sends to each rank; for S(0) -> S(0)
            only.
        op_dtype: the dtype that is sent; the result keeps it if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: whether the collective may still run when its result is returned; the first
            operator on the result waits for it. Before that, `x` must not be written to.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        The blocks that all ranks sent to this one, joined in the order of the ranks.

    Raises:
        ArgumentValueError: for other types, or dims that contradict them or do not divide.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     all_to_all(torch.zeros(2, 8, device="meta"), "tp", src=S(0), dst=S(1)).shape
        torch.Size([8, 2])
    """
    line = line_along(axis)
    for name, axis_type in (("src", src), ("dst", dst)):
        if axis_type is not V and not isinstance(axis_type, Shard):
            raise ArgumentValueError(f"all_to_all: {name} must be V or S(i), got {axis_type}")
    is_uneven = output_split_sizes is not None or input_split_sizes is not None
    if is_uneven and (src is not Shard(0) or dst is not Shard(0)):
        raise ArgumentValueError(
            f"all_to_all: split sizes need src=S(0) and dst=S(0), got {src} and {dst}"
        )
    _check_source(x, line, src, "all_to_all")
    exchanges_rows = is_uneven
    if src is dst and isinstance(src, Shard):
        exchanges_rows = is_uneven or src.resolve(x.ndim).dim == 0
    if exchanges_rows:
        steps = _uneven_exchange(x, line, input_split_sizes, output_split_sizes)
        after: AxisType = V
    else:
        first, second = _exchange_dims(x.ndim, (src, dst), split_dim, concat_dim)
        step = TypeStep("all_to_all", first, concat_dim=second)
        back = TypeStep("all_to_all", second, concat_dim=first)
        steps = (step, back)
        after = dst
    dtypes = read_dtypes(steps, op_dtype, out_dtype, backward_options)
    moved = move(x, line, with_async(steps, async_op, backward_options), dtypes)
    return finish(moved, x, line.axis, after)


def _uneven_exchange(
    x: Tensor, line: Line, sent: Sequence[int] | None, received: Sequence[int] | None
) -> tuple[TypeStep, TypeStep]:
    """Return the steps that exchange rows between all ranks, and exchange their gradients back."""
    row_count = x.shape[0]
    even = (row_count // line.size,) * line.size
    outgoing = tuple(sent) if sent is not None else even
    incoming = tuple(received) if received is not None else even
    for name, sizes in (("input_split_sizes", outgoing), ("output_split_sizes", incoming)):
        if len(sizes) != line.size:
            raise ArgumentValueError(
                f"all_to_all: {name} must have one entry for each of {line.size} ranks, got {sizes}"
            )
    total = sum(outgoing)
    if total != row_count:
        raise ArgumentValueError(
            f"all_to_all: input_split_sizes {outgoing} add up to {total}, but x has {row_count} "
            "rows"
        )
    step = TypeStep("all_to_all", sizes=outgoing, received=incoming)
    back = TypeStep("all_to_all", sizes=incoming, received=outgoing)
    return step, back


def _exchange_dims(
    ndim: int, types: tuple[AxisType, AxisType], split_dim: int | None, concat_dim: int | None
) -> tuple[int, int]:
    """Return the dim that is split and the dim along which blocks are joined."""
    src, dst = types
    src_dim = src.resolve(ndim).dim if isinstance(src, Shard) else None
    dst_dim = dst.resolve(ndim).dim if isinstance(dst, Shard) else None
    if src_dim is not None and dst_dim is not None:
        split = dst_dim
        concat = src_dim
    else:
        split = _or_zero(split_dim, ndim) if src_dim is None else src_dim
        concat = _or_zero(concat_dim, ndim) if dst_dim is None else dst_dim
    _require_dim(f"all_to_all {src} -> {dst}: split_dim", split_dim, split, ndim)
    _require_dim(f"all_to_all {src} -> {dst}: concat_dim", concat_dim, concat, ndim)
    return split, concat


def _require_dim(name: str, dim: int | None, expected: int, ndim: int) -> None:
    """Raise an ArgumentValueError for a dim that contradicts the types."""
    if dim is not None and dim % ndim != expected:
        raise ArgumentValueError(f"{name} must be {expected}, got {dim}; leave it out")


def _or_zero(dim: int | None, ndim: int) -> int:
    return 0 if dim is None else dim % ndim


def redistribute(  # noqa: PLR0913  # the public package's arguments
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
    """`src -> dst`: change the type and keep the meaning, by a collective if one is needed.

    The backward is the backward of the collective or conversion that this function calls.

    Args:
        x: this rank's tensor.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: the type that the tensor has.
        dst: the type that the result has.
        op_dtype: the dtype of the move; the result keeps it if `out_dtype` is left out.
        out_dtype: the dtype of the result.
        async_op: whether the collective may still run when its result is returned; the first
            operator on the result waits for it. Before that, `x` must not be written to.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        A tensor with the same meaning and the type `dst`.

    Raises:
        ArgumentValueError: if no move leads from `src` to `dst`.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     redistribute(torch.zeros(2, 3, device="meta"), "tp", src=S(0), dst=R).shape
        torch.Size([8, 3])
    """
    options: dict[str, Any] = {
        "op_dtype": op_dtype,
        "out_dtype": out_dtype,
        "async_op": async_op,
        "backward_options": backward_options,
    }
    is_varying = isinstance(src, Shard) or src is V
    becomes_varying = isinstance(dst, Shard) or dst is V
    if is_varying and dst in (R, I):
        return all_gather(x, axis, src=src, dst=dst, **options)
    if isinstance(src, Shard) and isinstance(dst, Shard) and src is not dst:
        return all_to_all(x, axis, src=src, dst=dst, **options)
    if src is P and dst in (R, I):
        return all_reduce(x, axis, src=src, dst=dst, **options)
    if src is P and becomes_varying:
        return reduce_scatter(x, axis, src=src, dst=dst, **options)
    return convert(x, axis, src=src, dst=dst, expert_mode=True, **options)


def unshard(  # noqa: PLR0913  # the public package's arguments
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
    """`S(i) -> R` or `S(i) -> I`: `all_gather` of shards, under the name of its purpose.

    Args:
        x: this rank's shard.
        axis: the mesh axis: a process group, or a name of the current mesh.
        src: S(i).
        dst: R or I.
        op_dtype: the dtype that is sent.
        out_dtype: the dtype of the result.
        async_op: whether the collective may still run when its result is returned; the first
            operator on the result waits for it. Before that, `x` must not be written to.
        backward_options: dtypes and `async_op` of the gradient's move.

    Returns:
        The shards of all ranks, joined along dim i.

    Raises:
        ArgumentValueError: for other types.
        SpmdTypeError: while types are checked, if `x` is not of type `src`.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> with set_current_mesh(mesh):
        ...     unshard(torch.zeros(2, device="meta"), "tp", src=S(0), dst=I).shape
        torch.Size([8])
    """
    if not isinstance(src, Shard):
        raise ArgumentValueError(f"unshard: src must be S(i), got {src}")
    return all_gather(
        x,
        axis,
        src=src,
        dst=dst,
        op_dtype=op_dtype,
        out_dtype=out_dtype,
        async_op=async_op,
        backward_options=backward_options,
    )


def _check_source(x: Tensor, line: Line, src: AxisType, call: str) -> None:
    """Compare the tensor's type with the source type.

    In a reduction, V is accepted for P along a local axis.
    """
    if not spmd.is_type_checking():
        return
    if spmd.type_of(x) is None and not spmd.is_strict():
        return
    present = spmd.type_of(x)
    axis_type = None if present is None else present.local.get(line.axis)
    if src is P and axis_type is V and spmd.varying_axes()(line.axis):
        # along a local axis ranks compute on their own, so any tensors may be addends
        return
    spmd.check_source(x, line.axis, src, call)


def _dim_of(call: str, axis_type: AxisType, dim: int | None, ndim: int) -> int:
    """Return the dim of a gather or scatter: the dim of S(i), or the given dim or 0 for V."""
    if isinstance(axis_type, Shard):
        wanted = axis_type.resolve(ndim).dim
        if dim is not None and dim % ndim != wanted:
            raise ArgumentValueError(f"{call} is {axis_type}, which contradicts the dim {dim}")
        return wanted
    if axis_type is not V:
        raise ArgumentValueError(f"{call} must be V or S(i), got {axis_type}")
    return _or_zero(dim, ndim)


def _read_sizes(
    call: str, name: str, axis_type: AxisType, sizes: Sequence[int] | None
) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if not isinstance(axis_type, Shard):
        raise ArgumentValueError(f"{call}: split_sizes need {name}=S(i), got {axis_type}")
    return tuple(sizes)


def _type_for_sizes(dst: AxisType, sizes: tuple[int, ...] | None) -> AxisType:
    """Return V for shards of different sizes, because the checker takes S(i) for equal shards."""
    if sizes is None:
        return dst
    are_equal = len({*sizes}) <= 1
    return dst if are_equal else V
