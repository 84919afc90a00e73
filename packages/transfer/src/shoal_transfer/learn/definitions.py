"""Assignments of copies that a loader makes in several steps, with tensors of its own in between.

An assignment states which region of a target gets the values of which region of a source. Example:
a loader clones a stack of 128 experts, and copies each expert from the clone to a parameter of its
own. One assignment from the stack *defines* the clone: it states the origin of all its values. Each
copy from the clone is an assignment too. It is composed with the definition, which gives an
assignment from the stack to the parameter, without the clone.

Copies that assignments cannot express are found by a replay on labels (`replay`): the operators of
the loader run again, on tensors that have the positions of elements as values. In the example, a
replay would run on all 128 experts again for each of the 128 copies.
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
        dtypes: the dtypes of the tensors between the sources and the target, in each of which the
            values may have been rounded.
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
    """The assignments that define the memories of a loader, from tensors of the checkpoint.

    A memory is a storage on the tape of the recorder (`tape`). It has a definition if one operator
    has filled it by copying. The operator may have read a memory that has a definition too, so
    `copy` and `_definition_of` call each other. The recursion ends at tensors of the checkpoint.

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
        # The view reads the bytes of the memory as another dtype (`view(dtype)`).
        if source.dtype != memory.dtype:
            return None
        origin = self._sources.get(memory)
        if origin is not None:
            return _copy_of_checkpoint(place, origin, source)
        definition = self._definition_of(memory)
        if definition is None:
            return None
        # The output of the operator that defines a memory fills all of it, so the shape of the
        # output is the shape of the memory (`_define`).
        shape = self._output_of(memory).size
        last_step = _assign(place, _name_of(memory), shape, source)
        if last_step is None:
            return None
        # From the checkpoint to the memory, and then from the memory to the place. The composition
        # is None if the place reads no element that the first step writes.
        composed = [last_step.after(first_step) for first_step in definition.parts]
        parts = tuple(part for part in composed if part is not None)
        # The parts must write each element of the place, and only once.
        if sum(count_elements(part.region) for part in parts) != prod(place.view.size):
            return None
        return Copies(parts, definition.dtypes | {memory.dtype})

    def _definition_of(self, memory: Memory) -> Copies | None:
        """Return the assignments that define a memory; None if no single operator has copied it."""
        if memory not in self._found:
            self._found[memory] = self._define(memory)
        return self._found[memory]

    def _define(self, memory: Memory) -> Copies | None:
        """Return the assignments of the operator that has filled a memory, as `_definition_of`."""
        # Elements have positions (`Memory.first_position`) if they had values before any operator
        # of the loader wrote to them, so the operator may not be the only origin of values.
        if len(memory.writers) != 1 or memory.first_position is not None:
            return None
        operation = self._tape.operations[memory.writers[0]]
        if len(operation.outputs) != 1 or operation.outputs[0] is None:
            return None
        output = operation.outputs[0]
        # The operator must have filled all of the memory, so that an offset is an element's index.
        if not is_contiguous(output) or prod(output.size) != memory.size:
            return None
        blocks = _blocks_of(operation, output)
        if blocks is None:
            return None
        parts: list[Assignment] = []
        dtypes = set[torch.dtype]()
        for view, source in blocks:
            # This defines the memories that the operator has read first.
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


def _copy_of_checkpoint(place: TargetView, origin: Source, source: MemoryView) -> Copies | None:
    """Return the assignment of a copy from a tensor of the checkpoint; None if it was changed."""
    if source.memory.writers:
        return None
    part = _assign(place, origin.name, tuple(origin.tensor.shape), source)
    if part is None:
        return None
    return Copies((part,), frozenset())


def _assign(
    place: TargetView, name: str, shape: tuple[int, ...], source: MemoryView
) -> Assignment | None:
    """Return the assignment of one copy, or None if assignments cannot express it.

    They cannot if one dim of a view moves along two dims of its tensor at once. Example: the only
    dim of `x.diagonal()` goes from x[0, 0] to x[1, 1].

    Args:
        place: the view that is written.
        name: the name of the tensor that is read.
        shape: the shape of this tensor. It is contiguous and begins at the start of its memory, so
            the offset of a view in the memory is an offset in the tensor.
        source: the view that is read.
    """
    view = place.view
    try:
        to = Strided(place.shape, view.offset, view.size, view.stride)
        of = Strided(shape, source.offset, view.size, _broadcast_strides(source, view.size))
        return assign_strided(place.name, to, name, of)
    except MappingError:
        return None


def _broadcast_strides(source: MemoryView, size: tuple[int, ...]) -> list[int]:
    """Return the strides of a tensor that `copy_` broadcasts to a size.

    Example: (4, 1) with the strides (1, 1), broadcast to (2, 4, 3), has the strides (0, 1, 0).
    """
    missing = len(size) - len(source.size)
    strides = [0] * missing
    for length, stride, wanted in zip(source.size, source.stride, size[missing:], strict=True):
        is_broadcast = length != wanted
        strides.append(0 if is_broadcast else stride)
    return strides


# --- operators that copy --------------------------------------------------------------------------


def _blocks_of(
    operation: Operation, output: MemoryView
) -> list[tuple[MemoryView, MemoryView]] | None:
    """Return the views of an output with the operands that they copy; None for other operators."""
    name = operator_name(operation.operator)
    if name in _COPIES:
        return [(output, operation.args[0])]
    if name not in ("aten::cat", "aten::stack"):
        return None
    # A negative dim counts from the end. Outputs of `cat` and `stack` have at least one dim.
    dim = _dim_of(operation) % len(output.size)
    tensors: list[MemoryView] = operation.args[0]
    if name == "aten::stack":
        return [*_blocks_of_stack(output, tensors, dim)]
    return [*_blocks_of_concatenation(output, tensors, dim)]


def _dim_of(operation: Operation) -> int:
    arguments: tuple[Any, ...] = operation.args
    dim: int = arguments[1] if len(arguments) > 1 else operation.kwargs.get("dim", 0)
    return dim


def _blocks_of_concatenation(
    output: MemoryView, tensors: list[MemoryView], dim: int
) -> Iterator[tuple[MemoryView, MemoryView]]:
    """Yield the view of the output that each operand of `cat` fills, with the operand."""
    first = 0
    for tensor in tensors:
        # An empty tensor adds nothing, and may be of shape (0,) among tensors of more dims.
        if not prod(tensor.size):
            continue
        offset = output.offset + first * output.stride[dim]
        first += tensor.size[dim]
        yield output._replace(offset=offset, size=tensor.size), tensor


def _blocks_of_stack(
    output: MemoryView, tensors: list[MemoryView], dim: int
) -> Iterator[tuple[MemoryView, MemoryView]]:
    """Yield the view of the output that each operand of `stack` fills, with the operand.

    Operand i fills index i along `dim`, so its view has all dims of the output but this one.
    """
    stride = (*output.stride[:dim], *output.stride[dim + 1 :])
    for index, tensor in enumerate(tensors):
        offset = output.offset + index * output.stride[dim]
        yield output._replace(offset=offset, size=tensor.size, stride=stride), tensor
