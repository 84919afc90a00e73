"""What local functions share: replaced arguments, reductions over the axes that cut a dim, `out=`, empty shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import all_reduce

from ..spec import Spec
from .rule import LocalCall, LocalFunction, OpCall

__all__ = ["across", "cutting", "filling_out", "or_empty", "replacing", "restored", "zeros"]


def cutting(spec: Spec, dims: Iterable[int] | None = None) -> tuple[int, ...]:
    """The mesh axes that cut any of the tensor dims `dims` (all of them when left out), ascending."""
    chosen = range(spec.ndim) if dims is None else dims
    return tuple(sorted({axis for dim in chosen for axis in spec.cuts[dim].axes}))


def across(tensor: Tensor, spec: Spec, axes: tuple[int, ...], op: str = "sum") -> Tensor:
    """`tensor` reduced over mesh axes of `spec`'s mesh; itself when there are none."""
    return all_reduce(tensor, spec.mesh.comm(axes), op) if axes else tensor


def replacing(call: OpCall, **changes: Any) -> LocalFunction:
    """The operator with some of its arguments, by schema name, replaced by `changes`."""
    op = call.op
    places = {argument.name: i for i, argument in enumerate(op._schema.arguments)}
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


def filling_out(call: OpCall, function: LocalFunction) -> LocalFunction:
    """`function`, which knows the functional form, made fit for the operator's own form (`out=` or in-place)."""
    outs = tuple(argument.name for argument in call.op._schema.arguments if argument.is_out)
    returns = call.op._schema.returns
    if not outs and returns and returns[0].alias_info is not None:
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


def or_empty(decided: LocalCall, function: LocalFunction | None = None) -> LocalFunction | None:
    """`function`, or an answer that costs nothing on a rank that holds no elements of any output.

    For operators whose kernels refuse empty tensors; not for local functions that communicate.
    """
    if not decided.outputs or any(0 not in spec.local_shape for spec in decided.outputs):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(arg for arg in args if isinstance(arg, Tensor)).device
        empty = [torch.empty(spec.local_shape, dtype=spec.dtype, device=device) for spec in decided.outputs]
        return empty[0] if len(empty) == 1 else tuple(empty)

    return filling_out(decided.call, run)


def zeros(decided: LocalCall) -> LocalFunction:
    """What a rank without elements adds to sums: zeros; None for the outputs that `output_mask` leaves out."""
    specs = iter(decided.outputs)
    mask = decided.call.get("output_mask") or [True] * len(decided.outputs)
    wanted = [next(specs) if present else None for present in mask]

    def run(first: Tensor, *_: Any, **__: Any) -> Any:
        made = [None if s is None else first.new_zeros(s.local_shape, dtype=s.dtype) for s in wanted]
        return made[0] if len(made) == 1 else tuple(made)

    return filling_out(decided.call, run)


def restored(tensor: Tensor, dims: Iterable[int], keepdim: bool) -> Tensor:
    """`tensor`, reduced over `dims` with `keepdim=True`, without those dims unless `keepdim`."""
    if keepdim:
        return tensor
    gone = set(dims)
    return tensor.reshape([n for dim, n in enumerate(tensor.shape) if dim not in gone])
