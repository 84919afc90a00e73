"""`ProgramSides`: the choice of R or I for every replicated value of a trace.

An operator that combines a replicated value with shards or partial sums needs the value as R,
because the gradient on each rank is a term of a sum. An operator whose values are all replicated
needs it as I. If a value has uses of both kinds, it is I, and a `convert` makes an R of it, whose
backward sums the gradients.

May import: trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal_dtensor.internal import signature_of

from .trace import Entry, Movement, TracedOperation, TracedValue, values_in

# Operators with one operand that copy or view it, so that R or I of the operand can follow from the
# result.
_ONE_OPERAND = frozenset(
    {"aten::reshape", "aten::_unsafe_view", "aten::clone", "aten::_to_copy", "aten::contiguous"}
)


class ProgramSides:
    """The choice of R or I for the replicated values of a trace, along every mesh axis."""

    def __init__(self, entries: Sequence[Entry], results: Any, axes: int) -> None:
        self._axes = axes
        self._mixed = _mixed_groups(entries, axes)
        # (id of a value, axis): the values with a use that needs R, and those with a use
        # that needs I
        self._needs_r: set[tuple[int, int]] = set()
        self._needs_i: set[tuple[int, int]] = set()
        self._may_be_r = _ids_that_may_be_r(entries)
        for value in values_in(results):
            for axis in range(axes):
                self._needs_i.add((id(value), axis))
        # backwards, because the need of a view's operand follows from the needs of its result
        for entry in reversed(entries):
            for axis in range(axes):
                if isinstance(entry, Movement):
                    self._note_move(entry, axis)
                else:
                    self._note_uses(entry, axis)

    def _note_uses(self, operation: TracedOperation, axis: int) -> None:
        """Record what an operation needs of its operands along an axis."""
        uses = self._needs_r if self.uses_r(operation, axis) else self._needs_i
        for value in operation.operands:
            if value.takes_gradient:
                uses.add((id(value), axis))

    def _note_move(self, movement: Movement, axis: int) -> None:
        """Record what a move needs of its source along an axis."""
        uses = self._needs_r if self.moves_r(movement, axis) else self._needs_i
        uses.add((id(movement.source), axis))

    def moves_r(self, movement: Movement, axis: int) -> bool:
        """Return whether a move needs its source as R along an axis that it does not change."""
        output = movement.output
        stays_replicated = movement.source.is_replicated(axis) and output.is_replicated(axis)
        return stays_replicated and self.is_r(output, axis)

    def uses_r(self, operation: TracedOperation, axis: int) -> bool:
        """Return whether an operation needs its replicated operands as R along an axis."""
        if (operation.group, axis) in self._mixed:
            return True
        return _takes_one_operand(operation) and all(
            self.is_r(output, axis) for output in operation.outputs
        )

    def is_r(self, value: TracedValue, axis: int) -> bool:
        """Return whether a replicated value is R from the start, because all its uses need R."""
        key = (id(value), axis)
        return id(value) in self._may_be_r and key in self._needs_r and key not in self._needs_i

    def axes_to_convert(self, operation: TracedOperation, value: TracedValue) -> tuple[int, ...]:
        """Return the axes along which an operand is I and the operation needs R."""
        needed = [axis for axis in range(self._axes) if self.uses_r(operation, axis)]
        return self._axes_of_i(value, needed)

    def axes_to_convert_before(self, movement: Movement) -> tuple[int, ...]:
        """Return the axes along which the source of a move is I and its result is R."""
        needed = [axis for axis in range(self._axes) if self.moves_r(movement, axis)]
        return self._axes_of_i(movement.source, needed)

    def _axes_of_i(self, value: TracedValue, needed: Sequence[int]) -> tuple[int, ...]:
        """Return the axes among some along which a value with a gradient is I."""
        if not value.takes_gradient:
            return ()
        whole = [axis for axis in needed if value.is_replicated(axis)]
        return tuple([axis for axis in whole if not self.is_r(value, axis)])


def _mixed_groups(entries: Sequence[Entry], axes: int) -> set[tuple[int, int]]:
    """Return (group, axis) for operators with a value that is not replicated along the axis."""
    mixed = set()
    for entry in entries:
        if isinstance(entry, Movement):
            continue
        values = [value for value in (*entry.operands, *entry.outputs) if not value.is_inside]
        for axis in range(axes):
            if not all(value.is_replicated(axis) for value in values):
                mixed.add((entry.group, axis))
    return mixed


def _ids_that_may_be_r(entries: Sequence[Entry]) -> set[int]:
    """Return the ids of results of moves, and of copies and views of one operand."""
    found = set()
    for entry in entries:
        if isinstance(entry, Movement):
            found.add(id(entry.output))
        elif _takes_one_operand(entry):
            found.add(id(entry.outputs[0]))
    return found


def _takes_one_operand(operation: TracedOperation) -> bool:
    """Return whether an operation is a copy or a view of its only operand."""
    if len(operation.operands) != 1 or len(operation.outputs) != 1:
        return False
    return operation.is_view or signature_of(operation.operator).name in _ONE_OPERAND
