"""Assignments from the record of a loader: directly from copies, else by replay on labels.

The tape has the operations that wrote to a tensor. If all of them copy views of sources, or fill,
the assignments follow from the views. Otherwise the operations are replayed on labels, and
`element_maps` makes assignments of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..errors import MappingError
from ..mapping.assignment import Assignment, Strided
from ..mapping.regions import count_elements, first_overlap
from ._torch import operator_name
from .computations import Function, elements_before
from .definitions import Definitions, Source, TargetView, is_contiguous
from .element_maps import ElementMap, LabelledTensor, assign_elements
from .recorder import Recorder
from .replay import ComputedError
from .tape import Memory, MemoryView, Operation


class Checkpoint:
    """The tensors that a loader reads, watched by a recorder.

    Args:
        recorder: the recorder of the loader's run; it labels the elements in order.
        sources: the tensors.

    Attributes:
        by_memory: the tensors by the memories of their meta tensors.
        by_name: the tensors by name.
        definitions: the assignments of tensors that the loader made from them.
    """

    def __init__(self, recorder: Recorder, sources: Sequence[Source]) -> None:
        self.by_memory: dict[Memory, Source] = {}
        for source in sources:
            self.by_memory[recorder.watch(source.tensor, labelled=True)] = source
        self.by_name = {source.name: source for source in sources}
        self.definitions = Definitions(recorder.tape, self.by_memory)


def assign_tensor(
    recorder: Recorder,
    name: str,
    tensor: Tensor,
    checkpoint: Checkpoint,
    *,
    function: Function | None = None,
) -> list[Assignment]:
    """Return the assignments that define a tensor after a loader has run.

    Args:
        recorder: the recorder of the loader's run.
        name: name of the target tensor.
        tensor: a parameter or buffer after the run: a twin, or a tensor that the loader put in its
            place.
        checkpoint: the tensors that the loader read.
        function: the function by which the loader computes the tensor; the assignments are then for
            the elements before the computation.

    Raises:
        ComputedError: the loader computes values of the tensor in another way.
    """
    target = _Target(recorder, name, recorder.adopt(tensor), checkpoint)
    parts = target.direct_assignments() if function is None else None
    if parts is None:
        parts = target.replayed_assignments(function)
    found = []
    for part in parts:
        if part.source is not None:
            dtype = checkpoint.by_name[part.source].tensor.dtype
            part = replace(part, casts=dtype != tensor.dtype)
        found.append(part)
    return found


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the server after the loader has run.

    Attributes:
        recorder: the recorder of the loader's run.
        name: name of the tensor.
        operand: the tensor as a view of watched memory.
        checkpoint: the tensors that the loader read.
    """

    recorder: Recorder
    name: str
    operand: MemoryView
    checkpoint: Checkpoint

    # --- copies of views --------------------------------------------------------------------------

    def direct_assignments(self) -> list[Assignment] | None:
        """Return the assignments if only copies of views, and fills, wrote to the tensor.

        None if another operator wrote to it, or if an element was written twice or not at all.

        Raises:
            ComputedError: values are rounded twice.
        """
        memory = self.operand.memory
        if not is_contiguous(self.operand):
            return None
        if memory.first_position is None or memory in self.checkpoint.by_memory:
            # the loader replaced the parameter by a view of a source, or by a tensor that it made
            return self._copy(self.operand._replace(offset=0), self.operand)
        parts: list[Assignment] = []
        for number in memory.writers:
            written = self._direct_write(self.recorder.tape.operations[number])
            if written is None:
                return None
            parts += written
        count = sum(count_elements(part.region) for part in parts)
        is_complete = count == prod(self.operand.size)
        if not is_complete or first_overlap([part.region for part in parts]) is not None:
            return None
        return parts

    def _direct_write(self, operation: Operation) -> list[Assignment] | None:
        """Return the assignments of one write if it copies views of sources, or fills."""
        written = operation.written[0]
        if len(operation.written) > 1 or written.dtype != self.operand.dtype:
            return None
        name = operator_name(operation.operator)
        view = written._replace(offset=written.offset - self.operand.offset)
        if name == "aten::copy_" and isinstance(operation.args[1], MemoryView):
            return self._copy(view, operation.args[1])
        if name not in ("aten::fill_", "aten::zero_"):
            return None
        value = 0.0 if name == "aten::zero_" else operation.args[1]
        if isinstance(value, MemoryView) or value in self.recorder.scalars:
            return None
        try:
            place = Strided(self.operand.size, view.offset, view.size, view.stride)
        except MappingError:
            return None
        return [Assignment(self.name, place.region, fill=float(value))]

    def _copy(self, view: MemoryView, source: MemoryView) -> list[Assignment] | None:
        """Return the assignments of a copy to a view of this tensor; None if replay is needed."""
        place = TargetView(self.name, self.operand.size, view)
        copies = self.checkpoint.definitions.copy(place, source)
        if copies is None:
            return None
        self._check_rounding(copies.parts, copies.dtypes)
        return [*copies.parts]

    def _check_rounding(
        self, parts: Sequence[Assignment], intermediates: frozenset[torch.dtype]
    ) -> None:
        """Check that the values are rounded at most once on their way.

        Raises:
            ComputedError: the values are rounded twice.
        """
        for name in {part.source for part in parts if part.source is not None}:
            _check_casts(self.checkpoint.by_name[name], self.operand.dtype, intermediates)

    # --- replay -----------------------------------------------------------------------------------

    def replayed_assignments(self, function: Function | None) -> list[Assignment]:
        """Return the assignments from a replay on labels.

        Raises:
            ComputedError: the loader computes values of the tensor in another way than by the
                function.
        """
        if function is None:
            found = self.recorder.elements_of(self.operand)
        else:
            found = elements_before(
                self.recorder, self.operand, function, self.checkpoint.by_memory
            )
        elements = ElementMap(found.positions, found.constants)
        parts = assign_elements(self.name, elements, self._labelled_tensors(found.positions))
        self._check_rounding(parts, found.intermediates)
        return parts

    def _labelled_tensors(self, positions: Tensor) -> list[LabelledTensor]:
        """Return all labelled tensors, in the order of their positions.

        Raises:
            ComputedError: the tensor has elements of a parameter that nothing loaded, other than
                its own in their places.
        """
        tensors = []
        for memory in self.recorder.tape.memories:
            first = memory.first_position
            if first is None:
                continue
            source = self.checkpoint.by_memory.get(memory)
            if source is not None:
                tensors.append(LabelledTensor(source.name, tuple(source.tensor.shape), first))
                continue
            tensors.append(LabelledTensor(None, (memory.size,), first))
            inside = (positions >= first) & (positions < first + memory.size)
            if inside.any() and not self._keeps(memory, positions - first, inside):
                raise ComputedError("moves elements of parameters before it loads them")
        return tensors

    def _keeps(self, memory: Memory, indices: Tensor, inside: Tensor) -> bool:
        """Return whether elements of a memory are at their own places in this tensor."""
        if memory is not self.operand.memory:
            return False
        operand = self.operand
        places = torch.arange(memory.size)
        places = places.as_strided(operand.size, operand.stride, operand.offset)
        return torch.equal(indices[inside], places[inside])


# --- casts ----------------------------------------------------------------------------------------


def _check_casts(
    source: Source, target: torch.dtype, intermediates: frozenset[torch.dtype]
) -> None:
    """Check that the values are rounded at most once on their way.

    Raises:
        ComputedError: an intermediate dtype holds neither the source's values nor the target's.
    """
    dtype = source.tensor.dtype
    for between in intermediates - {target}:
        keeps_target = _holds(between, target) or _holds(target, dtype)
        if not (_holds(between, dtype) and keeps_target):
            raise ComputedError(
                f"casts {source.name!r} from {dtype} over {between} to {target}, which rounds twice"
            )


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype has all values of another one."""
    if dtype == other:
        return True
    if dtype.is_floating_point != other.is_floating_point or torch.bool in (dtype, other):
        return False
    if not dtype.is_floating_point:
        one = torch.iinfo(dtype)
        two = torch.iinfo(other)
        return one.min <= two.min and one.max >= two.max
    wide = torch.finfo(dtype)
    narrow = torch.finfo(other)
    is_finer = wide.eps <= narrow.eps and wide.tiny <= narrow.tiny
    return is_finer and wide.max >= narrow.max
