"""Deciding calls whose sizes torch.compile keeps as symbols, so that one graph serves every length.

What moves is chosen for the sizes that the compiler traces with: any choice is right, so it needs no guard.  Whether
the operator may then run on the shards is asked of the rule with the symbols themselves: each of its comparisons
becomes a guard of the graph.  What cannot be answered so is decided for constants; the next length is another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..layout.spec import Spec
from ..layout.symbolic_sizes import constant, traced_with
from ..layout.tensor_meta import TensorMeta


class NeedsConstantsError(Exception):
    """A call cannot be decided for symbols; never seen by users."""


def constants_of(value: Any) -> Any:
    """Arguments of a call with constants in place of symbols."""
    return _replaced(value, int, constant)


def example_of(value: Any) -> Any:
    """Anything of a call, with the sizes that the compiler traces with in place of symbols."""
    return _replaced(value, lambda n: traced_with((n,))[0], lambda spec: spec.example)


def _replaced(value: Any, size: Callable[[Any], int], spec: Callable[[Any], Any]) -> Any:
    """A structure with its symbols and specs of symbols replaced."""
    if type(value) is torch.SymInt:
        return size(value)
    if isinstance(value, Spec):
        return value if value.example is None else spec(value)
    if isinstance(value, Mapping):
        return {name: _replaced(item, size, spec) for name, item in value.items()}
    if isinstance(value, TensorMeta):
        return TensorMeta(*(_replaced(part, size, spec) for part in value))
    if isinstance(value, tuple | list):
        return type(value)([_replaced(item, size, spec) for item in value])
    return value
