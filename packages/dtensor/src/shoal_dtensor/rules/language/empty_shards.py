"""What a rank contributes that has no elements of an input, without running the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal_mesh.internal import bound

from ...errors import PlacementError
from .local_ops import in_every_form
from .rule import LocalCall, LocalFunction, OpCall, Rule, flatten

if TYPE_CHECKING:
    from ...layout.spec import Spec


def local_function(rule: Rule, local_call: LocalCall, communicates: bool) -> LocalFunction | None:
    """What a rank runs instead of the operator; None for the operator itself.

    Args:
        rule: of the operator.
        local_call: the call with its specs.
        communicates: whether a row of the decision does; every rank runs the rule's own function then.
    """
    if rule.skip_empty and not communicates and (answer := empty_shard(local_call)) is not None:
        return answer
    return rule.local(local_call) if rule.local is not None else None


def empty_shard(local_call: LocalCall) -> LocalFunction | None:
    """What to run on a rank that has an empty shard of an input, or only empty shards of outputs; None on others.

    An input of shape (3, 5) sharded by rows over 4 ranks: rank 3 has (0, 5).  Its rows of the output are empty, and
    what it adds to a partial sum over rows is 0.
    """
    outputs = local_call.outputs
    has_nothing = any([0 in spec.local_shape and 0 not in spec.shape for spec in local_call.inputs])  # noqa: C419  # faster
    empty = [0 in spec.local_shape for spec in outputs]
    if not (has_nothing or True in empty):
        return None
    adds_nothing = has_nothing and all(e or spec.partials for e, spec in zip(empty, outputs, strict=True))
    if not outputs or not (all(empty) or adds_nothing):
        return None
    values = [neutral_value(spec) for spec in outputs]
    call = local_call.call
    present = [i for i, place in enumerate(call.results.values()) for _ in place]
    is_list, count = call.schema.is_list == (True,), len(call.results)

    def contribute(*args: Any, **kwargs: Any) -> Any:
        device = next(flatten([*args, *kwargs.values()])).device
        filled = [
            torch.empty_strided(spec.local_shape, spec.local_stride, dtype=spec.dtype, device=device).fill_(value)
            for spec, value in zip(outputs, values, strict=True)
        ]
        if torch.compiler.is_compiling():  # as where the operator runs
            filled = [bound(tensor, *flatten([*args, *kwargs.values()])) for tensor in filled]
        if is_list:
            return filled
        results: list[Tensor | None] = [None] * count
        for i, tensor in zip(present, filled, strict=True):
            results[i] = tensor
        return results[0] if count == 1 else tuple(results)

    return in_every_form(call, contribute)


def nothing_of(call: OpCall, device: str) -> LocalFunction:
    """The local call of ranks outside of the mesh: they have no elements, and take part in no collective."""
    names = [argument.name for argument in call.op._schema.arguments]
    tensors = iter(zip(call.schema.is_list, call.schema.returned_inputs, strict=True))
    kinds = [next(tensors) if "Tensor" in str(each.type) else None for each in call.op._schema.returns]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        made = iter([torch.empty(0, dtype=meta.dtype, device=device) for meta in call.outputs])

        def result(kind: tuple[bool, str | None] | None) -> Any:
            if kind is None:
                raise PlacementError(
                    f"{call.op} reads a value of a tensor of which this rank, outside the mesh, has none"
                )
            new = [*made] if kind[0] else next(made)
            return new if kind[1] is None else given[kind[1]]

        results = tuple(map(result, kinds))
        return results[0] if len(results) == 1 else results or None

    return run


def neutral_value(spec: Spec) -> float:
    """The number that leaves the reduction of a partial tensor as it is; 0 where nothing is reduced.

    Example: -inf for `Partial("max")` of floats, 127 for `Partial("min")` of int8.
    """
    kinds, dtype = {op for _, op in spec.partials}, spec.dtype
    for op in kinds - {"sum", "avg", "bor", "bxor"}:
        if op.startswith("norm"):
            return 0 if float(op.removeprefix("norm")) > 0 else torch.inf
        return 1 if op == "product" else _extreme(dtype, largest=op != "max", bits=op == "band")
    return 0


def _extreme(dtype: torch.dtype, *, largest: bool, bits: bool) -> float:
    """The largest or smallest value of a dtype; with `bits`, the integer whose bits are all set."""
    if dtype == torch.bool:
        return largest
    if dtype.is_floating_point:
        return torch.inf if largest else -torch.inf
    return -1 if bits and dtype.is_signed else torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min
