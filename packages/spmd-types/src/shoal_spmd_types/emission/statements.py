"""Statements of a program: operators, moves and conversions, each with possible texts.

A replicated value has one of two types (`sides`). Its gradient is a pending sum over the ranks if
the type is R, and equal on all ranks if it is I. `convert` makes an R of an I.

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
        parts: several statements that together compute the outputs. They replace this statement if
            none of `texts` calls the recorded operations.
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
        # id of the last operation of a linear layer -> the layer. The layer's statement stands at
        # the place of its last operation, and its other operations have none.
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
        """Return a value after its conversion from I to R along some axes.

        There is one statement for each axis. Statements that are new are added.
        """
        source = value
        for count in range(1, len(axes) + 1):
            key = (id(value), axes[:count])
            if key not in self._converted:
                output = _converted_value(value)
                self._add_conversion(source, output, self._axes[axes[count - 1]], path=path)
                self._converted[key] = output
            source = self._converted[key]
        return source

    def _add_conversion(
        self, source: TracedValue, output: TracedValue, axis_name: str, *, path: str
    ) -> None:
        """Add the statement that converts a value from I to R along one axis."""

        def texts(name_of: NameOf) -> list[str]:
            return [f'convert({name_of(source)}, "{axis_name}", src=I, dst=R)']

        self.found.append(Statement([source], [output], texts, (), path=path))

    def _moves(self, movement: Movement) -> list[Statement]:
        """Return the statements of a redistribution, one for each step of its plan."""
        statements = []
        source = movement.source
        axes = self._sides.axes_to_convert_before(movement)
        if axes:
            source = self._convert(source, axes, movement.path)
        if not movement.plan.steps:
            # A move without steps is recorded only if it runs under `no_grad`. So it is a detach.
            make = _with_detach(lambda name_of: [name_of(source)])
            return [Statement([source], [movement.output], make, (), path=movement.path)]
        for step in movement.plan.steps:
            is_last = step is movement.plan.steps[-1]
            output = movement.output
            if not is_last:
                output = replace(output, spec=step.dst, shape=tuple(step.dst.local_shape))
            # `sides` has the types of recorded values, not of values between two steps. A value
            # between two steps has the type of the final result.
            make = self._move_texts(step, source, target=movement.output)
            if movement.cuts_gradient and is_last:
                make = _with_detach(make)
            statements.append(Statement([source], [output], make, (), path=movement.path))
            source = output
        return statements

    def _move_texts(
        self, step: Step, source: TracedValue, target: TracedValue
    ) -> Callable[[NameOf], list[str]]:
        """Return a function that returns the possible texts of one step towards a target."""
        if step.name == "Reshape":
            shape = ", ".join(map(str, step.dst.local_shape))
            return lambda name_of: [f"{name_of(source)}.reshape({shape})"]
        is_along_one = len(step.axes) == 1
        source_is_r = is_along_one and self._sides.is_r(source, step.axes[0])
        target_is_r = is_along_one and self._sides.is_r(target, step.axes[0])
        return lambda name_of: [
            move_text(step, name_of(source), target_is_r=target_is_r, source_is_r=source_is_r)
        ]

    def _linear(self, layer: LinearLayer) -> Statement:
        """Return the statement of a linear layer, with a statement for each operator as parts."""
        # `_operation` also adds the conversions that an operator needs to `found`. The statement of
        # the layer needs the same ones.
        parts = {id(one): self._operation(one) for one in layer.operations}
        # The product is mm(x, w) or addmm(bias, x, w).
        weight = parts[id(layer.transpose)].operands[0]
        if layer.view is not None:
            x = parts[id(layer.view)].operands[0]
        else:
            x = parts[id(layer.product)].operands[-2]
        operands = [x, weight]
        has_bias = len(layer.product.args) == 3
        if has_bias:
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


def _converted_value(value: TracedValue) -> TracedValue:
    """Return the value after a conversion to R: not a parameter, with a name such as `weight_r`."""
    hint = value.hint or value.parameter.rpartition(".")[2]
    return replace(value, parameter="", is_input=False, hint=f"{hint}_r" if hint else "")


def _with_detach(texts: Callable[[NameOf], list[str]]) -> Callable[[NameOf], list[str]]:
    """Return a function that adds `.detach()` to texts."""
    return lambda name_of: [f"{text}.detach()" for text in texts(name_of)]
