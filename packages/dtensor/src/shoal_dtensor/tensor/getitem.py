"""Indices rewritten so that what is assigned to is a view of local storage, for any sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..host_memory import upload
from ..layout.placements import Replicate
from ..layout.spec import Spec


def with_lists(cls: Any, tensor: Any, index: Any) -> Any:
    """An index of a DTensor with every list made a DTensor, of class `cls`.

    Lists are written in the program, so every rank has the same ones.
    """

    def replicated(numbers: list[Any]) -> Any:
        whole = upload(numbers, tensor._local_tensor.device)
        if not whole.numel():  # `[]` means no index, though `torch.tensor([])` has a floating dtype
            whole = whole.long()
        mesh = tensor._spec.mesh
        return cls(whole, Spec(mesh, (Replicate(),) * mesh.ndim, whole.shape, whole.stride(), whole.dtype))

    if type(index) is tuple:
        return tuple([replicated(entry) if type(entry) is list else entry for entry in index])
    return replicated(index) if type(index) is list else index


def without_numbers(index: Any, value: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """The same assignment `x[index] = value` with every number `i` in the index replaced by the slice `i:i+1`.

    A slice of a sharded tensor is a view on every rank; one element would belong to one rank only. Indices that are
    not made of numbers, slices, None and Ellipsis stay as they are.

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
    # x[2, :, 1] = value, x of shape (3, 4, 5): slices (2:3, :, 1:2), and the value (4,) becomes (1, 4, 1)
    slices: list[Any] = []
    numbers: list[int] = []  # where the new dims of size 1 stand, counted from the end of the result: [-3, -1]
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
