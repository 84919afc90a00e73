"""Deciding calls whose sizes torch.compile keeps as symbols, so that one graph serves every length.

What moves is chosen for the sizes that the compiler traces with: any choice is right, so it needs no guard.  Whether
the operator may then run on the shards is asked of the rule with the symbols themselves: whatever it compares becomes a
guard of the graph.  What cannot be answered so is decided for constants, and the next length makes another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..layout.spec import Spec
from ..layout.symbolic_sizes import constant, traced_with
from ..layout.tensor_meta import TensorMeta
from ..rules.language.rule import OpCall, Row, S


class NeedsConstantsError(Exception):
    """A call cannot be decided for symbols; never seen by users."""


def in_symbolic_runs(row: Row) -> bool:
    """Whether a row folds a sharded dim behind one of symbolic size: placements count runs in integers."""
    return any(isinstance(entry, S) and type(entry.runs) is not int for entry in (*row.inputs, *row.outputs))


def placed_like(spec: Spec, chosen: Spec) -> Spec:
    """A spec with the placements that are chosen for its example."""
    if (spec.example or spec) is chosen:
        return spec
    return spec.with_(placements=chosen.placements, shard_order=chosen.shard_order)


def example_of(value: Any) -> Any:
    """A call, or anything of one, with the sizes that the compiler traces with in place of symbols."""
    if isinstance(value, OpCall):
        parts = map(example_of, (value.args, value.kwargs, value.tensors, value.outputs))
        return OpCall(value.op, *parts)
    return _replaced(value, lambda n: traced_with((n,))[0], lambda spec: spec.example or spec)


def constants_of(value: Any) -> Any:
    """Arguments of a call with constants in place of symbols."""
    return _replaced(value, int, constant)


def _replaced(value: Any, size: Callable[[Any], int], spec: Callable[[Spec], Spec]) -> Any:
    """A structure with its symbols and specs replaced."""
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
