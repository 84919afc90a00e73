"""Collectives of many tensors as one message, as steps of a stream.

Tensors are packed straight into the slots, and read straight from them: no rank has a second copy of the message. Those
that have been packed are released. Sums are taken in the order of ranks, as those of `exchange`, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..transport import Receive
from .recorder import request
from .stream import FREE, Steps, Stream

# Of more than this every rank reduces one part and reads the others', which moves less memory and meets twice.
_ONE_ROUND_SUM_BYTES = 1 << 20
# Of a rank's part of a reduction in one round: 12 MiB take no longer in two than in one, and 4 MiB less memory.
_WINDOW_BYTES = 1 << 23

_REDUCE = {"min": torch.amin, "max": torch.amax}
_REDUCE_TWO: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def reduce_rows(rows: Tensor, op: str, out: Tensor) -> None:
    """(size, k) -> (k,)."""
    if rows.shape[0] == 2:  # 1 MiB each: 40 us, where a reduction along a dim takes 110
        _REDUCE_TWO[op](rows[0], rows[1], out=out)
    elif op in _REDUCE:
        _REDUCE[op](rows, 0, out=out)
    elif op == "sum":
        torch.sum(rows, 0, dtype=out.dtype, out=out)
    else:
        torch.prod(rows, 0, dtype=out.dtype, out=out)


class Packer:
    """Flat tensors that follow one another in a message; each is released when it has been packed.

    Of matrices first the first row of each follows, then the second row of each, and so on.

    Attributes:
        length: elements of all.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._lengths = [tensor.numel() for tensor in tensors]
        self.length: int = sum(self._lengths)
        self._first = self._at = 0  # the first that is still held, and what of it has been packed

    def pack(self, slot: Tensor) -> None:
        """Fill a slot with what comes next in the message."""
        room, parts = slot.numel(), []
        if self._tensors and self._tensors[0].ndim == 2:
            if room == self.length:
                widths = [tensor.shape[1] for tensor in self._tensors]
                rows = slot.view(self._tensors[0].shape[0], sum(widths))  # (2, 3) and (2, 1): (2, 4)
                torch._foreach_copy_(list(torch.split(rows, widths, 1)), self._tensors)
                self._tensors.clear()
                return
            self._tensors = [row for rows in zip(*self._tensors, strict=True) for row in rows]
            self._lengths = [row.numel() for row in self._tensors]
        while room:  # 5 and 2 elements in slots of 3: 0:3 of the first; its 3:5 and 0:1 of the second; its 1:2
            tensor, length = self._tensors[self._first], self._lengths[self._first]
            part = tensor[self._at : self._at + room] if self._at or room < length else tensor
            parts.append(part)
            room, self._at = room - part.numel(), self._at + part.numel()  # 5 elements, room for 3: 0, 3
            if self._at == length:
                self._tensors[self._first], self._first, self._at = tensor.new_empty(0), self._first + 1, 0
        if parts:
            torch.cat(parts, out=slot)


def all_gather(stream: Stream, tensors: Sequence[Tensor], counts: Sequence[int], receive: Receive) -> Steps:
    """Steps: `receive` gets each rank's message, `counts[i]` elements from rank i, to be read while it is called."""
    own, dtype = Packer(tensors), tensors[0].dtype
    del tensors
    what = request("all_gather", dtype, sum(counts))
    window = stream.slot_bytes // dtype.itemsize
    whole = [torch.empty(n, dtype=dtype) for n in counts] if max(counts) > window else []
    for a in range(0, max(*counts, 1), window):
        if a:
            yield FREE
        slots, slot = stream.slots(dtype, min(window, max(counts) - a))  # 10 in windows of 4: 4, 4, 2
        own.pack(slot[: max(own.length - a, 0)])
        yield what
        if not whole and len(set(counts)) == 1:
            receive(slots)
            return
        rows = [slots[rank, : max(n - a, 0)] for rank, n in enumerate(counts)]  # counts 6, 3 from 4 on: 2 and 0
        if not whole:
            receive(rows)
        for into, row in zip(whole, rows, strict=False):
            into[a : a + row.numel()].copy_(row)
    if whole:
        receive(whole)


def reduce_scatter(  # what a message is
    stream: Stream, tensors: Sequence[Tensor], counts: Sequence[int], block: int, op: str, receive: Receive
) -> Steps:
    """Steps: `receive` gets the reduction of one block of the message, of which block i has `counts[i]` elements."""
    own, dtype = Packer(tensors), tensors[0].dtype
    del tensors
    start, count = sum(counts[:block]), counts[block]  # counts (2, 5), block 1: from 2, 5 elements
    what = request("reduce_scatter", dtype, own.length, op)
    window = min(stream.slot_bytes, _WINDOW_BYTES) // dtype.itemsize
    out: Tensor | None = None
    for a in range(0, max(own.length, 1), window):
        if a:
            yield FREE
        slots, slot = stream.slots(dtype, min(window, own.length - a))
        own.pack(slot)
        yield what
        out = torch.empty(count, dtype=dtype) if out is None else out
        # counts (2, 5), block 1: elements 2 to 7, of which a window from 4 to 8 brings 4 to 7.
        low, high = max(a, start), min(a + window, start + count)
        if low < high:
            reduce_rows(slots[:, low - a : high - a], op, out[low - start : high - start])
    assert out is not None, "there is a first round"
    receive([out])


def all_reduce(stream: Stream, tensors: Sequence[Tensor], op: str, receive: Receive) -> Steps:
    """Steps: `receive` gets the reduction of every tensor."""
    own, dtype = Packer(tensors), tensors[0].dtype
    unpacked = Unpacker([tensor.numel() for tensor in tensors], dtype)
    del tensors
    in_parts = own.length * dtype.itemsize > _ONE_ROUND_SUM_BYTES
    what = request("all_reduce_by_parts" if in_parts else "all_reduce", dtype, own.length, op)
    window = min(stream.slot_bytes, _WINDOW_BYTES) // dtype.itemsize
    for a in range(0, max(own.length, 1), window):
        if a:
            yield FREE
        length = min(window, own.length - a)
        slots, slot = stream.slots(dtype, length)
        own.pack(slot)
        yield what
        part = -(-length // stream.size) if in_parts else length  # 10 elements of 4 ranks: 3, 3, 3, 1
        low = min(stream.rank * part, length) if in_parts else 0  # 10 in parts of 3, rank 3: 9:10
        high = min(low + part, length)
        reduced = torch.empty(high - low, dtype=dtype)
        reduce_rows(slots[:, low:high], op, reduced)
        if not in_parts:
            unpacked.unpack([reduced])
            continue
        # Nobody else reads this rank's own part of its slot in this round, so it takes the result.
        slot[low:high].copy_(reduced)
        del reduced
        yield what
        unpacked.unpack([slots[rank, rank * part : (rank + 1) * part] for rank in range(stream.size)])  # 0:3, 3:6, ...
    receive(unpacked.tensors)


class Unpacker:
    """Flat tensors that a message is unpacked into; each gets memory when its first elements are here.

    Attributes:
        tensors: those that have been begun.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._sizes, self._dtype = sizes, dtype
        self.tensors: list[Tensor] = []
        self._room = 0  # elements of the last one that are still to come
        self._skip_empty()

    def unpack(self, rows: Sequence[Tensor]) -> None:
        """Take what comes next in the message."""
        for row in rows:
            at = 0
            while at < row.numel():
                if not self._room:
                    self._begin()
                tensor = self.tensors[-1]
                count = min(self._room, row.numel() - at)  # 5 to come, 3 here: 3
                first = tensor.numel() - self._room  # of 8, 5 are to come: from 3 on
                tensor[first : first + count].copy_(row[at : at + count])
                at, self._room = at + count, self._room - count
                self._skip_empty()

    def _begin(self) -> None:
        self._room = self._sizes[len(self.tensors)]
        self.tensors.append(torch.empty(self._room, dtype=self._dtype))

    def _skip_empty(self) -> None:
        while not self._room and len(self.tensors) < len(self._sizes) and not self._sizes[len(self.tensors)]:
            self._begin()
