"""Rules of operators: the ways to run each operator on one mesh axis (see `all_rules`).

May import: _torch, errors, host_memory, layout, redistribute, rng, scopes.
"""

from shoal_mesh.internal import replaced_names

from ..errors import ArgumentValueError
from .language.local_ops import all_reduced, sharding_axes
from .language.notation import (
    Partials,
    Pattern,
    factor_rows,
    linear_rows,
    parse,
    pointwise,
    product,
)
from .language.op_call import OpSchema, schema_of
from .language.rule import (
    ANY_NORM,
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
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
    "Entry",
    "LocalCall",
    "LocalFunction",
    "OpCall",
    "OpSchema",
    "P",
    "Partials",
    "Pattern",
    "R",
    "Row",
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

_OLD_NAMES = ("DuplicateRuleError", "NotationError", "RowError")
__getattr__ = replaced_names(__name__, dict.fromkeys(_OLD_NAMES, ArgumentValueError))
