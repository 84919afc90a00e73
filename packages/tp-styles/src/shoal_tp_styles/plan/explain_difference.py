"""Faults that explain the values of simulated ranks, in the words of `certify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import missing_all_reduce, too_large, too_small


def explain_difference(
    values: Sequence[Tensor | None],
    expected: Tensor | None,
    mesh: DeviceMesh,
    are_same: Callable[[Tensor, Tensor], bool],
) -> str:
    """Return the fault that explains the values of all ranks; empty if no fault does.

    Args:
        values: of the ranks, in row-major order of the mesh.
        expected: the value of the plain model.
        mesh: the mesh of the ranks.
        are_same: function that compares two tensors up to sums of another order.
    """
    if expected is None or expected.is_complex() or expected.layout is not torch.strided:
        return ""
    tensors = list[Tensor]()
    for value in values:
        if value is None or value.shape != expected.shape:
            return ""
        tensors.append(value)
    stacked = torch.stack(tensors).double()
    by_rank = stacked.view(*mesh.shape, *expected.shape)
    are_replicas = all(are_same(tensor, tensors[0]) for tensor in tensors)
    for axes in _sets_of_axes(mesh):
        names = [mesh.axis_names[axis] for axis in axes]
        number = prod(mesh.shape[axis] for axis in axes)
        if not are_replicas:
            # A sum of equal values is a multiple: another fault explains it.
            total = by_rank.sum(axes, keepdim=True).expand_as(by_rank).reshape_as(stacked)
            for operation, divisor in (("sum", 1), ("mean", number)):
                if all(are_same(tensor / divisor, expected) for tensor in total):
                    return missing_all_reduce(names, operation)
            continue
        # Every rank computes the loss of the plain model.
        if are_same(tensors[0] / number, expected):
            return too_large(number, names, "equal")
        if are_same(tensors[0] * number, expected):
            return too_small(number, names, "equal")
    return ""


def _sets_of_axes(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """Yield every set of axes that have more than one rank, small sets first."""
    active = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    for length in range(1, len(active) + 1):
        yield from combinations(active, length)
