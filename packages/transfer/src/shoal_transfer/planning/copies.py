"""`Copy`: a route with its addresses in memory, for a runner or for an engine of the user.

A route says which elements move between which ranks. A copy also says where the elements are in the
local tensors of both ranks: the offset and the strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ..manifest.records import Holding
from ..mapping.assignment import Assignment
from ..mapping.regions import Region
from .routes import Route, RouteTable


class MemoryBlock(NamedTuple):
    """A strided view of one local tensor of one rank.

    Attributes:
        side: "source" or "target": the world of the rank.
        rank: the rank in its world.
        part: name of the local tensor.
        offset: elements from the beginning of the local tensor.
        strides: strides in elements, one per loop of the copy.

    Example:
        >>> MemoryBlock("source", 3, "weight", 8, (4, 1)).rank
        3
    """

    side: str
    rank: int
    part: str
    offset: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """One strided block of elements that a transfer copies.

    Attributes:
        source: name of the logical source tensor; None for a fill.
        target: name of the logical target tensor.
        region: the elements of the target tensor, one progression per dim.
        stage: 0 for elements from the source, 1 for elements that a rank of the target forwards
            after stage 0, 2 for elements that a rank copies in its own memory after stage 1.
        sender: the memory that is read; None for a fill.
        receiver: the memory that is written.
        sizes: lengths of the loops; both memories have one stride for each loop.
        dtype: dtype of the elements on the wire and in the receiver.
        nbytes: bytes on the wire.
        fill: the value of a fill.

    Example:
        >>> from shoal_transfer import WeightMapping, describe, plan_transfer
        >>> manifest = describe({"w": torch.zeros(2, 3)})
        >>> plan = plan_transfer(manifest, manifest, WeightMapping.same_names(manifest.shapes))
        >>> next(plan.regions()).sizes
        (2, 3)
    """

    source: str | None
    target: str
    region: Region
    stage: int
    sender: MemoryBlock | None
    receiver: MemoryBlock
    sizes: tuple[int, ...]
    dtype: str
    nbytes: int
    fill: float | None = None

    @property
    def is_local(self) -> bool:
        """Tell whether sender and receiver are one rank of one world."""
        if self.sender is None:
            return True
        return (self.sender.side, self.sender.rank) == (self.receiver.side, self.receiver.rank)

    def to_json(self) -> dict[str, Any]:
        """Return the copy as JSON values; progressions are [start, stop, step]."""
        region = [[one.start, one.stop, one.step] for one in self.region]
        sender = None if self.sender is None else self.sender._asdict()
        receiver = self.receiver._asdict()
        value = self._asdict()
        return {**value, "region": region, "sender": sender, "receiver": receiver}


class TensorPlan(NamedTuple):
    """The plan of one target tensor: names, and a table of routes.

    Attributes:
        target: name of the target tensor.
        sources: names of the source tensors, in the order of `table.sources`.
        target_parts: names of the local tensors of the target.
        source_parts: names of the local tensors of each source.
        table: the routes, which tensors of equal layouts share.
        instance: number of this tensor among the tensors that share the table.
    """

    target: str
    sources: tuple[str, ...]
    target_parts: tuple[str, ...]
    source_parts: tuple[tuple[str, ...], ...]
    table: RouteTable
    instance: int

    def copy_of(self, route: Route) -> Copy:
        """Return the copy of a route, with addresses."""
        part = route.part
        receiver = _address(route.receiver, part.region)
        if route.source < 0:
            return self._fill_of(route, receiver)
        sizes = tuple(map(len, part.source_region))
        strides = _by_source_dims(part, receiver.strides)
        sender = self._sender(route)
        memory = self._target_memory(route.receiver, receiver.offset, strides)
        return Copy(
            self.sources[route.source],
            self.target,
            part.region,
            stage=route.stage,
            sender=sender,
            receiver=memory,
            sizes=sizes,
            dtype=self.dtype,
            nbytes=prod(sizes) * self.table.itemsize,
        )

    @property
    def dtype(self) -> str:
        """The dtype of the target tensor, in which elements are sent."""
        return self.table.record.dtype

    def _fill_of(self, route: Route, receiver: _Address) -> Copy:
        """Return the copy of a route without a source."""
        part = route.part
        memory = self._target_memory(route.receiver, receiver.offset, receiver.strides)
        sizes = tuple(map(len, part.region))
        return Copy(
            None,
            self.target,
            part.region,
            stage=0,
            sender=None,
            receiver=memory,
            sizes=sizes,
            dtype=self.dtype,
            nbytes=0,
            fill=part.fill,
        )

    def _target_memory(
        self, holding: Holding, offset: int, strides: tuple[int, ...]
    ) -> MemoryBlock:
        part = self.target_parts[holding.part]
        return MemoryBlock("target", holding.rank, part, offset, strides=strides)

    def _sender(self, route: Route) -> MemoryBlock:
        """Return the memory that a route reads."""
        part = route.part
        if route.copied is None:
            holding = route.sender(self.instance)
            assert holding is not None, "a route with a source has senders"
            address = _address(holding, part.source_region)
            name = self.source_parts[route.source][holding.part]
            return MemoryBlock(
                "source", holding.rank, name, address.offset, strides=address.strides
            )
        read = route.copied.part.reading_from(part.source_region)
        assert read is not None, "the elements must have arrived by that route"
        holding = route.copied.receiver
        address = _address(holding, read.region)
        strides = _by_source_dims(read, address.strides)
        return self._target_memory(holding, address.offset, strides)


class _Address(NamedTuple):
    offset: int
    strides: tuple[int, ...]


def _address(holding: Holding, region: Region) -> _Address:
    """Return where a region is in the memory of a holding that contains it."""
    offset = holding.offset
    strides = []
    for (start, _), stride, indices in zip(holding.box, holding.strides, region, strict=True):
        offset += (indices.start - start) * stride
        strides.append(stride * indices.step)
    return _Address(offset, tuple(strides))


def _by_source_dims(part: Assignment, strides: Sequence[int]) -> tuple[int, ...]:
    """Order strides of target dims by the source dims that advance with them."""
    ordered = [0] * len(part.source_region)
    for dim, stride in zip(part.dims, strides, strict=True):
        if dim is not None:
            ordered[dim] = stride
    return tuple(ordered)
