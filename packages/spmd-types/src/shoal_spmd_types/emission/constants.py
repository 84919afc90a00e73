"""The operations of a trace that depend on sizes and numbers alone.

Their values are the same in every forward, so a program computes them once.

May import: trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from shoal_dtensor.internal import pytree

from .trace import Entry, Movement, TracedOperation, TracedValue, values_in


def constant_operations(entries: Sequence[Entry], results: Any) -> set[int]:
    """Return the ids of the operations that a program may compute once.

    Such an operation draws no random numbers and reads results of such operations only. An
    operation is left out if a result of the forward may share its memory, because the caller may
    write to results.
    """
    shared = _memory_of_results(entries, results)
    constants: set[int] = set()
    # ids of the values that the operations in `constants` compute
    values: set[int] = set()
    for entry in entries:
        if isinstance(entry, Movement) or torch.Tag.nondeterministic_seeded in entry.operator.tags:
            continue
        outputs = {*map(id, entry.outputs)}
        if values.issuperset(map(id, entry.operands)) and shared.isdisjoint(outputs):
            constants.add(id(entry))
            values |= outputs
    return constants


def _memory_of_results(entries: Sequence[Entry], results: Any) -> set[int]:
    """Return the ids of the results, and of all values that may share memory with a result.

    A view shares the memory of its operand, and a move without steps the memory of its source.
    """
    shared = {*map(id, values_in(results))}
    for entry in reversed(entries):
        if isinstance(entry, Movement):
            if id(entry.output) in shared:
                shared.add(id(entry.source))
        elif _may_return_an_operand(entry) and not shared.isdisjoint(map(id, entry.outputs)):
            shared.update(map(id, entry.operands))
    return shared


def _may_return_an_operand(operation: TracedOperation) -> bool:
    """Return whether an operation may return an operand itself, or a view of it, in the program.

    The recorded operator of `x.to(dtype)` or `x.contiguous()` is a copy, but its text in the
    program returns x if there is nothing to do. Therefore every operation with one operand counts.
    """
    return operation.is_view or len(operation.operands) == 1


def merge_equal_constants(entries: Sequence[Entry], constants: set[int]) -> list[Entry]:
    """Return the entries without constant operations that repeat another one.

    The remaining entries are changed in place: they read the values of the first operation.

    A model of many layers makes the same mask in each layer. Kept between forwards, the masks would
    take the memory of all layers.
    """
    # id of a value that is left out -> the equal value that stays
    replaced: dict[int, TracedValue] = {}
    # what an operation computes -> the operation that stays
    found: dict[Hashable, TracedOperation] = {}
    merged: list[Entry] = []
    for entry in entries:
        _replace_operands(entry, replaced)
        if id(entry) not in constants:
            merged.append(entry)
            continue
        assert isinstance(entry, TracedOperation)
        first = found.setdefault(_key(entry), entry)
        if first is entry:
            merged.append(entry)
            continue
        for value, kept in zip(entry.outputs, first.outputs, strict=True):
            replaced[id(value)] = kept
    return merged


def _replace_operands(entry: Entry, replaced: Mapping[int, TracedValue]) -> None:
    """Have an entry read the values that stay."""
    if isinstance(entry, Movement):
        entry.source = replaced.get(id(entry.source), entry.source)
        return
    structure = (entry.args, {**entry.kwargs})
    entry.args, entry.kwargs = pytree.tree_map(lambda leaf: replaced.get(id(leaf), leaf), structure)


def _key(operation: TracedOperation) -> Hashable:
    """Return a key that is equal for two operations if they compute the same values.

    It has the operator, its arguments, and the layouts of its outputs: the same `arange` may be a
    replicated DTensor in one place and, inside of a local region, a plain tensor in another.
    """
    leaves, structure = pytree.tree_flatten((operation.args, {**operation.kwargs}))
    # The repr tells 1 from 1.0 and True, and a NaN equals itself.
    plain = [id(leaf) if isinstance(leaf, TracedValue) else repr(leaf) for leaf in leaves]
    layouts = [(output.spec, output.is_inside) for output in operation.outputs]
    return (operation.operator, tuple(plain), str(structure), tuple(layouts))
