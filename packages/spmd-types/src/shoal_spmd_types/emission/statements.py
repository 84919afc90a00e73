"""Statements of a program: operators, moves and conversions, each with possible texts.

May import: expressions, linear_layers, sides, trace.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from shoal_dtensor.internal import Step

from .expressions import NameOf, move_text, operator_texts
from .linear_layers import LinearLayer, linear_layers
from .sides import ProgramSides
from .trace import Entry, Movement, TracedOperation, TracedValue


@dataclass(slots=True, eq=False)
class Statement:
    """An assignment.

    Attributes:
        operands: the values that it reads.
        outputs: the values that it assigns.
        texts: returns possible texts of the right side, the most readable first.
        operations: the recorded operations that the text has to call; empty for moves.
        path: the path of the module whose forward has the statement.
        parts: statements that compute the same one after the other, for the case that no text calls
            the recorded operations.
        is_constant: whether the program computes it once.
    """

    operands: list[TracedValue]
    outputs: list[TracedValue]
    texts: Callable[[NameOf], list[str]]
    operations: tuple[TracedOperation, ...]
    path: str
    parts: list[Statement] = field(default_factory=list)
    is_constant: bool = False


class Statements:
    """The statements of a trace, in order.

    Attributes:
        found: the statements.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        sides: ProgramSides,
        names_of_axes: Sequence[str],
        constants: Container[int],
    ) -> None:
        self._sides = sides
        # the ids of the operations that the program computes once
        self._constants = constants
        self._axes = names_of_axes
        # (id of a value of type I, axes) -> the value after its conversion to R along these axes
        self._converted: dict[tuple[int, tuple[int, ...]], TracedValue] = {}
        self.found: list[Statement] = []
        layers = linear_layers(entries)
        inner = {id(part) for layer in layers.values() for part in layer.operations[:-1]}
        for entry in entries:
            if isinstance(entry, Movement):
                self.found += self._moves(entry)
            elif id(entry) in layers:
                self.found.append(self._linear(layers[id(entry)]))
            elif id(entry) not in inner:
                self.found.append(self._operation(entry))

    def _operation(self, operation: TracedOperation) -> Statement:
        """Return the statement of an operation, after the conversions of its operands."""
        converted = self._conversions(operation)

        def texts(name_of: NameOf) -> list[str]:
            found = operator_texts(operation, lambda value: name_of(converted.get(value, value)))
            if not operation.cuts_gradient:
                return found
            return [f"({text}).detach()" for text in found]

        operands = [converted.get(value, value) for value in operation.operands]
        return Statement(
            operands,
            operation.outputs,
            texts,
            (operation,),
            path=operation.path,
            is_constant=id(operation) in self._constants,
        )

    def _conversions(self, operation: TracedOperation) -> dict[TracedValue, TracedValue]:
        """Add the conversions to R that an operation needs; return value -> converted value."""
        converted = {}
        for value in operation.operands:
            axes = self._sides.axes_to_convert(operation, value)
            if axes:
                converted[value] = self._convert(value, axes, operation.path)
        return converted

    def _convert(self, value: TracedValue, axes: tuple[int, ...], path: str) -> TracedValue:
        """Return a value after its conversion from I to R along some axes; add it if it is new."""
        key = (id(value), axes)
        if key not in self._converted:
            source = value if len(axes) == 1 else self._convert(value, axes[:-1], path)
            # the new value is not a parameter, and gets a name such as `weight_r`
            hint = value.hint or value.parameter.rpartition(".")[2]
            output = replace(value, parameter="", is_input=False, hint=f"{hint}_r" if hint else "")
            name = self._axes[axes[-1]]

            def texts(name_of: NameOf) -> list[str]:
                return [f'convert({name_of(source)}, "{name}", src=I, dst=R)']

            self._converted[key] = output
            self.found.append(Statement([source], [output], texts, (), path=path))
        return self._converted[key]

    def _moves(self, movement: Movement) -> list[Statement]:
        """Return the statements of a redistribution, one for each step of its plan."""
        statements = []
        source = movement.source
        axes = self._sides.axes_to_convert_before(movement)
        if axes:
            source = self._convert(source, axes, movement.path)
        if not movement.plan.steps:
            # A move without steps is recorded only where its result has no gradient.
            make = _with_detach(lambda name_of: [name_of(source)])
            return [Statement([source], [movement.output], make, (), path=movement.path)]
        for step in movement.plan.steps:
            output = movement.output
            if step is not movement.plan.steps[-1]:
                output = replace(output, spec=step.dst, shape=tuple(step.dst.local_shape))
            make = self._move_texts(step, source, movement.output)
            if movement.cuts_gradient and step is movement.plan.steps[-1]:
                make = _with_detach(make)
            statements.append(Statement([source], [output], make, (), path=movement.path))
            source = output
        return statements

    def _move_texts(
        self, step: Step, source: TracedValue, target: TracedValue
    ) -> Callable[[NameOf], list[str]]:
        """Return the text of one step towards a target."""
        if step.name == "Reshape":
            shape = ", ".join(map(str, step.dst.local_shape))
            return lambda name_of: [f"{name_of(source)}.reshape({shape})"]
        is_along_one = len(step.axes) == 1
        source_is_r = is_along_one and self._sides.is_r(source, step.axes[0])
        target_is_r = is_along_one and self._sides.is_r(target, step.axes[0])
        return lambda name_of: [move_text(step, name_of(source), target_is_r, source_is_r)]

    def _linear(self, layer: LinearLayer) -> Statement:
        """Return the statement of a linear layer, with a statement for each operator as parts."""
        parts = {id(one): self._operation(one) for one in layer.operations}
        weight = parts[id(layer.transpose)].operands[0]
        if layer.view is not None:
            x = parts[id(layer.view)].operands[0]
        else:
            x = parts[id(layer.product)].operands[-2]
        operands = [x, weight]
        if len(layer.product.args) == 3:
            operands.append(parts[id(layer.product)].operands[0])

        def texts(name_of: NameOf) -> list[str]:
            return [f"F.linear({', '.join(map(name_of, operands))})"]

        last = layer.operations[-1]
        return Statement(
            operands,
            last.outputs,
            texts,
            layer.operations,
            path=last.path,
            parts=[*parts.values()],
            is_constant=id(last) in self._constants,
        )


def _with_detach(texts: Callable[[NameOf], list[str]]) -> Callable[[NameOf], list[str]]:
    """Return a function that adds `.detach()` to texts."""
    return lambda name_of: [f"{text}.detach()" for text in texts(name_of)]
