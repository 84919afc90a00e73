"""Indices rewritten so that what is assigned to is a view of local storage, for any sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh

from ..host_memory import upload
from ..layout.placements import Replicate
from ..layout.spec import Spec


def has_lists(index: Any) -> bool:
    """Whether there is a list of numbers in an index."""
    return type(index) is list or (type(index) is tuple and any(type(entry) is list for entry in index))


def with_lists(index: Any, device: torch.device, mesh: DeviceMesh, make: Callable[[Tensor, Spec], Any]) -> Any:
    """The index with every list made a DTensor; lists are written in the program, so every rank has the same ones.

    Args:
        index: with lists in it.
        device: of the tensor that is indexed.
        mesh: its mesh.
        make: makes a DTensor of its shard and its spec.
    """

    def replicated(numbers: list[Any]) -> Any:
        whole = upload(numbers, device)
        if not whole.numel():  # `[]` means no index, though `torch.tensor([])` has a floating dtype
            whole = whole.long()
        return make(whole, Spec(mesh, (Replicate(),) * mesh.ndim, whole.shape, whole.stride(), whole.dtype))

    if type(index) is tuple:
        return tuple(replicated(entry) if type(entry) is list else entry for entry in index)
    return replicated(index)


def without_numbers(index: Any, value: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """The same assignment `x[index] = value` with every number `i` in the index replaced by the slice `i:i+1`.

    A slice of a sharded tensor is a view on every rank; one element would belong to one rank only. Indices that are
    not made of numbers, slices, None and Ellipsis stay as they are.

    Args:
        index: the index; value: what is assigned; shape: of x.

    Raises:
        IndexError: if a number is out of range.

    Example:
        >>> without_numbers((-1, slice(2)), 5.0, (3, 4))
        ((slice(2, 3, None), slice(None, 2, None)), 5.0)
    """
    entries = index if isinstance(index, tuple) else (index,)
    basic = (entry is None or entry is Ellipsis or isinstance(entry, slice) or _is_number(entry) for entry in entries)
    if not any(map(_is_number, entries)) or not all(basic):
        return index, value
    used = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    rest = (slice(None),) * (len(shape) - used)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries = (*entries[:at], *rest, *entries[at + 1 :])
    slices: list[Any] = []
    numbers: list[int] = []  # where the new dims of size 1 stand, counted from the end of the result
    dim = 0
    for i, entry in enumerate(entries):
        if _is_number(entry):
            slices.append(_one(entry, shape, dim))
            numbers.append(i - len(entries))
        else:
            slices.append(entry)
        dim += entry is not None
    if isinstance(value, Tensor) and value.ndim:
        # The numbers' dims are missing from the value; from the right, so that every place stays what it was.
        for place in reversed(numbers):
            if value.ndim >= -place - 1:
                value = value.unsqueeze(place + value.ndim + 1)
    return tuple(slices), value


def _is_number(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)


def _one(index: int, shape: Sequence[int], dim: int) -> slice:
    """The slice that has only element `index` of dim `dim`."""
    size = shape[dim] if dim < len(shape) else 0
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    return slice(index % size, index % size + 1)
