"""What an operator's schema says, read once: its inputs, what it writes, what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from shoal_mesh.internal import dataclass

from ..._torch import OpOverload, unmarked_writes

_TENSOR_KINDS = ("TensorType", "ListType")


@dataclass(frozen=True, slots=True, eq=False)
class OpSchema:
    """One overload, as rules and dispatch need to know it.

    `add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)` reads `self`, `other` and `alpha`,
    writes `self`, and its only return is `self`.

    Attributes:
        inputs: names of the arguments that are read, in order; `out=` arguments are not among them.
        positional: those of them that have a position.
        defaults: the values of the arguments that have a default.
        outs: names of the `out=` arguments.
        written: names of the inputs that are written in place.
        unmarked: names of those that are written although the schema does not say so, when the operator trains.
        returns: names of the returned tensors or lists of tensors: the schema's, else `out`, or `out0`, `out1`, ...
        is_list: for each of `returns` whether it is a list of tensors.
        returned_inputs: for each of `returns` the written input or `out=` argument that it is, or None.
        entry_names: what a row may name: inputs, results by their names and places, and `out` for all results.
        returns_only_tensors: whether nothing but tensors is returned (or nothing at all).
        is_view: whether an output aliases an input that is not written.
        is_random: whether it uses a random number generator.
    """

    inputs: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: Mapping[str, object]
    outs: tuple[str, ...]
    written: tuple[str, ...]
    unmarked: tuple[str, ...]
    returns: tuple[str, ...]
    is_list: tuple[bool, ...]
    returned_inputs: tuple[str | None, ...]
    entry_names: frozenset[str]
    returns_only_tensors: bool
    is_view: bool
    is_random: bool


@cache
def schema_of(op: OpOverload) -> OpSchema:
    """The schema of an overload; one value for the whole process."""
    arguments = op._schema.arguments
    kinds = [(r, r.type.kind()) for r in op._schema.returns]
    returned = [(r, kind == "ListType") for r, kind in kinds if kind in _TENSOR_KINDS]
    aliased = {a.name: a.alias_info.before_set for a in arguments if a.alias_info and a.alias_info.is_write}
    owners = [
        next((name for name, marks in aliased.items() if r.alias_info and marks & r.alias_info.before_set), None)
        for r, _ in returned
    ]
    single = len(returned) == 1
    outs = tuple(a.name for a in arguments if a.is_out)
    inputs = tuple(a.name for a in arguments if not a.is_out)
    written = tuple(name for name in aliased if name not in outs)
    returns = tuple(r.name or ("out" if single else f"out{i}") for i, (r, _) in enumerate(returned))
    places = (f"out{i}" for i in range(max(1, len(returns) or len(written))))
    return OpSchema(
        inputs=inputs,
        positional=tuple(a.name for a in arguments if not a.kwarg_only),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        outs=outs,
        written=written,
        unmarked=unmarked_writes(op),
        returns=returns,
        is_list=tuple(is_list for _, is_list in returned),
        returned_inputs=tuple(owners),
        entry_names=frozenset((*inputs, *returns, "out", *places)),
        returns_only_tensors=len(returned) == len(kinds),
        is_view=any(r.alias_info is not None and not r.alias_info.is_write for r, _ in returned),
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
    )
