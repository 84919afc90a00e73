"""Symbols for sizes, as the recorder of a graph sees them.

A recorder knows how to compute a symbol that it has seen computed.  Those of another stage of the compiler, or computed
while it did not look, have no node in its graph.  Torch then builds one from the symbol's expression; of a product of
three or more it takes the first two (torch 2.11 to 2.15), and it knows no powers.  Those of a gradient's size are no
better: what is computed forward must not need them.  So every symbol is computed again, from the inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch


def recorder_of_sizes() -> Any:
    """What knows how the symbols of a graph are computed that is being recorded; None if none is."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def recorded(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes whose symbols the recorder sees computed from the first that it knew: the inputs of a forward pass."""
    tracer = recorder_of_sizes()
    if tracer is None:
        return tuple(sizes)
    return tuple([_seen(size, tracer) if type(size) is torch.SymInt else size for size in sizes])


def _seen(size: torch.SymInt, tracer: Any) -> Any:
    computed = _computed(size.node.expr, tracer)
    return size if computed is None else computed


def _computed(expression: Any, tracer: Any) -> Any:
    """An expression, computed from symbols that the recorder has; None if it lacks one."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        known = (node for node in tracer.symnode_tracker.sym_node_dict if node.expr == expression)
        node = next(known, None)
        return None if node is None else torch.SymInt(node)  # type: ignore[no-untyped-call]  # of torch
    compute = _OPERATIONS.get(expression.func.__name__)
    operands = [_computed(operand, tracer) for operand in expression.args]
    return None if compute is None or not operands or None in operands else compute(*operands)


def _power(base: Any, exponent: Any) -> Any:
    """A whole power, as the recorder can see it."""
    return reduce(lambda a, b: a * b, [base] * exponent) if type(exponent) is int and exponent > 0 else None


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Mul": lambda *factors: reduce(lambda a, b: a * b, factors),
    "Add": lambda *summands: reduce(lambda a, b: a + b, summands),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": lambda *values: reduce(torch.sym_max, values),
    "Min": lambda *values: reduce(torch.sym_min, values),
}
