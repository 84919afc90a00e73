"""Memory that a recorder watches, and the operators that wrote to it, in order.

A `Memory` is a storage, a `MemoryView` is a tensor in it, and an `Operation` is a call that wrote
to memories. A `Tape` has them in order, and finds the operations that the values of a memory depend
on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch import Operator


@dataclass(slots=True, eq=False)
class Memory:
    """A storage that the recorder watches.

    Attributes:
        number: index of the memory on its tape.
        dtype: dtype of its elements.
        size: number of elements.
        holder: a meta tensor on this storage; it keeps the storage's address from being reused.
        first_position: position of the first element, if the elements are labelled; else None.
        constant: the initial values, if the memory had values; else None.
        writers: indices of the operations that write to it, in order.
    """

    number: int
    dtype: torch.dtype
    size: int
    holder: Tensor
    first_position: int | None = None
    constant: Tensor | None = None
    writers: list[int] = field(default_factory=list)


class MemoryView(NamedTuple):
    """A tensor argument of an operation, as a strided view of a memory."""

    memory: Memory
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A call of an operator that wrote to memory.

    Attributes:
        operator: the operator of aten.
        args: the positional arguments, with a MemoryView in place of each tensor.
        kwargs: the keyword arguments, with a MemoryView in place of each tensor.
        read: the MemoryViews among the arguments.
        written: the views that are written, including outputs with new memory.
        outputs: one entry per output of the operator: its view if it has new memory, else None.
    """

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: tuple[MemoryView, ...]
    written: tuple[MemoryView, ...] = ()
    outputs: tuple[MemoryView | None, ...] = ()


class Tape:
    """The memories and the operations of one run of a loader."""

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.operations: list[Operation] = []
        self.labelled = 0

    def add_memory(
        self, holder: Tensor, *, labelled: bool = False, constant: Tensor | None = None
    ) -> Memory:
        """Add the storage of a meta tensor.

        Args:
            holder: the meta tensor; its dtype is the dtype of the memory.
            labelled: number the elements.
            constant: the values of the memory, as a flat tensor.
        """
        size = holder.untyped_storage().nbytes() // holder.element_size()
        memory = Memory(len(self.memories), holder.dtype, size, holder, constant=constant)
        if labelled:
            memory.first_position = self.labelled
            self.labelled += size
        self.memories.append(memory)
        return memory

    def add_operation(self, operation: Operation) -> None:
        """Add an operation at the end."""
        number = len(self.operations)
        self.operations.append(operation)
        for memory in {operand.memory for operand in operation.written}:
            memory.writers.append(number)

    def needed_for(self, memories: Iterable[Memory]) -> Sequence[Operation]:
        """Return the operations, in order, that the present values of some memories depend on."""
        found = set[int]()
        pending: list[int] = []
        seen = set[Memory]()
        self._add_writers(memories, len(self.operations), seen, pending)
        while pending:
            number = -heappop(pending)
            if number in found:
                continue
            found.add(number)
            operation = self.operations[number]
            touched = [operand.memory for operand in (*operation.read, *operation.written)]
            self._add_writers(touched, number, seen, pending)
        return [self.operations[number] for number in sorted(found)]

    @staticmethod
    def _add_writers(
        memories: Iterable[Memory], before: int, seen: set[Memory], pending: list[int]
    ) -> None:
        """Add the writers of memories before an operation.

        Operations are visited from the last to the first. The first visit of a memory therefore has
        all of its writers that any later visit would have.
        """
        for memory in memories:
            if memory in seen:
                continue
            seen.add(memory)
            for number in memory.writers[: bisect_left(memory.writers, before)]:
                heappush(pending, -number)
