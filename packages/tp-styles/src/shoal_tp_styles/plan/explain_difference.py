"""Comparison of values of simulated ranks with the plain model, and faults in the words of `certify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import missing_all_reduce, too_large, too_small


def explain_difference(
    values: Sequence[Tensor | None],
    expected: Tensor | None,
    mesh: DeviceMesh,
) -> str:
    """Return the fault that explains the values of all ranks; empty if no fault does.

    Args:
        values: of the ranks, in row-major order of the mesh.
        expected: the value of the plain model.
        mesh: the mesh of the ranks.
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
    are_replicas = all(same_values(tensor, tensors[0]) for tensor in tensors)
    for axes, names, number in _sets_of_axes(mesh):
        if not are_replicas:
            # A sum of equal values is a multiple: another fault explains it.
            total = by_rank.sum(axes, keepdim=True).expand_as(by_rank).reshape_as(stacked)
            for operation, divisor in (("sum", 1), ("mean", number)):
                if all(same_values(tensor / divisor, expected) for tensor in total):
                    return missing_all_reduce(names, operation)
            continue
        # Every rank computes the loss of the plain model.
        if same_values(tensors[0] / number, expected):
            return too_large(number, names, "equal")
        if same_values(tensors[0] * number, expected):
            return too_small(number, names, "equal")
    return ""


def _sets_of_axes(mesh: DeviceMesh) -> Iterator[tuple[list[int], list[str], int]]:
    """Yield sets of axes with more than one rank, small sets first: dims, names, number of ranks."""
    shape = mesh.shape
    active = [axis for axis, size in enumerate(shape) if size > 1]
    for length in range(1, len(active) + 1):
        for axes in combinations(active, length):
            number = 1
            for axis in axes:
                number *= shape[axis]
            yield [*axes], [mesh.axis_names[axis] for axis in axes], number


def is_output(shards: list[Tensor], expected: Tensor) -> bool:
    """Tell whether the ranks' outputs are replicas or shards of the expected one.

    Shards are along one dim.
    """
    if all(shard.shape == expected.shape for shard in shards):
        return all(same_values(shard, expected) for shard in shards)
    if any(shard.ndim != expected.ndim for shard in shards):
        return False
    for dim in range(expected.ndim):
        if _are_shards(shards, expected.shape, dim):
            return same_values(torch.cat(shards, dim), expected)
    return False


def _are_shards(shards: list[Tensor], shape: torch.Size, dim: int) -> bool:
    """Tell whether the shapes are those of shards of `shape` along one dim, in order of ranks."""
    total = 0
    for shard in shards:
        size = shard.shape[dim]
        if shard.shape != (*shape[:dim], size, *shape[dim + 1 :]):
            return False
        total += size
    return total == shape[dim]


def same_values(value: Tensor | None, expected: Tensor | None) -> bool:
    """Compare two tensors up to sums of another order; no gradient counts as zero."""
    if value is None or expected is None:
        return all(tensor is None or not tensor.any() for tensor in (value, expected))
    if value.shape != expected.shape:
        return False
    # Modules that compute in float32 whatever their dtype round by 1e-6; a wrong plan is wrong in
    # the first digits.
    wanted = expected.double()
    largest = float(wanted.abs().nan_to_num().max()) if wanted.numel() else 0.0
    tolerance = 1e-5 * largest + 1e-9
    return torch.allclose(value.double(), wanted, rtol=1e-6, atol=tolerance, equal_nan=True)
