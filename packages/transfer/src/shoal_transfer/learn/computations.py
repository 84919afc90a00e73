"""Parameters that a loader computes by a known function: the element from which it computes each.

A loader reads the tensors of a checkpoint and writes parameters. To learn where each element goes,
its operators are recorded on meta tensors, and replayed on labels: unique random numbers, one for
each element of the checkpoint (`numberings`). If a parameter has a label, the loader has moved the
label's element there.

A loader may also compute the values that it writes, each from one element that it reads, such as
`weight + 1`. Then the parameters have no labels. The user passes the function, here x -> x + 1, and
it runs on all labels, too. The position of a written value among the function's results is the
position of the element:

    labels of elements 0, 1, 2      70  20  90
    the function's results          71  21  91
    a parameter of the loader       [91, 71]    ->  computed from elements 2 and 0
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
# Labels are from 2**48 to 2**49. The factor brings them between 1 and 2, so that the results of
# functions such as an exponential are finite.
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
    # Each element has two labels. A value that belongs to an element by chance under the first
    # numbering belongs to another one, or to none, under the second.
    first, second = (one._replace(scale=_SCALE) for one in recorder.numberings)
    found = computed_values(recorder.tape, operand, (first, second), recorder.scalars)
    memories = [memory for memory in found.memories if memory in sources]
    labels = (_labels_of(memories, first), _labels_of(memories, second))
    results = _replay_function(function, labels, operand.dtype)
    # An elementwise function of reversed labels returns reversed values. Whether a function is
    # elementwise does not depend on the numbering, so one is enough.
    reversed_labels = (labels[0].flip(0), labels[1].flip(0))
    reversed_results = _replay_function(function, reversed_labels, operand.dtype)
    if not torch.equal(reversed_results[0].flip(0), results[0]):
        raise ComputedError("the function does not compute elements one by one")
    # The index of each written value among the function's results; -1: the function does not
    # return this value.
    index_by_first = _table(results[0]).position(found.values[0])
    index_by_second = _table(results[1]).position(found.values[1])
    wrong = (index_by_first < 0) | (index_by_first != index_by_second)
    if bool(wrong.any()):
        raise ComputedError(
            f"{int(wrong.sum())} of {wrong.numel()} values differ from the function's results"
        )
    # `torch.cat` needs a tensor, also if there are no memories.
    positions_of_labels = [torch.empty(0, dtype=torch.int64), *map(_positions_of, memories)]
    return Elements(
        positions=torch.cat(positions_of_labels)[index_by_first],
        # Every value was computed from an element, so no element is a constant.
        constants=torch.zeros_like(found.values[0]),
        labelled=True,
        intermediates=found.intermediates,
    )


def _positions_of(memory: Memory) -> Tensor:
    """Return the positions of a memory's elements among all labelled elements."""
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


def _replay_function(
    function: Function, labels: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the results of a function on labels, under both numberings.

    The function's operators are recorded on a meta tensor of `dtype`, and replayed on the labels.
    The replay computes in float64, also if the function casts to another dtype, because labels do
    not fit into a shorter one.
    """
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
