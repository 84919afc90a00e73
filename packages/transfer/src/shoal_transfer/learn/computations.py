"""Parameters that a loader computes by a known function: which elements are moved before it.

A loader may write values that it computes, each from one element that it reads, such as `weight +
1`. The loader's operators and the user's function run on the same labels. If their results agree,
each result shows the label of the element before the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from .numberings import LabelTable, Numbering
from .recorder import Recorder
from .replay import ComputedError, Elements, computed_values, replay_dtype
from .tape import Memory, MemoryView

Function = Callable[[Tensor], Tensor]
# brings labels of 49 bits between 1 and 2, so that functions such as an exponential stay finite
_SCALE = 2.0**-48


def elements_before(
    recorder: Recorder, operand: MemoryView, function: Function, sources: Container[Memory]
) -> Elements:
    """Return the elements from which a loader has computed a tensor by a function.

    The loader's operators and the function are replayed on the same labels, in float64. If they are
    the same operators, their results agree.

    Args:
        recorder: the recorder of the loader's run.
        operand: the tensor.
        function: computes each element that the loader writes from one moved element.
        sources: the memories of the checkpoint.

    Raises:
        ComputedError: the loader writes other values than the function returns.
    """
    first, second = (one._replace(scale=_SCALE) for one in recorder.numberings)
    found = computed_values(recorder.tape, operand, (first, second), recorder.scalars)
    memories = [memory for memory in found.memories if memory in sources]
    before = (_labels_of(memories, first), _labels_of(memories, second))
    after = _apply(function, before, operand.dtype)
    # an elementwise function of reversed labels returns reversed values
    backwards = _apply(function, (before[0].flip(0), before[1].flip(0)), operand.dtype)
    if not torch.equal(backwards[0].flip(0), after[0]):
        raise ComputedError("the function does not compute elements one by one")
    numbers = _table(after[0]).position(found.values[0])
    others = _table(after[1]).position(found.values[1])
    wrong = (numbers < 0) | (numbers != others)
    if bool(wrong.any()):
        raise ComputedError(f"{int(wrong.sum())} of {wrong.numel()} values are others")
    no_elements = torch.empty(0, dtype=torch.int64)
    positions = torch.cat([no_elements, *map(_positions_of, memories)])[numbers]
    constants = torch.zeros_like(found.values[0])
    return Elements(positions, constants, labelled=True, intermediates=found.intermediates)


def _positions_of(memory: Memory) -> Tensor:
    assert memory.first_position is not None, "the memory is labelled"
    return torch.arange(memory.first_position, memory.first_position + memory.size)


def _labels_of(memories: list[Memory], numbering: Numbering) -> Tensor:
    """Return the labels of all elements of memories, in float64."""
    labels = [torch.empty(0, dtype=torch.float64)]
    for memory in memories:
        labels_of_memory = numbering.label(_positions_of(memory), replay_dtype(memory.dtype))
        labels.append(labels_of_memory.to(torch.float64))
    return torch.cat(labels)


def _table(labels: Tensor) -> LabelTable:
    try:
        return LabelTable(labels)
    except ValueError:
        raise ComputedError("the function has one value for two elements") from None


def _apply(
    function: Function, labels: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the values of a function on labels, in float64 even if it casts to other dtypes."""
    recorder = Recorder()
    size = labels[0].numel()
    moved = torch.empty(size, dtype=dtype, device="meta")
    recorder.watch(moved, labelled=True)
    with torch.no_grad(), recorder:
        result = function(moved)
    if result.shape != moved.shape:
        raise ComputedError(f"the function makes {tuple(result.shape)} of ({size},)")
    tables = (_table(labels[0]), _table(labels[1]))
    return computed_values(recorder.tape, recorder.adopt(result), tables, recorder.scalars).values
