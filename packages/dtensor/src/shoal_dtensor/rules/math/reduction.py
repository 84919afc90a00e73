"""Sharding of reductions and of softmax and its like, on one mesh axis.

A dim that is kept stays sharded. Sharding a reduced dim leaves a partial value where the reduction
has a partial form. A mean over even shards is the average of their means. Uneven means, variances,
log-sum-exp and softmax finish with one or two all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import sums_are_in_tree

from ...errors import OperatorArgumentError
from ...layout.spec import Spec
from ...redistribute.execution.reduced_values import identity_of
from ..language.local_ops import (
    all_reduce_traffic,
    all_reduced,
    along_dim,
    keepdim_shape,
    mean_of_sums,
    mean_rows,
    sharding_axes,
    where_sharded,
    wide_bytes_of,
    wide_dtype,
)
from ..language.notation import rows_sharded_alike
from ..language.rule import (
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    Traffic,
    family,
)

RowsOfCall = Callable[[OpCall], Iterable[Row]]


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """Return the dims that the call reduces."""
    if call.get("dim") == [] and not call.get("keepdim"):
        keeps_all_dims = call.outputs[0].ndim == call.tensors[0].ndim
        if keeps_all_dims:
            return ()
    return call.dims()


by_reduced_dims = partial(where_sharded, dims=reduced_dims)


def rows_along(
    call: OpCall,
    result: Entry | None,
    traffic: Traffic | None = None,
    *,
    ordered: bool = False,
    **results: Entry,
) -> Iterator[Row]:
    """Yield one row per input dim; a dim that the call works along gives `result`.

    If `result` is None, the dims that the call works along have no row.
    """
    dims = reduced_dims(call)
    ndim = call["self"].ndim
    keeps = call.outputs[0].ndim == ndim
    for d in range(ndim):
        if d in dims:
            if result is not None:
                yield call.row(results, self=S(d), out=result, traffic=traffic, ordered=ordered)
            continue
        removed = 0 if keeps else sum(other < d for other in dims)
        yield call.row(self=S(d), out=S(d - removed))


def comparing(rows: RowsOfCall) -> RowsOfCall:
    """Return rows of an operator that compares, for numbers that have an order.

    Kernels refuse complex numbers, except in an empty shard. Without rows every rank has the global
    tensor, so that all ranks raise the error.
    """

    def rows_of_ordered(call: OpCall) -> Iterator[Row]:
        if not call["self"].dtype.is_complex:
            yield from rows(call)

    return rows_of_ordered


def _extreme(op: str) -> Rule:
    """Return the rule of a maximum or minimum."""
    return Rule(comparing(_reduction(op, op).rows), skip_empty=True, sizes=())


def _reduction(op: str, *passed: str) -> Rule:
    """Return the rule of a reduction whose result is `P(op)` if a reduced dim is sharded.

    Inputs that are partial by one of the reductions `passed` give results that are partial alike.
    """

    def rows(call: OpCall) -> Iterator[Row]:
        # No collective multiplies complex numbers.
        multiplies_complex = op == "product" and call.outputs[0].dtype.is_complex
        yield from rows_along(call, None if multiplies_complex else P(op))
        yield from call.keeping_partials("self", ops=passed)

    return Rule(rows, sizes=())


def _count(local_call: LocalCall) -> int:
    """Return the number of global elements that are reduced to one result."""
    shape = local_call.inputs[0].shape
    return prod(shape[dim] for dim in reduced_dims(local_call.call))


def mean(call: OpCall) -> Iterator[Row]:
    for row in rows_along(call, P("sum")):
        if row.outputs[0] is P("sum"):
            yield from mean_rows(call, row)
        else:
            yield row


@by_reduced_dims
def _mean(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction | None:
    """Run the operator itself on even shards; for uneven ones, add up local sum / global count."""
    dims = list(reduced_dims(local_call.call))
    count = _count(local_call)
    partials = local_call.outputs[0].partials
    if all((axis, "avg") in partials for axis in axes):
        return None
    keepdim = bool(local_call.call.get("keepdim", False))
    dtype = wide_dtype(local_call.outputs[0].dtype)
    finish = mean_of_sums(local_call, axes)

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        total = torch.sum(x, dims, keepdim, dtype=dtype)
        return finish(total / count)

    return run


def var(call: OpCall) -> Iterator[Row]:
    """Yield rows of variances and `logsumexp`, with two all-reduces.

    They are not left partial, because `to_local` would show a rank's part as if it were the result.
    """
    has_no_maximum = "logsumexp" in call.op.__name__ and call.outputs[0].dtype.is_complex
    result = None if has_no_maximum else R
    yield from rows_along(call, result, lambda ranks: 2 * wide_bytes_of(*call.outputs))


def variance(call: OpCall) -> Iterator[Row]:
    """Yield rows of variances; no kernel takes integers, so all ranks raise its error."""
    dtype = call["self"].dtype
    if dtype.is_floating_point or dtype.is_complex:
        yield from var(call)


@by_reduced_dims
def _var(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Compute (sum over shards of (x - mean) ** 2) / divisor, with the global mean, or its root."""
    call = local_call.call
    count = _count(local_call)
    dims = list(reduced_dims(local_call.call))
    removed_dims = () if call.get("keepdim") else tuple(dims)
    # The divisor is the count minus the correction, which is 1 by default.
    correction = call.get("correction", call.get("unbiased"))
    fewer = 1.0 if correction is None else float(correction)
    divisor = max(count - fewer, 0.0)
    is_deviation = "std" in call.op.__name__
    with_mean = len(local_call.outputs) == 2

    dtype = local_call.outputs[0].dtype
    wide = wide_dtype(dtype)

    def run(x: Tensor, *_: Any, **__: Any) -> Any:
        mean_dtype = x.dtype
        # The variance of complex numbers is real, and their mean is complex.
        if not x.is_complex():
            x = x.to(wide)
        mean = all_reduced(x.sum(dims, keepdim=True), spec, axes) / count
        square = _squared_size(x - mean)
        total = all_reduced(square.sum(dims, keepdim=True), spec, axes)
        zero = torch.zeros((), dtype=total.dtype, device=total.device)
        variance = total / (divisor or zero)
        result = variance.sqrt() if is_deviation else variance
        result = result.squeeze(removed_dims).to(dtype)
        return (result, mean.squeeze(removed_dims).to(mean_dtype)) if with_mean else result

    return run


def _squared_size(x: Tensor) -> Tensor:
    """Return |x| ** 2."""
    if not x.is_complex():
        return x * x
    # `conj()` cannot be used, because it only sets a mark, which is ignored inside a tensor
    # subclass.
    return x.real**2 + x.imag**2


def _order(call: OpCall) -> float:
    order = call.get("ord", call.get("p", 2))
    return 2.0 if order is None else float(order)


def norm(call: OpCall) -> Iterator[Row]:
    """Yield rows of norms: a norm over a sharded dim is a partial norm.

    Partial norms are reduced before their norm is taken.
    """
    # A norm of partial norms could stay partial. But clipping returns it to the user, and
    # `to_local` would show a rank's part, so it is reduced.
    order = _order(call)
    simple = {inf: "max", -inf: "min", 0.0: "sum", 1.0: "sum"}
    partial_op = simple.get(order) or f"norm{order!r}"
    yield from rows_along(call, P(partial_op))


# Torch's Python bindings of operators, which take 1 us less per call.
_BINDINGS: dict[Any, LocalFunction] = {
    torch.ops.aten._foreach_norm.Scalar: torch._foreach_norm,
    torch.ops.aten.linalg_vector_norm.default: torch.linalg.vector_norm,
}


def _norm(local_call: LocalCall) -> LocalFunction:
    """Run the operator itself, with a neutral element in place of empty shards in a list."""
    order = _order(local_call.call)
    op = local_call.call.op
    run_locally = _BINDINGS.get(op, op)
    is_list = local_call.call.schema.is_list == (True,)
    has_empty = is_list and any(0 in spec.local_shape for spec in local_call.inputs)
    neutral = 0.0 if order >= 0 else inf  # the value that does not change this norm

    def run(shards: Any, *args: Any, **kwargs: Any) -> Any:
        if sums_are_in_tree() and 0 < order < inf:
            raise OperatorArgumentError(
                f"{op}: norms of shards inside sums_in_tree (invariant_arithmetic) would depend "
                "on the sharding; use shoal_dtensor.clip_grad_norm_ in place of "
                "torch.nn.utils.clip_grad_norm_"
            )
        if has_empty:
            shards = [s if s.numel() else s.new_full((1,), neutral) for s in shards]
        return run_locally(shards, *args, **kwargs)

    return run


def _foreach_max(local_call: LocalCall) -> LocalFunction | None:
    """Run the operator itself, with the least value in place of empty shards."""
    if not any(0 in spec.local_shape for spec in local_call.inputs):
        return None
    op = local_call.call.op

    def run(shards: list[Tensor]) -> Any:
        filled = []
        for shard in shards:
            least = identity_of("max", shard.dtype)
            filled.append(shard if shard.numel() else shard.new_full((1,), least))
        return op(filled)

    return run


def powsum(call: OpCall) -> Iterator[Row]:
    """Yield the rows of sums of powers: a sum over a sharded dim is a partial sum."""
    yield from rows_along(call, P("sum"))


@by_reduced_dims
def _logsumexp(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Compute log(sum over ranks of sum exp(x - top)) + top, with the global maximum `top`."""
    dims = reduced_dims(local_call.call)
    dtype = local_call.outputs[0].dtype
    wide = wide_dtype(dtype)
    removed_dims = () if local_call.call.get("keepdim") else dims

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = x.to(wide)
        top = _largest(x, spec, dims)
        top = torch.where(top.isfinite(), top, 0)
        weights = (x - top).exp()
        total = all_reduced(weights.sum(dims, keepdim=True), spec, axes)
        return (total.log() + top).squeeze(removed_dims).to(dtype)

    return run


def _largest(x: Tensor, spec: Spec, dims: Sequence[int]) -> Tensor:
    """Return the maximum along dims, some of which may be sharded; -inf without elements."""
    if x.numel():
        largest = x.amax(tuple(dims), keepdim=True)
    else:
        largest = x.new_full(keepdim_shape(x.shape, dims), -inf)
    return all_reduced(largest, spec, sharding_axes(spec, dims), "max")


def segment_reduce(call: OpCall) -> Iterator[Row]:
    """Yield rows for the dims after `axis`, the dim of the segments.

    The dims before `axis` are not sharded, because the kernel reads all lengths of the segments.
    """
    tensors = [name for name in ("grad", "output", "data") if name in call.arguments]
    first = int(call["axis"]) % call["data"].ndim + 1
    for d in range(first, call["data"].ndim):
        yield call.row(dict.fromkeys(tensors, S(d)), out=S(d))


def softmax(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard all operands alike, with all-reduces along the normalized dim.

    The maximum and the sum of each row are all-reduced; for a gradient, only one sum.
    """
    result = call.outputs[0]
    dim = call.dim()
    is_gradient = "grad_output" in call.places
    rows = prod(n for d, n in enumerate(result.shape) if d != dim)
    itemsize = wide_dtype(result.dtype).itemsize
    if not is_gradient:
        itemsize += result.dtype.itemsize
    traffic = all_reduce_traffic(rows * itemsize)
    # There is no kernel for integers: all ranks raise the error of the global tensor.
    if not result.dtype.is_floating_point:
        return
    for d in range(result.ndim):
        entries = dict.fromkeys((*call.places, "out"), S(d))
        yield call.row(entries, traffic=traffic if d == dim else None)


@along_dim
def _softmax(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Compute a softmax, its logarithm, or the gradient of either, with global maxima and sums."""
    axes = spec.dim_shardings[dim].axes
    dtype = local_call.outputs[0].dtype
    wide = wide_dtype(dtype)
    is_log = "log_softmax" in local_call.call.op.__name__

    def forwards(x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Compute exp(x - max) / sum of exp(x - max) over all shards, or its logarithm."""
        x = x.to(dtype)
        shifted = x - _largest(x, spec, (dim,))
        weights = shifted.exp()
        total = all_reduced(weights.sum(dim, keepdim=True, dtype=wide), spec, axes)
        result = shifted - total.log() if is_log else weights / total
        return result.to(dtype)

    def backwards(gradient: Tensor, output: Tensor, *_: Any, **__: Any) -> Tensor:
        """Compute g * y - y * (sum of g * y), or for the logarithm g - exp(y) * (sum of g)."""
        weighted = gradient if is_log else gradient * output
        weights = output.exp() if is_log else output
        total = all_reduced(weighted.sum(dim, keepdim=True, dtype=wide), spec, axes)
        return (weighted - weights * total).to(dtype)

    return backwards if "grad_output" in local_call.call.places else forwards


REDUCTION: Table = family(
    {
        "sum": _reduction("sum", "sum", "avg"),
        "nansum count_nonzero": _reduction("sum"),
        "mean": Rule(mean, _mean, sizes=(), linear="self"),
        "prod": _reduction("product", "product"),
        "amax max.default max.unary_out": _extreme("max"),
        "amin min.default min.unary_out": _extreme("min"),
        # Every slice along the dim has a norm of its own.
        "renorm": Rule(lambda call: (call.row(self=S(call.dim()), out=S(call.dim())),)),
        "aminmax": Rule(
            comparing(lambda call: rows_along(call, R, min=P("min"), max=P("max"))),
            skip_empty=True,
        ),
        "any": _reduction("max"),
        "all": _reduction("min"),
        "var var_mean std std_mean": Rule(variance, _var),
        "linalg_vector_norm norm": Rule(norm, _norm, skip_empty=True, sizes=()),
        "_foreach_norm": Rule(norm, _norm, kind="each"),
        "_foreach_max": Rule(_reduction("max", "max").rows, _foreach_max, kind="each"),
        "linalg__powsum": Rule(powsum, sizes=()),
        "_foreach_powsum": Rule(powsum, kind="each"),
        "logsumexp special_logsumexp": Rule(var, _logsumexp, sizes=()),
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data": Rule(
            softmax, _softmax, sizes=(), linear="grad_output"
        ),
        "_safe_softmax": Rule(lambda call: rows_sharded_alike(call, call.dim()), skip_empty=True),
        "glu glu_backward": Rule(
            lambda call: rows_sharded_alike(call, call.dim()), linear="grad_output"
        ),
    },
    unordered=True,
) | family({"segment_reduce _segment_reduce_backward": Rule(segment_reduce, skip_empty=True)})
