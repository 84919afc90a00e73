"""Deciding calls whose sizes torch.compile keeps as symbols, so that one graph serves every length.

What moves is chosen for the sizes that the compiler traces with: any choice is right, so it needs no guard.  Whether
the operator may then run on the shards is asked of the rule with the symbols themselves: each of its comparisons
becomes a guard of the graph.  What cannot be answered so is decided for constants; the next length is another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shoal_mesh import DeviceMesh

from ..layout.spec import Spec
from ..layout.symbolic_sizes import constant, traced_with
from ..layout.tensor_meta import TensorMeta
from ..rng.modes import draws_at_once
from ..rules.language.rule import OpCall, Row, Rule, S
from .assign import Sharding, ShardingProblem, unmoved


class NeedsConstantsError(Exception):
    """A call cannot be decided for symbols; never seen by users."""


def sharding_of_symbols(
    rule: Rule,
    call: OpCall,
    problem: ShardingProblem,
    mesh: DeviceMesh,
    choose: Callable[[Rule, OpCall, ShardingProblem], Sharding],
) -> Sharding:
    """The sharding of a call among whose sizes are symbols; `choose` gives that of one without.

    Raises:
        NeedsConstantsError: if the operator cannot run for the symbols as it does for the sizes traced with.
    """
    if call.schema.is_random and not draws_at_once(mesh.device_type):
        raise NeedsConstantsError
    parts = map(_example_of, (call.args, call.kwargs, call.tensors, call.outputs))
    specs, outputs, outs = _example_of((problem.specs, problem.outputs, problem.outs))
    example = replace(problem, specs=specs, outputs=outputs, outs=outs)
    chosen = choose(rule, OpCall(call.op, *parts), example)
    placed = [
        spec if (spec.example or spec) is to else spec.with_(placements=to.placements, shard_order=to.shard_order)
        for spec, to in zip(problem.specs, chosen.inputs, strict=True)
    ]
    rows = [row for row in rule.rows_of(call) if not _has_symbolic_runs(row)]
    sharding = unmoved(rows, replace(problem, specs=tuple(placed)), mesh, communicating=bool(chosen.communicating))
    if sharding is None:
        raise NeedsConstantsError
    return sharding


def _has_symbolic_runs(row: Row) -> bool:
    """Whether a row folds a sharded dim behind one of symbolic size: placements count runs in integers."""
    return any(isinstance(entry, S) and type(entry.runs) is not int for entry in (*row.inputs, *row.outputs))


def constants_of(value: Any) -> Any:
    """Arguments of a call with constants in place of symbols."""
    return _replaced(value, int, constant)


def _example_of(value: Any) -> Any:
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
