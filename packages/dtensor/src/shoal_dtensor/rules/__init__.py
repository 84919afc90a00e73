"""What each operator may do on one mesh axis: one table per family, merged in `default`."""

from .notation import NotationError, Partials, Pattern, factor_rows, linear_rows, parse, pointwise, product, silent
from .rule import CutMap, Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table, flatten
from .table import DuplicateRuleError, family, merge, overlay

__all__ = [
    "CutMap",
    "DuplicateRuleError",
    "Entry",
    "LocalCall",
    "LocalFunction",
    "NotationError",
    "OpCall",
    "P",
    "Partials",
    "Pattern",
    "R",
    "Row",
    "Rule",
    "S",
    "Table",
    "factor_rows",
    "family",
    "flatten",
    "linear_rows",
    "merge",
    "overlay",
    "parse",
    "pointwise",
    "product",
    "silent",
]
