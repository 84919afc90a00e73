"""Assignments of copies between views, composed over the tensors that a loader makes in between.

Example: a loader clones a stack of 128 experts, and copies each expert from the clone to a parameter
of its own. The clone is defined once, by an assignment from the stack, and each copy is composed
with this assignment. A replay on labels would label all 128 experts for each copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MappingError
from ..mapping.assignment import Assignment, Strided, assign_strided
from ..mapping.regions import count_elements
from ._torch import operator_name
from .tape import Memory, MemoryView, Operation, Tape

_COPIES = {"aten::clone", "aten::_to_copy"}


class Source(NamedTuple):
    """A tensor of the checkpoint: its name and a contiguous meta tensor."""

    name: str
    tensor: Tensor


class Copies(NamedTuple):
    """Assignments of a target from sources.

    Attributes:
        parts: the assignments.
        dtypes: the dtypes of the tensors between the sources and the target.
    """

    parts: tuple[Assignment, ...]
    dtypes: frozenset[torch.dtype]


class TargetView(NamedTuple):
    """A strided view of a contiguous target.

    Attributes:
        name: name of the target.
        shape: shape of the target.
        view: the view; its offset counts from the first element of the target.
    """

    name: str
    shape: tuple[int, ...]
    view: MemoryView


class Definitions:
    """The assignments that define memories which operators have filled by copying.

    Args:
        tape: the record of a loader.
        sources: the tensors of the checkpoint by their memories.
    """

    def __init__(self, tape: Tape, sources: Mapping[Memory, Source]) -> None:
        self._tape = tape
        self._sources = sources
        self._found: dict[Memory, Copies | None] = {}

    def copy(self, place: TargetView, source: MemoryView) -> Copies | None:
        """Return the assignments of a copy to a place; None if assignments cannot express it.

        Args:
            place: the view that is written.
            source: the view that is read; `copy_` broadcasts it.
        """
        memory = source.memory
        if source.dtype != memory.dtype:
            return None
        origin = self._sources.get(memory)
        if origin is not None:
            shape = tuple(origin.tensor.shape)
            part = None if memory.writers else _assign(place, origin.name, shape, source)
            return None if part is None else Copies((part,), frozenset())
        earlier = self._definition_of(memory)
        if earlier is None:
            return None
        part = _assign(place, _name_of(memory), self._output_of(memory).size, source)
        if part is None:
            return None
        composed = [part.after(one) for one in earlier.parts]
        parts = tuple(one for one in composed if one is not None)
        if sum(count_elements(one.region) for one in parts) != prod(place.view.size):
            return None
        return Copies(parts, earlier.dtypes | {memory.dtype})

    def _definition_of(self, memory: Memory) -> Copies | None:
        """Return the assignments that define a memory; None if it is not the copy of one operator."""
        if memory not in self._found:
            self._found[memory] = self._define(memory)
        return self._found[memory]

    def _define(self, memory: Memory) -> Copies | None:
        if len(memory.writers) != 1 or memory.first_position is not None:
            return None
        operation = self._tape.operations[memory.writers[0]]
        if len(operation.outputs) != 1 or operation.outputs[0] is None:
            return None
        output = operation.outputs[0]
        if not is_contiguous(output) or prod(output.size) != memory.size:
            return None
        parts: list[Assignment] = []
        dtypes = set[torch.dtype]()
        blocks = _blocks_of(operation, output)
        if blocks is None:
            return None
        for view, source in blocks:
            copies = self.copy(TargetView(_name_of(memory), output.size, view), source)
            if copies is None:
                return None
            parts += copies.parts
            dtypes |= copies.dtypes
        return Copies(tuple(parts), frozenset(dtypes))

    def _output_of(self, memory: Memory) -> MemoryView:
        output = self._tape.operations[memory.writers[0]].outputs[0]
        assert output is not None, "the memory must have a definition"
        return output


def is_contiguous(operand: MemoryView) -> bool:
    """Return whether the elements of a view follow each other in memory."""
    expected = 1
    for size, stride in zip(reversed(operand.size), reversed(operand.stride), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _name_of(memory: Memory) -> str:
    return f"memory {memory.number}"


def _assign(
    place: TargetView, name: str, shape: tuple[int, ...], source: MemoryView
) -> Assignment | None:
    """Return the assignment of one copy; None if a dim of a view walks along two dims."""
    view = place.view
    try:
        to = Strided(place.shape, view.offset, view.size, view.stride)
        of = Strided(shape, source.offset, view.size, _broadcast_strides(source, view.size))
        return assign_strided(place.name, to, name, of)
    except MappingError:
        return None


def _broadcast_strides(source: MemoryView, size: tuple[int, ...]) -> list[int]:
    """Return the strides of a tensor that `copy_` broadcasts to a size."""
    missing = len(size) - len(source.size)
    lengths = (*([1] * missing), *source.size)
    strides = [0] * missing
    strides += source.stride
    return [
        stride if length == wanted else 0
        for stride, length, wanted in zip(strides, lengths, size, strict=True)
    ]


# --- operators that copy --------------------------------------------------------------------------


def _blocks_of(
    operation: Operation, output: MemoryView
) -> list[tuple[MemoryView, MemoryView]] | None:
    """Return the views of an output with the operands that they copy; None for other operators."""
    kind = operator_name(operation.operator)
    if kind in _COPIES:
        return [(output, operation.args[0])]
    if kind not in ("aten::cat", "aten::stack"):
        return None
    dim = _dim_of(operation) % max(len(output.size), 1)
    tensors: list[MemoryView] = operation.args[0]
    if kind == "aten::stack":
        return [*_stacked(output, tensors, dim)]
    return [*_concatenated(output, tensors, dim)]


def _dim_of(operation: Operation) -> int:
    arguments: tuple[Any, ...] = operation.args
    dim: int = arguments[1] if len(arguments) > 1 else operation.kwargs.get("dim", 0)
    return dim


def _concatenated(
    output: MemoryView, tensors: list[MemoryView], dim: int
) -> Iterator[tuple[MemoryView, MemoryView]]:
    first = 0
    for tensor in tensors:
        # `torch.cat` accepts empty tensors of one dim among tensors of any dims
        if not prod(tensor.size):
            continue
        offset = output.offset + first * output.stride[dim]
        first += tensor.size[dim]
        yield output._replace(offset=offset, size=tensor.size), tensor


def _stacked(
    output: MemoryView, tensors: list[MemoryView], dim: int
) -> Iterator[tuple[MemoryView, MemoryView]]:
    stride = (*output.stride[:dim], *output.stride[dim + 1 :])
    for index, tensor in enumerate(tensors):
        offset = output.offset + index * output.stride[dim]
        yield output._replace(offset=offset, size=tensor.size, stride=stride), tensor
