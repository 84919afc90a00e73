"""What each operator may do on one mesh axis: one table per family, merged in `default`."""

from .notation import Pattern, factor_rows, linear_rows, parse, pointwise, product
from .rule import CutMap, Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table, flatten
from .table import merge, overlay

__all__ = [
    "CutMap",
    "Entry",
    "LocalCall",
    "LocalFunction",
    "OpCall",
    "P",
    "Pattern",
    "R",
    "Row",
    "Rule",
    "S",
    "Table",
    "factor_rows",
    "flatten",
    "linear_rows",
    "merge",
    "overlay",
    "parse",
    "pointwise",
    "product",
]
