"""The transport between CPU ranks of one host: collectives as steps of a stream of rounds.

Messages of more than a slot take several rounds, each of which shows a window of them. Every
function returns with its first round shown: `wait` completes the result. Sums are taken in the
order of ranks on every rank, so all ranks have the same bits. Many tensors are packed straight into
the slots and read straight from them: no rank has a second copy of the message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..transport import Flat, Handle, Receive, Sizes, Transport, as_bytes
from ..watch.recorder import CARRIED_DTYPES, CARRIED_OPS, name_of, number_of, request
from .channel import FREE, Channel, ReceiveError, Steps, Stream, Underway

# With more bytes than this, three or more ranks reduce one part each and read the parts of the
# others: less memory moves, in two rounds.
_ONE_ROUND_SUM_BYTES = 1 << 16
_PACKED_ONE_ROUND_SUM_BYTES = 1 << 20
# Bytes of a packed reduction in one round: 12 MiB take no longer in two rounds than in one, and 4
# MiB less memory.
_PACKED_WINDOW_BYTES = 1 << 23

# Elements of all rows of an average that are in float32 at a time: 1 MiB stays in the cache.
_WIDE_ELEMENTS = 1 << 18

# of two rows, and along a dim
_REDUCE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sum": (torch.add, torch.sum),
    "min": (torch.minimum, torch.amin),
    "max": (torch.maximum, torch.amax),
    "product": (torch.mul, torch.prod),
}


class SharedMemoryTransport(Transport):
    """The transport of a group whose ranks have a channel, with the `backend` as a fallback.

    In the background it carries messages of one round only, which are visible to the others at
    once: messages of several rounds go to the backend, whose threads process them. Messages use the
    channel's foreground if no `stream` is given.
    """

    __slots__ = ("_backend", "_channel", "_stream")

    def __init__(self, channel: Channel, backend: Transport, stream: Stream | None = None) -> None:
        self._channel = channel
        self._backend = backend
        self._stream: Stream = channel.foreground if stream is None else stream

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        if not is_carried(tensor, op):
            return self._backend
        if not background:
            return self
        stream = self._channel.background["reductions" if op else "gathers"]
        # uneven: a rank learns the number of rounds from the other ranks
        if uneven or tensor.nbytes > stream.slot_bytes:
            return self._backend
        return SharedMemoryTransport(self._channel, self._backend, stream)

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Underway:
        stream = self._stream
        if background or stream.size == 2 or tensor.nbytes <= _ONE_ROUND_SUM_BYTES:
            return stream.start(_in_windows(stream, "all_reduce", tensor, tensor, op=op))
        return stream.start(_all_reduce(stream, [tensor], op, None))

    def all_gather(self, tensor: Tensor, out: Tensor) -> Underway:
        return self._stream.start(_in_windows(self._stream, "all_gather", tensor, out))

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Underway:
        return self._stream.start(_in_windows(self._stream, "reduce_scatter", tensor, out, op=op))

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Underway:
        return self._stream.start(_in_windows(self._stream, "all_to_all", tensor, out))

    def broadcast_(self, tensor: Tensor, root: int) -> Underway:
        return self._stream.start(_in_windows(self._stream, "broadcast", tensor, tensor, root=root))

    def all_to_all_v(
        self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
    ) -> Underway:
        return self._stream.start(_exchange(self._stream, flat, out, send, receive))

    def packed(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        receive: Receive,
        sizes: Sizes,
        own: int,
        op: str,
    ) -> Handle | None:
        if not all(is_carried(each, op) and each.dtype in CARRIED_DTYPES for each in tensors):
            return None
        stream = self._channel.background["gathers" if kind == "all_gather" else "reductions"]
        if kind == "all_reduce":
            return stream.start(_all_reduce(stream, tensors, op, receive))
        return stream.start(_packed(stream, kind, tensors, sizes, own, op, receive))


def is_carried(tensor: Tensor, op: str) -> bool:
    """Return whether shared memory can carry a tensor, reduced with `op` if given."""
    is_reducible = not op or (op in CARRIED_OPS and tensor.dtype in CARRIED_DTYPES)
    return tensor.is_cpu and is_reducible


# --- one tensor -----------------------------------------------------------------------------------


def _in_windows(
    stream: Stream, kind: str, tensor: Tensor, out: Tensor, op: str = "", root: int | None = None
) -> Steps:
    """Run rounds that each show a window of the tensor's rows, and read it of all ranks.

    There is one row, or one row for each rank; then each rank reads the row with its number. Only
    the root of a broadcast shows a row.
    """
    shown = _movable(tensor)
    into = _movable(out)
    ways = stream.size if kind in ("reduce_scatter", "all_to_all") else 1
    what = request(kind, shown.dtype, shown.numel(), op, root=root or 0)
    # 10 elements, of an all-to-all of 2: rows of 5
    length = shown.numel() // ways
    # slots of 1 MiB, float32, 2 rows: 131072
    window = stream.slot_bytes // shown.element_size() // ways
    for a in range(0, max(length, 1), window):
        b = min(a + window, length)
        slots, own = stream.slots(shown.dtype, ways * (b - a), ways)
        if root in (None, stream.rank) and b - a == length:
            own.copy_(_flat(shown))
        elif root in (None, stream.rank):
            own.view(ways, b - a).copy_(shown.view(ways, length)[:, a:b])  # rows of 5, window 2:4
        yield what
        if op:
            reduce_rows(slots, op, _window(_flat(into), a, b))
        elif root is None:
            rows = into.view(stream.size, into.numel() // stream.size)
            (rows if b - a == rows.shape[1] else rows[:, a:b]).copy_(slots)
        elif root != stream.rank:
            _window(_flat(into), a, b).copy_(slots[root])


def _exchange(
    stream: Stream, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
) -> Steps:
    """Exchange blocks of exact sizes: each rank shows its whole input, a slot in each round.

    The ranks publish byte counts in the first round, and each rank derives from them the parts to
    read.
    """
    width = flat.element_size()
    window = stream.slot_bytes
    said = stream.peers.said
    # a rank without any element may not know the dtype, and publishes 0
    dtype = number_of(flat.dtype) + 1 if flat.numel() or out.numel() else 0
    flat, out = as_bytes(flat), as_bytes(out)
    # 3 of float32: 12 bytes
    send, receive = [n * width for n in send], [n * width for n in receive]
    what = request("all_to_all_v", flat.dtype, 0)
    # rank, first and last byte of the block for this one
    sources: list[tuple[int, int, int]] = []
    # receive 3, 1, 2: 0, 3, 4
    arrived = [end - count for end, count in zip(accumulate(receive), receive, strict=True)]
    a = 0
    longest = 1
    while a < longest:
        shown = flat[a : a + window]
        slots, own = stream.slots(flat.dtype, window)
        own[: shown.numel()].copy_(shown)
        if a == 0:
            said[stream.round + 1 & 1][stream.rank][:] = array("Q", (*send, flat.numel(), dtype))
        yield what
        if a == 0:
            # of each rank: bytes for every rank and in all, and the dtype
            counts = [numbers.tolist() for numbers in said[stream.round & 1]]
            _require_one_dtype(stream, [of_rank.pop() for of_rank in counts])
            for rank, (sent, count) in enumerate(zip(counts, receive, strict=True)):
                if sent[stream.rank] != count:
                    raise stream.peers.fail(
                        f"all_to_all_v: rank {rank} of the group sends {sent[stream.rank]} bytes "
                        f"to rank {stream.rank}, which expects {count}"
                    )
                if count:
                    first = sum(sent[: stream.rank])  # 3, 1, 2: rank 2 from 4
                    sources.append((rank, first, first + count))
            longest = max(total for *_, total in counts)
        for rank, first, last in sources:
            # block 3:9, window 4:8: 4:8
            low = max(first, a)
            high = min(last, a + window)
            if low < high:
                # block 3:9 from 4 on: 1 behind its begin
                place = arrived[rank] + low - first
                out[place : place + high - low].copy_(slots[rank, low - a : high - a])
        a += window


def _require_one_dtype(stream: Stream, numbers: Sequence[int]) -> None:
    """Raise a PeerError if ranks exchange elements of different dtypes.

    The number of the dtype is 0 on ranks without any element.
    """
    if len({*numbers} - {0}) > 1:
        names = {rank: name_of(number - 1) for rank, number in enumerate(numbers) if number}
        ranks = ", ".join(
            f"rank {stream.peers.ranks[rank]}: {name}" for rank, name in names.items()
        )
        raise stream.peers.fail(f"all_to_all_v: ranks exchange different dtypes: {ranks}")


def _movable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes if shared memory has no number for its dtype."""
    return tensor if tensor.dtype in CARRIED_DTYPES else as_bytes(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements in one dim.

    A view takes a microsecond, so a 1-D tensor is returned as it is.
    """
    return tensor if tensor.ndim == 1 else tensor.view(-1)


def _window(flat: Tensor, a: int, b: int) -> Tensor:
    """Return elements a to b.

    A slice takes a microsecond, so all elements are returned unsliced.
    """
    return flat if b - a == flat.numel() else flat[a:b]


# --- many tensors in one message ------------------------------------------------------------------


def _packed(  # noqa: PLR0913  # a request, and what arrives
    stream: Stream,
    kind: str,
    tensors: Sequence[Tensor],
    counts: Sizes,
    block: int,
    op: str,
    receive: Receive,
) -> Steps:
    """Pass each rank's message, or the reduction of one block of all messages, to `receive`.

    Messages are to be read during the call. `counts[i]` is the number of elements of rank i for a
    gather, and of block i for a reduce-scatter.
    """
    own = Packer(tensors)
    dtype = tensors[0].dtype
    del tensors
    gathers = kind == "all_gather"
    start = sum(counts[:block])
    window_bytes = stream.slot_bytes
    # counts (2, 5): 0:2 of rank 0 and 0:5 of rank 1 are gathered; of all messages 2:7 are reduced
    # on rank 1.
    spans = [(0, n) for n in counts]
    length = max(counts)
    if not gathers:
        spans = [(start, start + counts[block])]
        length = own.length
        window_bytes = min(window_bytes, _PACKED_WINDOW_BYTES)
    what = request(kind, dtype, sum(counts), op)
    window = window_bytes // dtype.itemsize
    out: list[Tensor] = []
    for a in range(0, max(length, 1), window):
        if a and stream.depth == 1:
            yield FREE
        b = min(a + window, length)
        slots, slot = stream.slots(dtype, b - a)
        own.pack(slot, a)
        yield what
        if gathers and b - a == length:
            is_matrix = len(set(counts)) == 1
            rows = slots if is_matrix else [row[:n] for row, n in zip(slots, counts, strict=True)]
            _deliver(receive, rows)
            return
        out = out or [torch.empty(last - first, dtype=dtype, device="cpu") for first, last in spans]
        for i, (first, last) in enumerate(spans):
            # 2:7, of which a window 4:8 brings 4:7
            low = max(a, first)
            high = min(b, last)
            if low < high and gathers:
                out[i][low:high].copy_(slots[i, low - a : high - a])
            elif low < high:
                reduce_rows(slots[:, low - a : high - a], op, out[i][low - first : high - first])
    _deliver(receive, out)


def _all_reduce(
    stream: Stream, tensors: Sequence[Tensor], op: str, receive: Receive | None
) -> Steps:
    """Pass the reduction of every tensor to `receive`, or reduce in place without it.

    Each result gets its own memory when its first elements arrive. Reductions in place, and large
    messages, take two rounds per window: every rank reduces the part with its number, and reads the
    parts of all ranks.
    """
    given = tensors if receive else [_flat(tensor) for tensor in tensors]
    own = Packer(given)
    dtype = given[0].dtype
    totals = [torch.empty(0, dtype=dtype, device="cpu") for _ in given] if receive else list(given)
    del tensors, given

    def unpack(rows: Sequence[Tensor], start: int) -> None:
        for row in rows:
            at = 0  # elements of the row that are unpacked
            for i, low, high in _pieces(own.ends, start, start + row.numel()):
                if receive and low == 0:
                    totals[i] = torch.empty(
                        own.ends[i] - (own.ends[i - 1] if i else 0), dtype=dtype, device="cpu"
                    )
                totals[i][low:high].copy_(row[at : at + high - low])
                at += high - low
            start += row.numel()

    in_parts = receive is None or own.length * dtype.itemsize > _PACKED_ONE_ROUND_SUM_BYTES
    what = request("all_reduce_by_parts" if in_parts else "all_reduce", dtype, own.length, op)
    window = min(stream.slot_bytes, _PACKED_WINDOW_BYTES) // dtype.itemsize
    for a in range(0, max(own.length, 1), window):
        if a and stream.depth == 1:
            yield FREE
        length = min(window, own.length - a)
        slots, slot = stream.slots(dtype, length)
        own.pack(slot, a)
        yield what
        # 10 elements of 4 ranks: 3, 3, 3, 1
        part = -(-length // stream.size) if in_parts else length
        low = min(stream.rank * part, length) if in_parts else 0  # 10 in parts of 3, rank 3: 9:10
        high = min(low + part, length)
        terms = slots[:, low:high]
        if in_parts and stream.depth == 2:
            slots, slot = stream.slots(dtype, length)
            reduce_rows(terms, op, slot[low:high])
        else:
            reduced = torch.empty(high - low, dtype=dtype, device="cpu")
            reduce_rows(terms, op, reduced)
            if not in_parts:
                unpack([reduced], a)
                continue
            # Nobody else reads this rank's own part of its slot in this round, so it takes the
            # result.
            slot[low:high].copy_(reduced)
            del reduced
        yield what
        # 0:3, 3:6, ...
        unpack([slots[rank, rank * part : (rank + 1) * part] for rank in range(stream.size)], a)
    if receive is not None:
        _deliver(receive, totals)


def _deliver(receive: Receive, arrived: Flat) -> None:
    """Call the receiver; raise ReceiveError if it raises."""
    try:
        receive(arrived)
    except Exception as error:
        raise ReceiveError(error) from error


def _pieces(ends: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a message's tensors that are in a window of the message.

    Each part is the index of the tensor, its first element and the element after its last. `ends`
    has the position in the message at which each tensor ends: 3 and 10 for tensors of 3 and 7
    elements.
    """
    i = bisect_right(ends, start)
    # window 2:6: 2:3 of the first tensor, 0:3 of the second
    while start < stop:
        begin = ends[i - 1] if i else 0
        end = min(ends[i], stop)
        if start < end:
            yield i, start - begin, end - begin
        start = end
        i = i + 1


class Packer:
    """A sequence of flat tensors in a message; each is released when it has been packed.

    If the tensors are matrices, their first rows come first, then their second rows, and so on.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.ends = [*accumulate([tensor.numel() for tensor in tensors])]
        self.length: int = self.ends[-1]

    def pack(self, slot: Tensor, start: int) -> None:
        """Fill a slot with the message from an element on, as far as it goes.

        Slots are filled in order.
        """
        stop = min(start + slot.numel(), self.length)
        if stop - start < slot.numel():
            slot = slot[: max(stop - start, 0)]
        if self._tensors and self._tensors[0].ndim == 2:
            if slot.numel() == self.length:
                widths = [tensor.shape[1] for tensor in self._tensors]
                # (2, 3) and (2, 1): (2, 4)
                rows = slot.view(self._tensors[0].shape[0], sum(widths))
                torch._foreach_copy_(list(torch.split(rows, widths, 1)), self._tensors)
                self._tensors.clear()
                return
            self._tensors = [row for rows in zip(*self._tensors, strict=True) for row in rows]
            self.ends = [*accumulate([row.numel() for row in self._tensors])]
        parts = []
        for i, low, high in _pieces(self.ends, start, stop):
            tensor = self._tensors[i]
            parts.append(tensor[low:high] if high - low < tensor.numel() else tensor)
            if high == tensor.numel():
                self._tensors[i] = tensor.new_empty(0)
        if parts:
            torch.cat(parts, out=slot)


def reduce_rows(rows: Tensor, op: str, out: Tensor) -> None:
    """Reduce rows, (size, k) -> (k,)."""
    if op == "avg":
        _average_rows(rows, out)
        return
    of_two, along_dim = _REDUCE[op]
    # 1 MiB each: 40 us, where a reduction along a dim takes 110
    if rows.shape[0] == 2:
        of_two(rows[0], rows[1], out=out)
    else:
        along_dim(rows, 0, out=out)


def _average_rows(rows: Tensor, out: Tensor) -> None:
    """Average rows in float32, (size, k) -> (k,).

    In half types the sum may leave the range although the mean is within it.
    """
    size, length = rows.shape
    step = max(1, _WIDE_ELEMENTS // size)
    for a in range(0, length, step):
        b = min(a + step, length)
        wide = rows[:, a:b].to(torch.float32)
        # Divided first, for bfloat16 has the range of float32; small terms keep their digits there.
        _window(out, a, b).copy_(wide.mul_(1 / size).sum(0))
