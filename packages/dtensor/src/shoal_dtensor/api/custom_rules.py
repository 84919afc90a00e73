"""Rules for a user's own operators, in shoal's notation or as torch's `register_sharding` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._torch.operators import OpOverload
from .._torch.tensors import pytree
from ..argument_types import check_type
from ..errors import PlacementError
from ..layout.placements import Placement, Shard
from ..layout.tensor_meta import TensorMeta
from ..rules.language.rule import DuplicateRuleError, Entry, OpCall, R, Row, Rule, S
from ..scopes import SCOPES


def register_rule(op: OpOverload | Sequence[OpOverload], rule: Rule, *, replace: bool = False) -> None:
    """Give operators a rule for the rest of the process; `shoal_dtensor.rules.overlay` gives one for a block.

    Args:
        op: one overload or several; in-place operators, operators without output and tensor keyword arguments included.
        rule: for instance `product("m k, k n -> m n")`.
        replace: allow an operator that has a rule already.

    Raises:
        DuplicateRuleError: if an operator has a rule and `replace` is not set.

    Example:
        >>> import torch
        >>> from shoal_dtensor.rules import pointwise
        >>> register_rule(torch.ops.aten.special_airy_ai.default, pointwise(), replace=True)
    """
    check_type("register_rule", "rule", rule, Rule, "a Rule, such as product('m k, k n -> m n')")
    overloads = _overloads("register_rule", op)
    from ..rules.all_rules import TABLE  # here: `import shoal_dtensor` does not build the tables

    for overload in overloads:
        if overload in TABLE and not replace:
            raise DuplicateRuleError(f"{overload} has a rule already; pass replace=True to give it another")
        TABLE[overload] = rule
        for scope in [*SCOPES]:
            scope.decisions.pop(id(overload), None)


def register_sharding(op: OpOverload | Sequence[OpOverload]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a rule of a function in the form that torch's `register_sharding` has.

    The function gets the operator's arguments, each tensor replaced by its `TensorMeta` (global shape, stride, dtype),
    and returns a list of pairs (output placements, input placements), each saying one way to shard along ONE mesh
    axis; inputs that are not tensors have None. The one where everything is replicated need not be listed.

    Args:
        op: one overload or several.

    Raises:
        PlacementError: (when the operator is called) if a pair does not fit the operator's tensors.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Replicate, Shard
        >>> @torch.library.custom_op("shoal_example::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> @register_sharding(torch.ops.shoal_example.twice.default)
        ... def rows_stay_sharded(x):
        ...     return [([Shard(0)], [Shard(0)])]
    """
    _overloads("register_sharding", op)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def rows(call: OpCall) -> list[Row]:
            pairs = function(*call.args, **call.kwargs)
            return [_row(call, outputs, inputs) for outputs, inputs in pairs]

        register_rule(op, Rule(rows), replace=True)
        return function

    return decorate


def _row(call: OpCall, outputs: Sequence[Any], inputs: Sequence[Any]) -> Row:
    """One pair of placements as a row; entries of non-tensor arguments are left out."""
    given, results = ([p for p in pytree.tree_leaves(each) if isinstance(p, Placement)] for each in (inputs, outputs))
    if (len(given), len(results)) != (len(call.tensors), len(call.outputs)):
        raise PlacementError(
            f"{call.op}: it has {len(call.tensors)} tensor inputs and {len(call.outputs)} tensor outputs, but the "
            f"registered sharding has placements for {len(given)} and {len(results)}"
        )
    return Row(tuple(map(_entry, given, call.tensors)), tuple(map(_entry, results, call.outputs)))


def _entry(placement: Placement, meta: TensorMeta) -> Entry:
    if isinstance(placement, Shard):
        return S(placement.dim % meta.ndim)
    return R if placement.is_replicate() else placement  # type: ignore[return-value]  # what is left is Partial


def _overloads(where: str, op: OpOverload | Sequence[OpOverload]) -> list[OpOverload]:
    overloads: list[Any] = list(op) if isinstance(op, list | tuple) else [op]
    for overload in overloads:
        check_type(where, "op", overload, OpOverload, "an overload, such as torch.ops.aten.mm.default, or several")
    return overloads
