"""R or I: which replicated values of a trace are used differently by the ranks.

A value that an operator combines with shards or pending sums is R there, because its gradient is
one rank's addend. Where the same value is also used by operators that all ranks run alike, it is I,
and a `convert` leads from I to R, whose backward sums the gradients.

May import: trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .trace import Entry, Movement, TracedOperation, TracedValue, values_in

# Operators with one operand whose result may be R in the place of the operand.
_ONE_OPERAND = frozenset(
    {"aten::reshape", "aten::_unsafe_view", "aten::clone", "aten::_to_copy", "aten::contiguous"}
)


class ProgramSides:
    """The choice of R or I for the replicated values of a trace, along every mesh axis."""

    def __init__(self, entries: Sequence[Entry], results: Any, axes: int) -> None:
        self._axes = axes
        self._mixed = _mixed_groups(entries, axes)
        # whether a use of a value needs R, and whether another one needs I
        self._needs_r: set[tuple[int, int]] = set()
        self._needs_i: set[tuple[int, int]] = set()
        self._may_be_r = _ids_that_may_be_r(entries)
        for value in values_in(results):
            for axis in range(axes):
                self._needs_i.add((id(value), axis))
        for entry in reversed(entries):
            for axis in range(axes):
                if isinstance(entry, Movement):
                    self._note_move(entry, axis)
                else:
                    self._note_uses(entry, axis)

    def _note_uses(self, operation: TracedOperation, axis: int) -> None:
        uses = self._needs_r if self.uses_r(operation, axis) else self._needs_i
        for value in operation.operands:
            if value.takes_gradient:
                uses.add((id(value), axis))

    def _note_move(self, movement: Movement, axis: int) -> None:
        uses = self._needs_r if self.moves_r(movement, axis) else self._needs_i
        uses.add((id(movement.source), axis))

    def moves_r(self, movement: Movement, axis: int) -> bool:
        """Tell whether a move along other axes takes its source as R along an axis."""
        is_beside = movement.source.is_replicated(axis) and movement.output.is_replicated(axis)
        return is_beside and self.is_r(movement.output, axis)

    def uses_r(self, operation: TracedOperation, axis: int) -> bool:
        """Tell whether an operation takes its replicated operands as R along an axis."""
        if (operation.group, axis) in self._mixed:
            return True
        return _takes_one_operand(operation) and all(
            self.is_r(output, axis) for output in operation.outputs
        )

    def is_r(self, value: TracedValue, axis: int) -> bool:
        """Tell whether a replicated value is made as R: all its uses need R."""
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
        if not value.takes_gradient:
            return ()
        whole = [axis for axis in needed if value.is_replicated(axis)]
        return tuple([axis for axis in whole if not self.is_r(value, axis)])


def _mixed_groups(entries: Sequence[Entry], axes: int) -> set[tuple[int, int]]:
    """Return the groups of operations, with the axes along which their values differ."""
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
    """Return the values that a move makes, and those that are other views of their operand."""
    found = set()
    for entry in entries:
        if isinstance(entry, Movement):
            found.add(id(entry.output))
        elif _takes_one_operand(entry):
            found.add(id(entry.outputs[0]))
    return found


def _takes_one_operand(operation: TracedOperation) -> bool:
    """Tell whether an operation only looks at its one operand in another way."""
    if len(operation.operands) != 1 or len(operation.outputs) != 1:
        return False
    schema = operation.operator._schema
    is_view = any(argument.alias_info is not None for argument in schema.arguments)
    return is_view or schema.name in _ONE_OPERAND
