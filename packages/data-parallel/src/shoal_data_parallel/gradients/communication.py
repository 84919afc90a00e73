"""Collectives of a unit by functions of the user, and the packing of tensors for them.

A rank sends one flat buffer with its shards of all parameters of a dtype. All buffers have the
length of the longest one. With shards of 3 and 2 rows of (5, 4) on two ranks:

    gather     rank 0: 12 elements    rank 1: 8 elements, 4 unused    received: 24 elements
    scatter    sent: 24 elements, shard by shard                      received: 12 elements
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_dtensor import Spec
from shoal_dtensor.internal import intersect
from shoal_mesh.internal import positions_by_dtype

from ..parameters.data_axes import DataAxes


class CustomCollective(ABC):
    """A collective of the user, and the memory for it."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with any values."""


class AllGather(CustomCollective):
    """An all-gather of the user, for `FSDPModule.set_custom_all_gather`.

    Example:
        >>> class Gather(AllGather):
        ...     def allocate(self, size, *, dtype, device):
        ...         return torch.empty(size, dtype=dtype, device=device)
        ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
        ...         return dist.all_gather_into_tensor(
        ...             output_tensor, input_tensor, group=group, async_op=async_op
        ...         )
        >>> Gather().allocate((2, 3), dtype=torch.bfloat16, device=torch.device("cpu")).shape
        torch.Size([2, 3])
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the flat inputs of all ranks, one after another, into the flat output."""


class ReduceScatter(CustomCollective):
    """A reduce-scatter of the user, for `FSDPModule.set_custom_reduce_scatter`.

    Example:
        >>> class Scatter(ReduceScatter):
        ...     def allocate(self, size, *, dtype, device):
        ...         return torch.empty(size, dtype=dtype, device=device)
        ...     def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        ...         return dist.reduce_scatter_tensor(
        ...             output_tensor, input_tensor, op=op, group=group, async_op=async_op
        ...         )
        >>> Scatter().allocate((4,), dtype=torch.float32, device=torch.device("cpu")).shape
        torch.Size([4])
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the flat inputs of all ranks; write this rank's part to the output."""


@dataclass(slots=True)
class Communication:
    """Choices of the user for the collectives of one group of parameters."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    # called with the reduced gradients in one flat tensor
    hook: Callable[[Tensor], None] | None = None
    # the device's stream for the hook; None is the stream of the backward
    hook_stream: Any = None
    # collectives only sum: a custom collective gets the operation "sum", and a hook gets sums
    sums_only: bool = False
    # parameters that no rank has used get zeros
    zeros_for_unused: bool = False
    # reductions that may be in flight beside the backward
    max_in_flight: int = 1
    # reductions have process groups of their own, so that gathers do not wait for them
    separate_groups: bool = False


# A part of a shard, and its place in the tensor that all shards together make, as slices.
_Part = tuple[tuple[slice, ...], tuple[slice, ...]]


@dataclass(frozen=True, slots=True)
class _Shard:
    """One rank's shard of one tensor."""

    shape: tuple[int, ...]
    parts: Sequence[_Part]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class ShardPacking:
    """The positions of shards in flat buffers of one size, one buffer for each rank of an axis.

    Args:
        moves: two layouts for each tensor: the layout of its shards, and the layout in which one
            rank has the whole tensor.
        axes: the data axes; tensors are sharded over the last one. Buffers are in the order of the
            ranks of its group.
    """

    def __init__(self, moves: Sequence[tuple[Spec, Spec]], axes: DataAxes) -> None:
        axis = axes.mesh.ndim - 1
        self.shards: list[list[_Shard]] = []
        lengths = []
        for coordinate in axes.coordinates_of_group:
            shards_of_rank = [_shard_at(move, axis, coordinate) for move in moves]
            self.shards.append(shards_of_rank)
            lengths.append(sum(shard.numel for shard in shards_of_rank))
        self.length = max(lengths)

    def pack_shards(self, shards: Sequence[Tensor], buffer: Tensor) -> None:
        """Write the shards of one rank to its buffer."""
        start = 0
        for shard in shards:
            buffer[start : start + shard.numel()].copy_(shard.reshape(-1))
            start += shard.numel()

    def unpack_shards(self, rank: int, buffer: Tensor) -> list[Tensor]:
        """Return a rank's shards, as views of its buffer."""
        views = []
        start = 0
        for shard in self.shards[rank]:
            views.append(buffer[start : start + shard.numel].view(shard.shape))
            start += shard.numel
        return views

    def pack(self, tensors: Sequence[Tensor], buffers: Tensor) -> None:
        """Write whole tensors to the buffers of all ranks, shard by shard."""
        buffers.zero_()
        for rank, shards in enumerate(self.shards):
            for tensor, shard, view in self._views(rank, shards, tensors, buffers):
                for place_in_shard, place in shard.parts:
                    view[place_in_shard].copy_(tensor[place])

    def unpack(self, buffers: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the shards in the buffers of all ranks to whole tensors."""
        for rank, shards in enumerate(self.shards):
            for tensor, shard, view in self._views(rank, shards, tensors, buffers):
                for place_in_shard, place in shard.parts:
                    tensor[place].copy_(view[place_in_shard])

    def _views(
        self, rank: int, shards: Sequence[_Shard], tensors: Sequence[Tensor], buffers: Tensor
    ) -> Any:
        buffer = buffers[rank * self.length : (rank + 1) * self.length]
        return zip(tensors, shards, self.unpack_shards(rank, buffer), strict=True)


def _shard_at(move: tuple[Spec, Spec], axis: int, coordinate: int) -> _Shard:
    """Return the shard of the rank at another coordinate of the axis."""
    sharded, whole = move
    own_coordinate = whole.coordinate
    assert own_coordinate is not None, "only ranks of the mesh gather"
    other_coordinate = list(own_coordinate)
    other_coordinate[axis] = coordinate
    parts: list[_Part] = []
    for box, place_in_shard in sharded.boxes(other_coordinate):
        for whole_box, place in whole.boxes(own_coordinate):
            common = intersect(box, whole_box)
            if common is None:
                continue
            in_shard = _slices_at(common, box, place_in_shard)
            in_whole = _slices_at(common, whole_box, place)
            parts.append((in_shard, in_whole))
    return _Shard(tuple(sharded.local_shape_at(other_coordinate)), parts)


def _slices_at(common: Any, box: Any, place: Any) -> tuple[slice, ...]:
    """Return a part of a global box as slices of the local tensor that has the box at `place`.

    The part (5, 6) of the box (4, 8), which is at (2, 6) of the local tensor, is at (3, 4).
    """
    slices = []
    for (start, stop), (box_start, _), (place_start, _) in zip(common, box, place, strict=True):
        offset = place_start - box_start
        slices.append(slice(start + offset, stop + offset))
    return tuple(slices)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The tensors of one dtype that are in flight in one collective."""

    # indices of the tensors
    tensors: Sequence[int]
    packing: ShardPacking
    received: Tensor
    work: dist.Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def _by_dtype(moves: Sequence[tuple[Spec, Spec]]) -> list[list[int]]:
    """Return the indices of the tensors that move, grouped by dtype."""
    dtypes: list[torch.dtype | None] = []
    for source, target in moves:
        dtypes.append(None if source is target else source.dtype)
    return positions_by_dtype(dtypes)


class CustomGather:
    """Shards in flight to all ranks of a unit's sharding axis, by a function of the user.

    A tensor that is not sharded stays where it is.
    """

    def __init__(
        self,
        comm: AllGather,
        axes: DataAxes,
        shards: Sequence[Tensor],
        moves: Sequence[tuple[Spec, Spec]],
    ) -> None:
        self._shards = shards
        self._moves = moves
        self._buffers: list[_Buffers] = []
        for indices in _by_dtype(moves):
            packing = ShardPacking([moves[i] for i in indices], axes)
            first = shards[indices[0]]
            ranks = len(packing.shards)
            length = packing.length
            received = comm.allocate((ranks * length,), dtype=first.dtype, device=first.device)
            start = axes.sharding_group.rank() * length
            sent = received[start : start + length]
            packing.pack_shards([shards[i] for i in indices], sent)
            work = comm(
                output_tensor=received,
                input_tensor=sent,
                group=axes.sharding_group,
                async_op=True,
            )
            self._buffers.append(_Buffers(indices, packing, received, work))

    def wait(self, memory: Callable[[], Sequence[Tensor]] | None = None) -> list[Tensor]:
        """Return the gathered tensors, which are written to the tensors from `memory`."""
        for buffers in self._buffers:
            buffers.wait()
        if memory is None:
            gathered = [shard.new_empty(to.local_shape) for shard, (_, to) in self._pairs()]
        else:
            gathered = list(memory())
        for i, (shard, (source, target)) in enumerate(self._pairs()):
            if source is target:
                gathered[i].copy_(shard)
        for buffers in self._buffers:
            buffers.packing.unpack(buffers.received, [gathered[i] for i in buffers.tensors])
        return gathered

    def _pairs(self) -> Any:
        return zip(self._shards, self._moves, strict=True)


class CustomScatter:
    """Local gradients in flight to the sums of this rank's shards, by a function of the user.

    Args:
        comm: the function.
        axes: the data axes; nothing is reduced over the axes of replicas.
        gradients: local gradients, dense, followed by a row of flags.
        moves: two layouts for each gradient: the layout of the gradient, and that of the sums.
        averages: whether the function has to return averages over the shards, rather than sums.
    """

    def __init__(
        self,
        comm: ReduceScatter,
        axes: DataAxes,
        gradients: Sequence[Tensor],
        moves: Sequence[tuple[Spec, Spec]],
        *,
        averages: bool,
    ) -> None:
        self.divided_by = axes.num_shards if averages else 1
        self._rank = axes.sharding_group.rank()
        self._count = len(moves)
        self._buffers: list[_Buffers] = []
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        for indices in _by_dtype(moves):
            pairs = [(moves[i][1], moves[i][0]) for i in indices]
            packing = ShardPacking(pairs, axes)
            first = gradients[indices[0]]
            total = len(packing.shards) * packing.length
            sent = comm.allocate((total,), dtype=first.dtype, device=first.device)
            packing.pack([gradients[i] for i in indices], sent)
            received = comm.allocate((packing.length,), dtype=first.dtype, device=first.device)
            work = comm(
                output_tensor=received,
                input_tensor=sent,
                group=axes.sharding_group,
                op=op,
                async_op=True,
            )
            self._buffers.append(_Buffers(indices, packing, received, work))

    def reach_last_round(self) -> bool:
        return False

    def poll(self) -> None:
        """Do nothing: results can be taken only after a wait."""

    def wait(self) -> list[Tensor]:
        """Return the sums, or averages, of this rank's shards."""
        sums: dict[int, Tensor] = {}
        for buffers in self._buffers:
            buffers.wait()
            shards = buffers.packing.unpack_shards(self._rank, buffers.received)
            sums.update(zip(buffers.tensors, shards, strict=True))
        return [sums[i] for i in range(self._count)]
