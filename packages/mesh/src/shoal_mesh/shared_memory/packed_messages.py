"""Many tensors in one message, packed straight into the slots and read straight from them.

No rank has a second copy of the message: a tensor is released when it is packed, and a result gets
its memory when its first elements arrive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._torch import copy_each
from ..transport import Flat, Receive, Sizes
from ..watch.recorder import request
from .rounds import WAIT_FOR_SLOT, ReceiveError, Steps
from .row_reductions import flat_of, reduce_rows

if TYPE_CHECKING:
    from .channel import Stream

# A reduction of more bytes than this takes two rounds: each rank reduces one part, and then reads
# the parts of the other ranks. Less memory moves this way.
_ONE_ROUND_SUM_BYTES = 1 << 20
# The most bytes of a packed reduction in one window. 12 MiB take no longer in two windows than in
# one, and need 4 MiB less memory.
_PACKED_WINDOW_BYTES = 1 << 23


class PackedMessage(NamedTuple):
    """A gather or a reduce-scatter of many tensors in one message.

    Attributes:
        stream: the stream of rounds.
        kind: "all_gather" or "reduce_scatter".
        counts: number of elements of each rank for a gather, of each block for a reduce-scatter.
        block: index of this rank's block.
        op: the reduction; "" for a gather.
    """

    stream: Stream
    kind: str
    counts: Sizes
    block: int
    op: str

    @property
    def gathers(self) -> bool:
        """True if the messages of all ranks are read, not reduced."""
        return self.kind == "all_gather"

    def spans(self) -> list[tuple[int, int]]:
        """Return, for each result of this rank, its elements in the messages.

        For counts (2, 5), a gather has two results: 0:2 of the message of rank 0, and 0:5 of the
        message of rank 1. A reduce-scatter on rank 1 has one: 2:7 of all messages, reduced.
        """
        if self.gathers:
            return [(0, count) for count in self.counts]
        start = sum(self.counts[: self.block])
        return [(start, start + self.counts[self.block])]


def exchange_packed(message: PackedMessage, tensors: Sequence[Tensor], receive: Receive) -> Steps:
    """Pass each rank's message, or the reduction of one block of all messages, to `receive`.

    `receive` has to copy gathered messages, because their memory is overwritten after the call.
    """
    stream, kind, counts, _, op = message
    packer = Packer(tensors)
    dtype = tensors[0].dtype
    # no reference here, so that the packer can free each tensor when it is packed
    del tensors
    length = max(counts) if message.gathers else packer.length
    window_bytes = stream.slot_bytes
    if not message.gathers:
        window_bytes = min(window_bytes, _PACKED_WINDOW_BYTES)
    number = request(kind, dtype, sum(counts), op)
    window = window_bytes // dtype.itemsize
    spans = message.spans()
    results: list[Tensor] = []
    for start in range(0, max(length, 1), window):
        if start and stream.depth == 1:
            yield WAIT_FOR_SLOT
        stop = min(start + window, length)
        slots, slot = stream.slots(dtype, stop - start)
        packer.pack(slot, start)
        yield number
        if message.gathers and stop - start == length:
            is_matrix = len(set(counts)) == 1
            _deliver(receive, slots if is_matrix else _cut_rows(slots, counts))
            return
        if not results:
            lengths = [last - first for first, last in spans]
            results = [torch.empty(count, dtype=dtype, device="cpu") for count in lengths]
        for i, (first, last) in enumerate(spans):
            # elements 2:7 in a window 4:8: 4:7
            low = max(start, first)
            high = min(stop, last)
            if low >= high:
                continue
            target = results[i][low - first : high - first]
            rows = slots[:, low - start : high - start]
            if message.gathers:
                target.copy_(rows[i])
            else:
                reduce_rows(rows, op, target)
    _deliver(receive, results)


def _cut_rows(slots: Tensor, counts: Sizes) -> list[Tensor]:
    """Return the elements of each rank in its slot."""
    return [row[:count] for row, count in zip(slots, counts, strict=True)]


# --- reductions of many tensors -------------------------------------------------------------------
#
#                          two slots for each rank              one slot for each rank
#
# up to 1 MiB, packed      one round: every rank reduces all rows
#
# larger, or in place      two rounds for each window: every rank reduces the part with its number,
#                          and reads the parts of all ranks. The part is written ...
#                          ... into the second slot             ... over the rank's own part of its
#                                                               slot, which nobody else reads then


class _Totals:
    """The reduced tensors of a message; each gets its memory when its first elements arrive.

    Args:
        ends: position in the message at which each tensor ends.
        dtype: dtype of the tensors.
        targets: the tensors themselves, if they are reduced in place.
    """

    def __init__(
        self, ends: Sequence[int], dtype: torch.dtype, targets: list[Tensor] | None
    ) -> None:
        self._ends = ends
        self._dtype = dtype
        self._in_place = targets is not None
        if targets is None:
            targets = [torch.empty(0, dtype=dtype, device="cpu") for _ in ends]
        self.tensors = targets

    def unpack(self, row: Tensor, start: int) -> None:
        """Write reduced elements of the message, from element `start` on, into the tensors."""
        unpacked = 0
        for i, low, high in _parts_in_window(self._ends, start, start + row.numel()):
            if low == 0 and not self._in_place:
                begin = self._ends[i - 1] if i else 0
                size = self._ends[i] - begin
                self.tensors[i] = torch.empty(size, dtype=self._dtype, device="cpu")
            width = high - low
            arrived = row[unpacked : unpacked + width]
            self.tensors[i][low:high].copy_(arrived)
            unpacked += width


@dataclass(slots=True)
class _PackedReduction:
    """An all-reduce of many tensors: the stream, the message, and the results."""

    stream: Stream
    packer: Packer
    dtype: torch.dtype
    op: str
    # number of the collective, which ranks compare
    number: int
    totals: _Totals


def all_reduce_packed(
    stream: Stream, tensors: Sequence[Tensor], op: str, receive: Receive | None
) -> Steps:
    """Pass the reduction of every tensor to `receive`, or reduce in place without it."""
    targets = None if receive else [flat_of(tensor) for tensor in tensors]
    packer = Packer(tensors if targets is None else targets)
    dtype = tensors[0].dtype
    # no reference here, so that the packer can free each tensor when it is packed
    del tensors
    length = packer.length
    in_parts = receive is None or length * dtype.itemsize > _ONE_ROUND_SUM_BYTES
    number = request("all_reduce_by_parts" if in_parts else "all_reduce", dtype, length, op)
    totals = _Totals(packer.ends, dtype, targets)
    reduction = _PackedReduction(stream, packer, dtype, op, number=number, totals=totals)
    run_window = _reduce_in_two_rounds if in_parts else _reduce_in_one_round
    window = min(stream.slot_bytes, _PACKED_WINDOW_BYTES) // dtype.itemsize
    for start in range(0, max(length, 1), window):
        if start and stream.depth == 1:
            yield WAIT_FOR_SLOT
        yield from run_window(reduction, start, min(window, length - start))
    if receive is not None:
        _deliver(receive, totals.tensors)


def _reduce_in_one_round(reduction: _PackedReduction, start: int, length: int) -> Steps:
    """Reduce a window of the message: every rank reduces all elements."""
    slots, slot = reduction.stream.slots(reduction.dtype, length)
    reduction.packer.pack(slot, start)
    yield reduction.number
    total = torch.empty(length, dtype=reduction.dtype, device="cpu")
    reduce_rows(slots, reduction.op, total)
    reduction.totals.unpack(total, start)


def _reduce_in_two_rounds(reduction: _PackedReduction, start: int, length: int) -> Steps:
    """Reduce a window of the message: every rank reduces one part, and reads all parts."""
    stream = reduction.stream
    dtype = reduction.dtype
    slots, slot = stream.slots(dtype, length)
    reduction.packer.pack(slot, start)
    yield reduction.number
    # 10 elements of 4 ranks: 3, 3, 3, 1; rank 3 reduces 9:10
    part = -(-length // stream.size)
    low = min(stream.rank * part, length)
    high = min(low + part, length)
    terms = slots[:, low:high]
    if stream.depth == 2:
        slots, slot = stream.slots(dtype, length)
        reduce_rows(terms, reduction.op, slot[low:high])
    else:
        # No other rank reads this part of this rank's slot in this round, so the result is written
        # there.
        total = torch.empty(high - low, dtype=dtype, device="cpu")
        reduce_rows(terms, reduction.op, total)
        slot[low:high].copy_(total)
        del total
    yield reduction.number
    # 0:3, 3:6, ...
    position = start
    for rank in range(stream.size):
        row = slots[rank, rank * part : (rank + 1) * part]
        reduction.totals.unpack(row, position)
        position += row.numel()


def _deliver(receive: Receive, arrived: Flat) -> None:
    """Call the receiver; raise ReceiveError if it raises."""
    try:
        receive(arrived)
    except Exception as error:
        raise ReceiveError(error) from error


class _TensorPart(NamedTuple):
    """The part of one tensor that is in a window of the message.

    Attributes:
        tensor: index of the tensor.
        first: its first element in the window.
        last: the element after its last one in the window.
    """

    tensor: int
    first: int
    last: int


def _parts_in_window(ends: Sequence[int], start: int, stop: int) -> Iterator[_TensorPart]:
    """Yield the parts of a message's tensors that are in a window of the message.

    `ends` has the position in the message at which each tensor ends: 3 and 10 for tensors of 3 and
    7 elements.
    """
    index = bisect_right(ends, start)
    # window 2:6: 2:3 of the first tensor, 0:3 of the second
    while start < stop:
        begin = ends[index - 1] if index else 0
        end = min(ends[index], stop)
        if start < end:
            yield _TensorPart(index, start - begin, end - begin)
        start = end
        index += 1


class Packer:
    """A sequence of flat tensors in a message; each is released when it has been packed.

    If the tensors are matrices, their first rows come first, then their second rows, and so on.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: list[Tensor] = list(tensors)
        self.ends = [*accumulate([tensor.numel() for tensor in tensors])]
        self.length: int = self.ends[-1]

    def pack(self, slot: Tensor, start: int) -> None:
        """Fill a slot with the message from element `start` on, up to the end of either.

        Calls must have increasing `start`, because packed tensors are released.
        """
        stop = min(start + slot.numel(), self.length)
        filled = max(stop - start, 0)
        if filled < slot.numel():
            slot = slot[:filled]
        if self._tensors and self._tensors[0].ndim == 2:
            if slot.numel() == self.length:
                self._pack_matrices(slot)
                return
            self._split_into_rows()
        parts = []
        for i, low, high in _parts_in_window(self.ends, start, stop):
            tensor = self._tensors[i]
            is_whole = high - low == tensor.numel()
            parts.append(tensor if is_whole else tensor[low:high])
            if high == tensor.numel():
                self._tensors[i] = tensor.new_empty(0)
        if parts:
            torch.cat(parts, out=slot)

    def _pack_matrices(self, slot: Tensor) -> None:
        """Fill a slot that takes the whole message."""
        widths = [tensor.shape[1] for tensor in self._tensors]
        # (2, 3) and (2, 1): (2, 4)
        rows = slot.view(self._tensors[0].shape[0], sum(widths))
        copy_each(list(torch.split(rows, widths, 1)), self._tensors)
        self._tensors.clear()

    def _split_into_rows(self) -> None:
        """Replace matrices by their rows: the first rows, then the second rows, and so on."""
        self._tensors = [row for rows in zip(*self._tensors, strict=True) for row in rows]
        self.ends = [*accumulate([row.numel() for row in self._tensors])]
