"""The record of a forward: values, operators on local tensors, and moves between layouts.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal_dtensor import Replicate, Spec
from shoal_dtensor.internal import Plan, signature_of


@dataclass(slots=True, eq=False)
class TracedValue:
    """A local tensor of the recorded forward.

    Attributes:
        shape: the local shape.
        dtype: the dtype.
        spec: the layout; None for a value inside of a local function, and for a tensor that an
            operator makes of numbers, which is replicated.
        is_inside: whether the value is an intermediate result inside of a local function, so that
            its layout is unknown.
        takes_gradient: whether a gradient reaches the value.
        is_input: whether the value is an input of the program.
        parameter: the logical name of a parameter or buffer; empty for other values.
        hint: the name that the value gets in the program, if it is free.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec | None = None
    is_inside: bool = False
    takes_gradient: bool = False
    is_input: bool = False
    parameter: str = ""
    hint: str = ""

    def is_replicated(self, axis: int) -> bool:
        """Return whether the ranks along a mesh axis have equal tensors."""
        if self.spec is None:
            return not self.is_inside
        if self.spec.mesh.shape[axis] == 1:
            return True
        return isinstance(self.spec.placements[axis], Replicate)


@dataclass(slots=True, eq=False)
class TracedOperation:
    """An operator on local tensors.

    Attributes:
        operator: the overload.
        args: its positional arguments, with a `TracedValue` in place of each tensor.
        kwargs: its keyword arguments, also with a `TracedValue` in place of each tensor.
        outputs: the tensors among its results.
        group: the number of the operator of the forward that calls this operator.
        path: the path of the module whose forward calls the operator.
        cuts_gradient: whether it runs under `no_grad` on values that take gradients.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[TracedValue]
    group: int
    path: str
    cuts_gradient: bool = False

    @property
    def operands(self) -> list[TracedValue]:
        """The values among the arguments, in order."""
        return [*values_in((self.args, self.kwargs))]

    @property
    def is_view(self) -> bool:
        """True if an output may have the memory of an operand; the trace has no writes."""
        arguments = signature_of(self.operator).arguments
        return any(argument.alias_info is not None for argument in arguments)


@dataclass(slots=True, eq=False)
class Movement:
    """A redistribution of one value.

    Attributes:
        plan: the steps of the redistribution.
        source: the value before the steps.
        output: the value after the steps.
        path: the path of the module whose forward has the redistribution.
    """

    plan: Plan
    source: TracedValue
    output: TracedValue
    path: str

    @property
    def cuts_gradient(self) -> bool:
        """True if the move runs under `no_grad` on a value that takes a gradient."""
        return self.source.takes_gradient and not self.output.takes_gradient


Entry = TracedOperation | Movement


@dataclass(slots=True, eq=False)
class Trace:
    """A recorded forward.

    Attributes:
        entries: the operations and movements, in order.
        parameters: the values of parameters and buffers, by logical name.
        inputs: the values of the inputs, by the name of the argument.
        arguments: the names of all arguments, also of those that are not tensors.
        results: the structure that the forward returns, with values in it.
    """

    entries: list[Entry] = field(default_factory=list)
    parameters: dict[str, TracedValue] = field(default_factory=dict)
    inputs: dict[str, TracedValue] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    results: Any = None

    def without_dead_entries(self) -> list[Entry]:
        """Return the entries that a result depends on."""
        needed = {*map(id, values_in(self.results))}
        kept: list[Entry] = []
        for entry in reversed(self.entries):
            outputs = [entry.output] if isinstance(entry, Movement) else entry.outputs
            if needed.isdisjoint(map(id, outputs)):
                continue
            kept.append(entry)
            operands = [entry.source] if isinstance(entry, Movement) else entry.operands
            needed.update(map(id, operands))
        return kept[::-1]


def values_in(structure: Any) -> Iterator[TracedValue]:
    """Yield the values in nested lists, tuples and mappings, in order."""
    if isinstance(structure, TracedValue):
        yield structure
    elif isinstance(structure, Mapping):
        yield from values_in([*structure.values()])
    elif isinstance(structure, Sequence) and not isinstance(structure, str):
        for item in structure:
            yield from values_in(item)
