"""What each operator may do on one mesh axis: one table per family, merged in `default`.

May import: _torch, errors, host_memory, layout, redistribute, rng, scopes.
"""

from .language.local_ops import all_reduced, sharding_axes
from .language.notation import NotationError, Partials, Pattern, factor_rows, linear_rows, parse, pointwise, product
from .language.op_call import OpSchema, schema_of
from .language.rule import (
    ANY_NORM,
    DuplicateRuleError,
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    RowError,
    Rule,
    S,
    ShardingMap,
    Table,
    Traffic,
    family,
    flatten,
    local_function,
    merge,
    overlay,
    with_norms,
)

__all__ = [
    "ANY_NORM",
    "DuplicateRuleError",
    "Entry",
    "LocalCall",
    "LocalFunction",
    "NotationError",
    "OpCall",
    "OpSchema",
    "P",
    "Partials",
    "Pattern",
    "R",
    "Row",
    "RowError",
    "Rule",
    "S",
    "ShardingMap",
    "Table",
    "Traffic",
    "all_reduced",
    "factor_rows",
    "family",
    "flatten",
    "linear_rows",
    "local_function",
    "merge",
    "overlay",
    "parse",
    "pointwise",
    "product",
    "schema_of",
    "sharding_axes",
    "with_norms",
]
