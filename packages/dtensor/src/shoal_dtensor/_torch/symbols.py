"""Symbols for sizes, as the recorder of a graph sees them.

A recorder knows how to compute a symbol that it has seen computed.  Those of another stage of the compiler, or computed
while it did not look, have no node in its graph.  Torch then builds one from the symbol's expression; of a product of
three or more it takes the first two (torch 2.11 to 2.15), and it knows no powers.  So every symbol is made known here
before an operator takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch

__all__ = ["record_sizes", "recorder_of_sizes"]


def recorder_of_sizes() -> Any:
    """What knows how the symbols of a graph are computed that is being recorded; None if none is."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def record_sizes(sizes: Iterable[Any]) -> None:
    """Make symbols known to the recorder that it has not seen computed."""
    tracer = recorder_of_sizes()
    if tracer is None:
        return
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot  # which are imported by then

    for size in sizes:
        if type(size) is torch.SymInt and size not in tracer.symnode_tracker:
            computed = _computed(size.node.expr, tracer)
            if type(computed) is torch.SymInt and computed in tracer.symnode_tracker:
                set_proxy_slot(size, tracer, get_proxy_slot(computed, tracer))


def _computed(expression: Any, tracer: Any) -> Any:
    """An expression, computed from the symbols that the recorder has; None if it has none of them."""
    if expression.is_Integer:
        return int(expression)
    known = tracer.sympy_expr_tracker.get(expression)
    if known is not None:
        return known.value
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
