"""Batches of data loaders: recorded on the ranks, concatenated, and replayed on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader


def record_batches(batches: list[list[Any]]) -> None:
    """Append the batches of every later iteration over a DataLoader of this process to `batches`.

    `batches` gets one list for each iteration.
    """

    def iterate(original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        recorded: list[Any] = []
        batches.append(recorded)
        for batch in original(loader):
            recorded.append(_copy(batch))
            yield batch

    _replace_iteration(iterate)


def replay_batches(batches: Sequence[Sequence[Any]]) -> None:
    """Have the n-th iteration over a DataLoader return the n-th list of recorded batches.

    Later iterations return the batches of the loader.
    """
    number = 0

    def iterate(original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        nonlocal number
        number += 1
        if number > len(batches):
            yield from original(loader)
        else:
            yield from map(_copy, batches[number - 1])

    _replace_iteration(iterate)


def _replace_iteration(iterate: Callable[[Any, Any], Iterator[Any]]) -> None:
    """Replace `DataLoader.__iter__` in this process."""
    original = DataLoader.__iter__
    loader_class: Any = DataLoader
    loader_class.__iter__ = lambda loader: iterate(original, loader)


def _copy(batch: Any) -> Any:
    """Copy the tensors of a batch."""
    return combine_batches(lambda tensors: tensors[0].detach().clone(), [batch])


def combine_batches(combine: Callable[[list[Tensor]], Any], batches: Sequence[Any]) -> Any:
    """Combine batches of equal structure: each tensor with the tensors at the same place.

    Values that are not tensors are taken from the first batch.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return combine(list(batches))
    if isinstance(first, dict):
        combined: dict[Any, Any] = {}
        for key in first:
            combined[key] = combine_batches(combine, [batch[key] for batch in batches])
        return type(first)(combined)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(combine_batches(combine, part) for part in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(combine_batches(combine, part) for part in zip(*batches, strict=True))
    return first


def concatenate(by_rank: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Concatenate the batches of ranks to the batches of one device.

    Args:
        by_rank: for each rank, for each iteration over a loader, the batches.

    Returns:
        For each iteration the batches of one device: the rows of all ranks, in the order of the
        ranks. Ranks whose batches are equal in all iterations count as one: ranks of tensor
        parallelism, for example, read the same rows.
    """
    distinct: list[Sequence[Sequence[Any]]] = []
    for batches in by_rank:
        if not any(_equal(batches, other) for other in distinct):
            distinct.append(batches)
    if not distinct:
        return []
    if len(distinct) == 1:
        return [list(iteration) for iteration in distinct[0]]
    whole: list[list[Any]] = []
    # A rank may have more iterations, or more batches in one, than another rank. The rows of the
    # other rank are then missing, so the lists end with the shortest.
    for iteration_by_rank in zip(*distinct, strict=False):
        batches_by_step = zip(*iteration_by_rank, strict=False)
        whole.append([combine_batches(_join, by_rank) for by_rank in batches_by_step])
    return whole


def _join(tensors: list[Tensor]) -> Tensor:
    """Concatenate rows; scalars are taken from the first rank."""
    return torch.cat(tensors) if tensors[0].ndim else tensors[0]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two structures of tensors are equal."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return False
        return all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
