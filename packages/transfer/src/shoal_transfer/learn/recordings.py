"""Assignments from the record of a loader: directly from copies, else by replay on labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MappingError
from ..mapping.assignment import Assignment, Strided, assign_strided
from ..mapping.regions import count_elements, first_overlap
from ._torch import operator_name
from .element_maps import ElementMap, LabelledTensor, assign_elements
from .recorder import Recorder
from .replay import ComputedError
from .tape import Memory, Operand, Operation


class Source(NamedTuple):
    """A tensor of the checkpoint: its name and a contiguous meta tensor."""

    name: str
    tensor: Tensor


Labelled = dict[Memory, Source]
"""The sources by the memories of their meta tensors."""


def label_sources(recorder: Recorder, sources: Sequence[Source]) -> Labelled:
    """Watch the tensors of a checkpoint; their elements are labelled in order."""
    return {recorder.watch(source.tensor, labelled=True): source for source in sources}


def assign_tensor(
    recorder: Recorder, name: str, tensor: Tensor, sources: Labelled
) -> list[Assignment]:
    """Return the assignments that define a tensor after a loader has run.

    Args:
        recorder: of the loader's run.
        name: of the target tensor.
        tensor: a parameter or buffer after the run: a twin, or a tensor that the loader put in its
            place.
        sources: the tensors of the checkpoint.

    Raises:
        ComputedError: the loader computes values of the tensor.
    """
    target = _Target(recorder, name, recorder.adopt(tensor), sources)
    parts = target.direct_assignments()
    if parts is None:
        parts = target.replayed_assignments()
    dtypes = {source.name: source.tensor.dtype for source in sources.values()}
    found = []
    for part in parts:
        casts = part.source is not None and dtypes[part.source] != tensor.dtype
        found.append(replace(part, casts=casts))
    return found


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the server after the loader has run.

    Attributes:
        recorder: of the loader's run.
        name: of the tensor.
        operand: its place in watched memory.
        sources: the tensors of the checkpoint.
    """

    recorder: Recorder
    name: str
    operand: Operand
    sources: Labelled

    # --- copies of views --------------------------------------------------------------------------

    def direct_assignments(self) -> list[Assignment] | None:
        """Return the assignments if copies of views of sources are all that wrote to the tensor.

        None if it was written in another way, or not completely, or an element twice.
        """
        memory = self.operand.memory
        if not _is_contiguous(self.operand):
            return None
        if memory in self.sources:
            # the loader put a view of a source in the place of the parameter
            copy = self._copy_of_view(self.operand._replace(offset=0), self.operand)
            return None if copy is None else [copy]
        if memory.first_position is None:
            return None
        parts = []
        for number in memory.writers:
            part = self._direct_write(self.recorder.tape.operations[number])
            if part is None:
                return None
            parts.append(part)
        written = sum(count_elements(part.region) for part in parts)
        is_complete = written == prod(self.operand.size)
        if not is_complete or first_overlap([part.region for part in parts]) is not None:
            return None
        return parts

    def _direct_write(self, operation: Operation) -> Assignment | None:
        """Return the assignment of one write if it copies a view of a source, or fills."""
        written = operation.written[0]
        if len(operation.written) > 1 or written.dtype != self.operand.dtype:
            return None
        kind = operator_name(operation.operator)
        place = written._replace(offset=written.offset - self.operand.offset)
        if kind == "aten::copy_" and isinstance(operation.args[1], Operand):
            return self._copy_of_view(place, operation.args[1])
        if kind not in ("aten::fill_", "aten::zero_"):
            return None
        value = 0.0 if kind == "aten::zero_" else operation.args[1]
        if isinstance(value, Operand) or value in self.recorder.scalars:
            return None
        try:
            view = Strided(self.operand.size, place.offset, place.size, place.stride)
        except MappingError:
            return None
        return Assignment(self.name, view.region, fill=float(value))

    def _copy_of_view(self, place: Operand, source: Operand) -> Assignment | None:
        """Return the assignment of a copy from a view of a source to a place in this tensor.

        None if it is not such a copy, or a dim of a view walks along two dims of a tensor.
        """
        origin = self.sources.get(source.memory)
        if origin is None or source.memory.writers or source.dtype != source.memory.dtype:
            return None
        try:
            to = Strided(self.operand.size, place.offset, place.size, place.stride)
            strides = _broadcast_strides(source, place.size)
            of = Strided(tuple(origin.tensor.shape), source.offset, place.size, strides)
            return assign_strided(self.name, to, origin.name, of)
        except MappingError:
            return None

    # --- replay -----------------------------------------------------------------------------------

    def replayed_assignments(self) -> list[Assignment]:
        """Return the assignments from a replay on labels.

        Raises:
            ComputedError: the loader computes values of the tensor.
        """
        found = self.recorder.elements_of(self.operand)
        elements = ElementMap(found.positions, found.constants)
        parts = assign_elements(self.name, elements, self._labelled_tensors(found.positions))
        used = {part.source for part in parts}
        for source in self.sources.values():
            if source.name in used:
                _check_casts(source, self.operand.dtype, found.intermediates)
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
            source = self.sources.get(memory)
            if source is not None:
                tensors.append(LabelledTensor(source.name, tuple(source.tensor.shape), first))
                continue
            tensors.append(LabelledTensor(None, (memory.size,), first))
            inside = (positions >= first) & (positions < first + memory.size)
            if inside.any() and not self._keeps(memory, positions - first, inside):
                raise ComputedError("moves elements of parameters that it has not loaded")
        return tensors

    def _keeps(self, memory: Memory, indices: Tensor, inside: Tensor) -> bool:
        """Return whether elements of a memory are at their own places in this tensor."""
        if memory is not self.operand.memory:
            return False
        operand = self.operand
        places = torch.arange(memory.size)
        places = places.as_strided(operand.size, operand.stride, operand.offset)
        return torch.equal(indices[inside], places[inside])


def _broadcast_strides(source: Operand, size: tuple[int, ...]) -> list[int]:
    """Return the strides of a tensor that `copy_` broadcasts to a size."""
    missing = len(size) - len(source.size)
    lengths = (*([1] * missing), *source.size)
    strides = [0] * missing
    strides += source.stride
    return [
        stride if length == wanted else 0
        for stride, length, wanted in zip(strides, lengths, size, strict=True)
    ]


def _is_contiguous(operand: Operand) -> bool:
    expected = 1
    for size, stride in zip(reversed(operand.size), reversed(operand.stride), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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
