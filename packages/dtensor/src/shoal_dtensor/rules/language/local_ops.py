"""What local functions share: replaced arguments, reductions over sharding axes, `out=` and in-place forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal_mesh import all_reduce

from .op_call import LocalCall, LocalFunction, OpCall, P, R, Row, Traffic

if TYPE_CHECKING:
    from ...layout.spec import Spec
    from ...layout.tensor_meta import TensorMeta


def sharding_axes(spec: Spec, dims: Iterable[int] | None = None) -> tuple[int, ...]:
    """The mesh axes that shard any of the tensor dims `dims` (all of them when left out), ascending."""
    chosen = range(spec.ndim) if dims is None else dims
    return tuple(sorted({axis for dim in chosen for axis in spec.dim_shardings[dim].axes}))


def all_reduced(tensor: Tensor, spec: Spec, axes: tuple[int, ...], op: str = "sum") -> Tensor:
    """`tensor` reduced over mesh axes of `spec`'s mesh; itself when there are none."""
    return all_reduce(tensor, spec.mesh.comm(axes), op) if axes else tensor


def bytes_of(*tensors: TensorMeta) -> int:
    """How many bytes global tensors have together."""
    return sum(prod(t.shape) * t.dtype.itemsize for t in tensors)


def all_reduce_traffic(nbytes: float) -> Traffic:
    """The traffic of a row that all-reduces `nbytes` bytes: a reduce-scatter and an all-gather.

    Example:
        >>> all_reduce_traffic(100)(4)
        150.0
    """
    return lambda ranks: 2 * nbytes * (ranks - 1) / ranks


def mean_rows(call: OpCall, row: Row) -> Iterator[Row]:
    """The two rows of a mean along a factor, given the one of its sum; only its first result is a mean.

    Even shards leave the average of their means, as torch does. The means of uneven shards do not average: there the
    mean is all-reduced, for a rank's summand would read as another mean by `to_local`.
    """
    mine = row.traffic or (lambda ranks: 0.0)
    reduced = all_reduce_traffic(bytes_of(call.outputs[0]))
    yield replace(row, outputs=(P("avg"), *row.outputs[1:]), even=True)
    yield replace(row, outputs=(R, *row.outputs[1:]), traffic=lambda ranks: mine(ranks) + reduced(ranks))


def mean_of_sums(local_call: LocalCall, axes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """From this rank's part of a sum, divided by the global count, to the result of a row of `mean_rows`.

    Args:
        local_call: the decided call; its first output is the mean.
        axes: the mesh axes that shard what is averaged.
    """
    result = local_call.outputs[0]
    averaged = {axis for axis, op in result.partials if op == "avg" and axis in axes}
    ranks = prod(result.mesh.shape[axis] for axis in averaged)
    others = tuple(axis for axis in axes if axis not in averaged)

    def run(part: Tensor) -> Tensor:
        return all_reduced(part * ranks if ranks > 1 else part, result, others)

    return run


def with_arguments(call: OpCall, **changes: Any) -> LocalFunction:
    """The operator with some of its arguments, by schema name, replaced by `changes`."""
    op = call.op
    places = {name: i for i, name in enumerate((*call.schema.inputs, *call.schema.outs))}
    positions = tuple((places[name], name, value) for name, value in changes.items())

    def run(*args: Any, **kwargs: Any) -> Any:
        changed = list(args)
        for place, name, value in positions:
            if place < len(changed):
                changed[place] = value
            else:
                kwargs[name] = value
        return op(*changed, **kwargs)

    return run


def in_every_form(call: OpCall, function: LocalFunction) -> LocalFunction:
    """`function`, written for the functional form, in the form of the operator (`out=`, in-place, or as it is)."""
    outs = call.schema.outs
    if call.rewritten:
        return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))
    if not outs:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outs]
        results = function(*args, **kwargs)
        for target, result in zip(targets, [results] if isinstance(results, Tensor) else results, strict=True):
            target.copy_(result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return run


def zeros(local_call: LocalCall) -> LocalFunction:
    """What a rank without elements adds to sums: zeros; None for the outputs that `output_mask` leaves out."""
    specs = iter(local_call.outputs)
    mask = local_call.call.get("output_mask") or [True] * len(local_call.outputs)
    wanted = [next(specs) if present else None for present in mask]

    def run(first: Tensor, *_: Any, **__: Any) -> Any:
        results = [
            None if s is None else first.new_empty_strided(s.local_shape, s.local_stride, dtype=s.dtype).zero_()
            for s in wanted
        ]
        return results[0] if len(results) == 1 else tuple(results)

    return in_every_form(local_call.call, run)


def drop_dims(tensor: Tensor, dims: Iterable[int], keepdim: bool) -> Tensor:
    """`tensor`, reduced over `dims` with `keepdim=True`, without those dims unless `keepdim`."""
    if keepdim:
        return tensor
    gone = set(dims)
    return tensor.reshape([n for dim, n in enumerate(tensor.shape) if dim not in gone])
