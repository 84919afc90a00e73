"""Replay of recorded operations on labels, to find out which elements a tensor consists of.

A label is a number that stands for one element of a source. The operations that a tensor depends on
run on labels in place of values, so operators that only move elements move their labels. This is
done under two random numberings; if an operator computes new values, the two results do not agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_dtensor.internal import pytree

from ._torch import makes_constants, operator_name
from .numberings import Labels
from .tape import Memory, MemoryView, Operation, Tape

Numberings = tuple[Labels, Labels]


class ComputedError(Exception):
    """Values that are neither elements of sources nor constants, or that cannot be replayed.

    The caller adds the name of the parameter. `reason` names the operator.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Elements(NamedTuple):
    """The content of a tensor.

    Attributes:
        positions: the position of each element among all labelled elements; -1 for a constant.
            int64.
        constants: the values of the constants; 0 elsewhere.
        labelled: whether elements of sources or of parameters are among the elements.
        intermediates: dtypes of the memories between the sources and the tensor, through which the
            values passed.
    """

    positions: Tensor
    constants: Tensor
    labelled: bool
    intermediates: frozenset[torch.dtype]


def elements_of(
    tape: Tape, operand: MemoryView, numberings: Numberings, scalars: Mapping[float, int]
) -> Elements:
    """Replay the operations that a tensor depends on, under two numberings.

    Args:
        tape: the recorded operations.
        operand: the tensor.
        numberings: two random numberings.
        scalars: positions of the labels that were read as Python numbers.

    Raises:
        ComputedError: an operation computes new values.
    """
    replay = _Replay(numberings, scalars)
    needed = tape.needed_for([operand.memory])
    for operation in needed:
        replay.run(operation)
    views = replay.views(operand)
    positions, constants = compare(views, numberings, operand.dtype)
    passed = replay.dtypes_on_path(needed, operand)
    return Elements(positions, constants, replay.is_labelled(operand.memory), passed)


class Computed(NamedTuple):
    """The values of a tensor, whatever operators have computed.

    Attributes:
        values: the values under each of two numberings.
        memories: labelled memories that the values may depend on.
        intermediates: as in `Elements`.
    """

    values: tuple[Tensor, Tensor]
    memories: list[Memory]
    intermediates: frozenset[torch.dtype]


def computed_values(
    tape: Tape, operand: MemoryView, numberings: Numberings, scalars: Mapping[float, int]
) -> Computed:
    """Replay the operations that a tensor depends on, which may compute new values.

    Args:
        tape: the recorded operations.
        operand: the tensor.
        numberings: two random numberings.
        scalars: positions of the labels that were read as Python numbers.

    Raises:
        ComputedError: an operator cannot run on labels.
    """
    replay = _Replay(numberings, scalars, may_compute=True)
    needed = tape.needed_for([operand.memory])
    read = {operand.memory: None}
    for operation in needed:
        replay.run(operation)
        read |= dict.fromkeys(other.memory for other in operation.read)
    memories = [memory for memory in read if memory.first_position is not None]
    return Computed(replay.views(operand), memories, replay.dtypes_on_path(needed, operand))


def results_of(
    tape: Tape, operation: Operation, numberings: Numberings, scalars: Mapping[float, int]
) -> Any:
    """Return the results of an operation under the first numbering.

    Args:
        tape: the operations before this one.
        operation: an operation that does not write to its arguments.
        numberings: two random numberings.
        scalars: positions of the labels that were read as Python numbers.

    Raises:
        ComputedError: the operation, or one that it depends on, cannot run on labels.
    """
    replay = _Replay(numberings, scalars)
    for earlier in tape.needed_for([operand.memory for operand in operation.read]):
        replay.run(earlier)
    results, _ = replay.call(operation, 0)
    return results


def compare(
    views: tuple[Tensor, Tensor], numberings: Numberings, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return positions and constants of values under two numberings that must agree.

    Raises:
        ComputedError: a value is neither the same element nor the same constant under both.
    """
    first, second = views
    positions = numberings[0].position(first)
    others = numberings[1].position(second)
    is_element = (positions >= 0) & (positions == others)
    is_constant = first == second
    if dtype.is_floating_point:
        is_constant |= first.isnan() & second.isnan()
    wrong = ~(is_element | is_constant)
    if wrong.any():
        raise ComputedError(f"computes {int(wrong.sum())} of {wrong.numel()} values")
    constants = torch.where(is_element, torch.zeros_like(first), first)
    return torch.where(is_element, positions, -1), constants


class _Replay:
    """A replay of operations: the values of memories under two numberings, flat and on the CPU."""

    def __init__(
        self, numberings: Numberings, scalars: Mapping[float, int], *, may_compute: bool = False
    ) -> None:
        self._numberings = numberings
        self._scalars = scalars
        self._may_compute = may_compute
        self._values: dict[Memory, tuple[Tensor, Tensor]] = {}
        self._labelled = set[Memory]()

    def is_labelled(self, memory: Memory) -> bool:
        """Return whether elements of a memory may be labels."""
        return memory.first_position is not None or memory in self._labelled

    def dtypes_on_path(
        self, operations: Sequence[Operation], operand: MemoryView
    ) -> frozenset[torch.dtype]:
        """Return the dtypes of the memories between the sources and a tensor."""
        dtypes = set[torch.dtype]()
        for operation in operations:
            for other in operation.written:
                if other.memory is not operand.memory and self.is_labelled(other.memory):
                    dtypes.add(other.memory.dtype)
        return frozenset(dtypes)

    def views(self, operand: MemoryView) -> tuple[Tensor, Tensor]:
        """Return a tensor's values under both numberings."""
        return self._view_of(operand, 0), self._view_of(operand, 1)

    def _view_of(self, operand: MemoryView, side: int) -> Tensor:
        """Return a tensor's values under one numbering.

        If nothing wrote to the memory, only the labels of the view are computed: a view of one
        expert does not need labels for all experts.
        """
        memory = operand.memory
        if memory in self._values or memory.first_position is None:
            return _view(self._values_of(memory)[side], operand)
        dtype = self._label_dtype(memory)
        return self._numberings[side].label(_positions_of(operand), dtype)

    @staticmethod
    def _label_dtype(memory: Memory) -> torch.dtype:
        dtype = replay_dtype(memory.dtype)
        if dtype == torch.bool:
            raise ComputedError("copies a tensor of bools by more than one operator")
        return dtype

    def run(self, operation: Operation) -> None:
        """Run an operation under both numberings.

        Raises:
            ComputedError: the results are not elements of its inputs.
        """
        name = operator_name(operation.operator)
        for operand in (*operation.read, *operation.written):
            if operand.dtype != operand.memory.dtype:
                raise ComputedError(
                    f"reads memory of {operand.memory.dtype} as {operand.dtype} in {name}"
                )
        for memory in {output.memory for output in operation.outputs if output is not None}:
            dtype = replay_dtype(memory.dtype)
            self._values[memory] = (
                torch.zeros(memory.size, dtype=dtype),
                torch.zeros(memory.size, dtype=dtype),
            )
        for operand in operation.written:
            self._values_of(operand.memory)
        labelled = any(self.is_labelled(operand.memory) for operand in operation.read)
        has_scalar = False
        for side in range(2):
            has_scalar |= self._run_once(operation, side)
        if not (labelled or has_scalar):
            return
        self._labelled.update(operand.memory for operand in operation.written)
        if self._may_compute:
            return
        for operand in operation.written:
            self._check_written(operation, operand)

    def _check_written(self, operation: Operation, operand: MemoryView) -> None:
        """Check that an operation wrote elements of its inputs, or constants.

        Raises:
            ComputedError: the operation wrote other values, or integers or bools that depend on the
                values of floating point inputs, such as the indices of elements that are not 0.
        """
        name = operator_name(operation.operator)
        try:
            positions, _ = compare(self.views(operand), self._numberings, operand.dtype)
        except ComputedError as error:
            raise ComputedError(f"{error.reason} by {name}") from None
        if operand.dtype.is_floating_point or makes_constants(operation.operator):
            return
        from_values = any(
            other.dtype.is_floating_point and self.is_labelled(other.memory)
            for other in operation.read
        )
        if from_values and bool((positions < 0).any()):
            raise ComputedError(f"branches on values of its tensors, by {name}")

    def _run_once(self, operation: Operation, side: int) -> bool:
        """Run an operation under one numbering; return whether it had labels as numbers."""
        results, has_scalar = self.call(operation, side)
        flat = [value for value in pytree.tree_leaves(results) if isinstance(value, Tensor)]
        for output, result in zip(operation.outputs, flat, strict=True):
            if output is not None:
                _view(self._values[output.memory][side], output).copy_(result)
        return has_scalar

    def call(self, operation: Operation, side: int) -> tuple[Any, bool]:
        """Return the results of an operation, and whether it had labels as numbers.

        Raises:
            ComputedError: the operator cannot run on labels.
        """
        has_scalar = False

        def to_labels(value: Any) -> Any:
            nonlocal has_scalar
            if isinstance(value, MemoryView):
                return self._view_of(value, side)
            if isinstance(value, torch.dtype):
                return replay_dtype(value)
            if type(value) in (int, float) and value in self._scalars:
                has_scalar = True
                position = torch.tensor(self._scalars[value])
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                return self._numberings[side].label(position, dtype).item()
            return value

        args, kwargs = pytree.tree_map(
            to_labels, (operation.args, operation.kwargs), is_leaf=_is_operand
        )
        try:
            with _default_dtype(torch.float64):
                return operation.operator(*args, **kwargs), has_scalar
        except (RuntimeError, IndexError, NotImplementedError) as error:
            name = operator_name(operation.operator)
            raise ComputedError(f"calls {name}, which fails on labels ({error})") from error

    def _values_of(self, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return the values of a memory; its initial values if nothing has written to it."""
        if memory in self._values:
            return self._values[memory]
        dtype = replay_dtype(memory.dtype)
        if memory.first_position is not None:
            dtype = self._label_dtype(memory)
            positions = torch.arange(memory.first_position, memory.first_position + memory.size)
            first, second = (numbering.label(positions, dtype) for numbering in self._numberings)
        elif memory.constant is not None:
            first = memory.constant.to("cpu", dtype, copy=True)
            second = first.clone()
        else:
            raise ComputedError("reads a meta tensor that does not belong to the checkpoint")
        self._values[memory] = (first, second)
        return first, second


def replay_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that holds labels in place of values of a dtype.

    Raises:
        ComputedError: the dtype is complex.
    """
    if dtype.is_complex:
        raise ComputedError(f"creates values of {dtype}")
    if dtype.is_floating_point:
        return torch.float64
    return torch.bool if dtype == torch.bool else torch.int64


def _view(flat: Tensor, operand: MemoryView) -> Tensor:
    return flat.as_strided(operand.size, operand.stride, operand.offset)


def _positions_of(operand: MemoryView) -> Tensor:
    """Return the positions of the elements of a view of labelled memory."""
    assert operand.memory.first_position is not None, "the memory must be labeled"
    positions = torch.tensor(operand.memory.first_position + operand.offset)
    for size, stride in zip(operand.size, operand.stride, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(size) * stride
    return positions


def _is_operand(value: Any) -> bool:
    return isinstance(value, MemoryView)


class _default_dtype:
    """Sets torch's default dtype for a while."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._before)
