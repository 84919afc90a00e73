"""Linear layers in a trace: the operators that one call of `F.linear` calls.

A matrix product with a transposed weight, and the views around it, become one line of a program.

May import: trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_dtensor.internal import signature_of

from .trace import Entry, Movement, TracedOperation, TracedValue

_VIEWS = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_reshape_alias"})
_TRANSPOSE = frozenset({"aten::t"})
_PRODUCTS = frozenset({"aten::mm", "aten::addmm"})


@dataclass(frozen=True, slots=True, eq=False)
class LinearLayer:
    """The operators of one call of `F.linear`.

    Attributes:
        operations: all operators, in order; the last one makes the result.
        transpose: the transpose of the weight.
        product: the product of the rows and the transposed weight.
        view: the view of the operand as rows; None if the operand has two dims.
    """

    operations: tuple[TracedOperation, ...]
    transpose: TracedOperation
    product: TracedOperation
    view: TracedOperation | None = None


@dataclass(slots=True)
class _Uses:
    """The operation that makes each value, and the entries that read it, by the id of the value."""

    makers: dict[int, TracedOperation] = field(default_factory=dict)
    readers: dict[int, list[Entry]] = field(default_factory=dict)

    def note(self, entry: Entry) -> None:
        if isinstance(entry, Movement):
            self.readers.setdefault(id(entry.source), []).append(entry)
            return
        for output in entry.outputs:
            self.makers[id(output)] = entry
        for value in entry.operands:
            self.readers.setdefault(id(value), []).append(entry)

    def maker(self, value: TracedValue, names: frozenset[str]) -> TracedOperation | None:
        """Return the operation of one of these names that makes a value for one reader."""
        operation = self.makers.get(id(value))
        if operation is None or signature_of(operation.operator).name not in names:
            return None
        return operation if len(self.readers[id(value)]) == 1 else None

    def reader(self, value: TracedValue, names: frozenset[str]) -> TracedOperation | None:
        """Return the operation of one of these names that is the only one to read a value."""
        readers = self.readers.get(id(value), [])
        if len(readers) != 1 or isinstance(readers[0], Movement):
            return None
        return readers[0] if signature_of(readers[0].operator).name in names else None


def linear_layers(entries: Sequence[Entry]) -> dict[int, LinearLayer]:
    """Return the linear layers of a trace, by the id of their last operation."""
    uses = _Uses()
    for entry in entries:
        uses.note(entry)
    found = {}
    for entry in entries:
        if isinstance(entry, TracedOperation) and signature_of(entry.operator).name in _PRODUCTS:
            layer = _linear_layer(entry, uses)
            if layer is not None:
                found[id(layer.operations[-1])] = layer
    return found


def _linear_layer(product: TracedOperation, uses: _Uses) -> LinearLayer | None:
    """Return the layer of a product; None if the product is not part of a linear layer."""
    # some arguments are not tensors
    has_numbers = len(product.operands) != len(product.args)
    if product.kwargs or product.cuts_gradient or has_numbers:
        return None
    rows, columns = product.args[-2:]
    transpose = uses.maker(columns, _TRANSPOSE)
    if transpose is None:
        return None
    view = uses.maker(rows, _VIEWS)
    if view is None or len(view.operands[0].shape) < 3:
        return LinearLayer((transpose, product), transpose, product)
    last = uses.reader(product.outputs[0], _VIEWS)
    if last is None:
        return None
    return LinearLayer((transpose, view, product, last), transpose, product, view)
