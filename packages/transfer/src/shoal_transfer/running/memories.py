"""The local tensors of one side of a transfer: their addresses, and a second copy of them.

`LocalMemories` finds the tensors by the names of the manifest, again before each run if their
addresses have changed. The second copy has the same strides, so one plan fits both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..manifest.records import Manifest
from ..manifest.weights import Model, memories_of, weights_of
from ..planning.transfer_plan import TransferPlan

Signature = dict[str, tuple[Any, ...]]


class LocalMemories:
    """The local tensors of a model on this rank, by the names that manifests have for them.

    Args:
        model: a module or a state dict; None on ranks that hold nothing of this side.
    """

    def __init__(self, model: Model | None) -> None:
        self._model = model
        self.tensors: dict[str, Tensor] = {}
        self._addresses: Signature = {}
        self._shapes: Signature = {}
        self.refresh()

    def refresh(self) -> bool:
        """Look up the tensors; return whether some are at another address than before."""
        if self._model is None:
            return False
        self.tensors = memories_of(weights_of(self._model))
        before = self._addresses
        self._addresses = {}
        for name, tensor in self.tensors.items():
            address = (tensor.data_ptr(), tensor.device)
            shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            self._addresses[name] = (*address, *shape)
        return bool(before) and before != self._addresses

    def shapes_changed(self) -> bool:
        """Return whether shapes, strides or dtypes have changed since the last call."""
        before = self._shapes
        self._shapes = {name: address[2:] for name, address in self._addresses.items()}
        return bool(before) and before != self._shapes

    def defect(self, names: Iterable[str]) -> str | None:
        """Return the reason why a local tensor cannot be read and written now; None if all can."""
        for name in names:
            tensor = self.tensors[name]
            if tensor.is_meta:
                return f"{name!r} is on the meta device, which holds no values"
            _, stop = _bytes_in_storage(tensor)
            if stop > tensor.untyped_storage().nbytes():
                return f"the memory of {name!r} is freed, as of a model that sleeps; wake it first"
        return None

    def shared_with(self, other: LocalMemories) -> str | None:
        """Return the name of a tensor that shares memory with one of the other side, or None."""
        ranges = defaultdict[int, list[tuple[int, int]]](list)
        for tensor in other.tensors.values():
            ranges[tensor.untyped_storage().data_ptr()].append(_bytes_in_storage(tensor))
        for name, tensor in self.tensors.items():
            first, last = _bytes_in_storage(tensor)
            for start, stop in ranges[tensor.untyped_storage().data_ptr()]:
                if max(first, start) < min(last, stop):
                    return name
        return None


def _bytes_in_storage(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last one."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.itemsize


def parts_of_rank(manifest: Manifest, rank: int | None) -> list[str]:
    """Return the names of the local tensors in which a rank holds something."""
    found = dict[str, None]()
    for record in manifest.tensors.values():
        for holding in record.holdings:
            if holding.rank == rank:
                found[record.parts[holding.part]] = None
    return list(found)


class Place(NamedTuple):
    """A strided view of a local tensor, by name."""

    part: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the view of the tensor of this name."""
        tensor = tensors[self.part]
        offset = int(tensor.storage_offset()) + self.offset
        return tensor.as_strided(self.sizes, self.strides, offset)


def written_places(plan: TransferPlan, rank: int) -> dict[str, list[Place]]:
    """Return the places that a transfer writes, by local tensor, of tensors that it writes in part.

    The other elements of these tensors are the target's own: the mapping says "keep".
    """
    places = dict[str, list[Place]]()
    partly_written = set[str]()
    for copy in plan.regions(receiver=rank):
        memory = copy.receiver
        of_part = places.setdefault(memory.part, [])
        if copy.sender is None and copy.fill is None:
            partly_written.add(memory.part)
        else:
            of_part.append(Place(memory.part, copy.sizes, memory.strides, memory.offset))
    return {part: places[part] for part in partly_written}


def group_by_memory(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[list[str]]:
    """Group local tensors whose ranges of bytes meet in one storage; most groups are one tensor.

    Example:
        >>> buffer = torch.zeros(6)
        >>> group_by_memory({"a": buffer[:3], "b": buffer[2:4], "c": buffer[4:]}, "abc")
        [['a', 'b'], ['c']]
    """
    in_storage = defaultdict[int, list[tuple[int, int, str]]](list)
    for name in names:
        first, last = _bytes_in_storage(tensors[name])
        storage = tensors[name].untyped_storage().data_ptr()
        in_storage[storage].append((first, last, name))
    groups = list[list[str]]()
    for ranges in in_storage.values():
        end = -1
        for first, last, name in sorted(ranges):
            if first >= end:
                groups.append([])
            groups[-1].append(name)
            end = max(end, last)
    return groups


def second_copy(
    tensors: Mapping[str, Tensor], groups: Iterable[Sequence[str]]
) -> dict[str, Tensor]:
    """Return copies of local tensors with the same strides, so that one plan fits both.

    Args:
        tensors: the local tensors by name.
        groups: the names, as `group_by_memory` groups them. Tensors of one group share memory, and
            their copies share memory in the same way.
    """
    copies = dict[str, Tensor]()
    for group in groups:
        ranges = [_bytes_in_storage(tensors[name]) for name in group]
        # the widest elements have 16 bytes, so that each tensor begins at a whole element
        first = min(start for start, _ in ranges) // 16 * 16
        last = max(stop for _, stop in ranges)
        memory = torch.empty(last - first, dtype=torch.uint8, device=tensors[group[0]].device)
        for name, (start, _) in zip(group, ranges, strict=True):
            live = tensors[name]
            copy = torch.empty(0, dtype=live.dtype, device=live.device)
            offset = (start - first) // live.itemsize
            copy.set_(memory.untyped_storage(), offset, live.shape, live.stride())
            copy.copy_(live)
            copies[name] = copy
    return copies
