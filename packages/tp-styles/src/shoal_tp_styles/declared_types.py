"""Types of the lowerings' autograd functions, by which plain SPMD code around them is checked.

A replicated activation between modules is I: its gradient is complete on every rank. A reader that
reduces its gradient makes it R. Data axes are not axes of a plan's mesh; parameters are R there.

May import: lowering, modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Spec
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, local_shard, spmd
from shoal_mesh import Comm

from .lowering import collective_functions as moves
from .lowering.parameters import DeliveredShards
from .modules.embedding import OwnRows
from .modules.linear_product import LinearProduct

AxisType = spmd.AnyAxisType


def _shard_along(dim: int, sizes: Sequence[int] | None) -> AxisType:
    """Return S(dim) for equal shards, V for others."""
    return V if sizes is not None and len({*sizes}) > 1 else Shard(dim)


def _types_of_move(move: Any, back: Any, where: Sequence[Any]) -> tuple[AxisType, AxisType]:
    """Return the types before and after a move, which its gradient's move determines."""
    if back is moves.reduce:
        return I, R
    if back is moves.unchanged:
        return P, I
    shard = _shard_along(*where[1:])
    if back is moves.split:
        return shard, I
    if back is moves.scatter:
        return shard, R
    return (I, shard) if move is moves.own_shard else (P, shard)


def _declare_move(outputs: Any, args: tuple[Any, ...]) -> None:
    tensor, move, back, where = args
    if spmd.type_of(tensor) is None:
        return
    src, dst = _types_of_move(move, back, where)
    axis = spmd.normalize_axis(where[0])
    spmd.check_source(tensor, axis, src, "a collective of a parallel module")
    spmd.set_type(outputs, spmd.moved_type(tensor, axis, dst, outputs.ndim))


def type_of_parameter(spec: Spec, partial_over: Comm | None) -> spmd.TensorType:
    """Return the type of a parameter's local shard.

    Args:
        spec: the layout of the parameter.
        partial_over: the axis along which its backward sums the ranks' gradients.
    """
    reduced = None if partial_over is None else spmd.normalize_axis(partial_over)
    by_axis: dict[spmd.MeshAxis, AxisType] = {}
    for index, placement in enumerate(spec.placements):
        name = spec.mesh.axis_names[index]
        axis = spmd.axis_over(spec.mesh.ranks_along(index), name)
        kind = spmd.type_of_placement(placement)
        if kind is R and axis != reduced:
            kind = I
        if axis.size() > 1:
            by_axis[axis] = V if kind is None or not spec.even else kind
    current = spmd.MESH.get()
    for axis in current.axes if current is not None else ():
        by_axis.setdefault(axis, R)
    return spmd.TensorType(by_axis)


def _declare_shards(outputs: Any, args: tuple[Any, ...]) -> None:
    comm, *params = args
    for output, param in zip(outputs, params, strict=True):
        if isinstance(param, DTensor):
            spmd.set_type(output, type_of_parameter(param.spec, comm))


def _declare_own_rows(outputs: Any, args: tuple[Any, ...]) -> None:
    table = args[1]
    present = spmd.type_of(table)
    tokens = spmd.type_of(args[0])
    if present is None or tokens is None:
        return
    rows = [axis for axis, kind in present.by_axis.items() if kind is Shard(0)]
    found = tokens
    for axis in rows:
        found = found.with_axis(axis, P)
    spmd.set_type(outputs, found)


def _declare_linear(outputs: Any, args: tuple[Any, ...]) -> None:
    x, weight, bias, options = args
    leaves = options.after
    present = spmd.type_of(x)
    if present is None:
        return
    entered = _entered_type(x, options.before)
    out, *token = outputs if isinstance(outputs, tuple) else (outputs,)
    features = _like(x, entered, _entered_shape(x, options.before))
    added = None if bias is None or leaves is not None else _like_parameter(bias)
    with torch.no_grad(), spmd.resumed():
        product = linear(features, _like_parameter(weight), added)
    after = spmd.type_of(product) or spmd.TensorType({})
    if leaves is not None:
        comm = leaves[0] if isinstance(leaves, tuple) else leaves
        dst = _shard_along(*leaves[1:]) if isinstance(leaves, tuple) else I
        axis = spmd.normalize_axis(comm)
        spmd.check_source(product, axis, P, "a row-wise Linear")
        after = spmd.moved_type(product, axis, dst, out.ndim)
    spmd.set_type(out, after)
    for one in token:
        spmd.set_type(one, entered)


def _entered_type(x: Tensor, enters: Any) -> spmd.TensorType:
    """Return the type of the input of the product."""
    if enters is None:
        return spmd.type_of(x) or spmd.TensorType({})
    comm = enters[0] if isinstance(enters, tuple) else enters
    axis = spmd.normalize_axis(comm)
    src = _shard_along(*enters[1:]) if isinstance(enters, tuple) else I
    spmd.check_source(x, axis, src, "a column-wise Linear")
    return spmd.moved_type(x, axis, R, x.ndim)


def _entered_shape(x: Tensor, enters: Any) -> list[int]:
    shape = [*x.shape]
    if isinstance(enters, tuple):
        comm, dim, sizes = enters
        shape[dim] = sum(sizes) if sizes is not None else shape[dim] * comm.size
    return shape


def _like(x: Tensor, tensor_type: spmd.TensorType, shape: Sequence[int]) -> Tensor:
    like = torch.empty([*shape], dtype=x.dtype, device="meta")
    spmd.set_type(like, tensor_type)
    return like


def _like_parameter(param: DTensor) -> Tensor:
    return _like(param, type_of_parameter(param.spec, None), local_shard(param).shape)


spmd.hide_frames_of(str(Path(__file__).parent))
spmd.declare_types(moves.ReversibleMove, _declare_move)
spmd.declare_types(DeliveredShards, _declare_shards)
spmd.declare_types(OwnRows, _declare_own_rows)
spmd.declare_types(LinearProduct, _declare_linear)
