"""The transport between CPU ranks of one host: each collective as steps of a stream of rounds.

Messages of more than a slot take several rounds. Every function returns with its first round shown: `wait` completes
the result. Slots are double, so the next one is free to be written once a round has been met. Sums are taken in the
order of ranks, wherever they are taken, so all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..transport import Handle, Receive, Transport, as_bytes
from . import messages
from .channel import Channel
from .messages import reduce_rows
from .recorder import CARRIED_DTYPES, CARRIED_OPS, request
from .stream import Steps, Stream, Underway

# Of more than this, three or more ranks reduce one part each and read the others': less memory moves, in two rounds.
_ONE_ROUND_SUM_BYTES = 1 << 16
Read = Callable[[Tensor, int, int], object]


class SharedMemoryTransport(Transport):
    """The transport of a group whose ranks have a channel. What it does not carry, the backend of the group does.

    In the background it takes messages of one round only, which are visible to the others at once: what takes several
    is left to the backend, whose threads do it.

    Args:
        channel: of the group.
        backend: the group's own transport.
        stream: which messages take; the channel's foreground if it is left out.
    """

    __slots__ = ("_backend", "_channel", "_stream")

    def __init__(self, channel: Channel, backend: Transport, stream: Stream | None = None) -> None:
        self._channel, self._backend = channel, backend
        self._stream: Stream = channel.foreground if stream is None else stream

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        if (
            not tensor.is_cpu
            or type(tensor) is not Tensor
            or (op and (op not in CARRIED_OPS or tensor.dtype not in CARRIED_DTYPES))
        ):
            return self._backend
        if not background:
            return self
        stream = self._channel.background["reductions" if op else "gathers"]
        if uneven or tensor.nbytes > stream.slot_bytes:  # uneven: no rank knows how many rounds, before it meets others
            return self._backend
        return SharedMemoryTransport(self._channel, self._backend, stream)

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Underway:
        stream = self._stream
        if background or stream.size == 2 or tensor.nbytes <= _ONE_ROUND_SUM_BYTES:
            return _reduce(stream, "all_reduce", tensor, tensor, op)
        return stream.start(_reduce_by_parts(stream, tensor, op))

    def all_gather(self, tensor: Tensor, out: Tensor) -> Underway:
        return _move(self._stream, "all_gather", tensor, out)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Underway:
        return _reduce(self._stream, "reduce_scatter", tensor, out, op)

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Underway:
        return _move(self._stream, "all_to_all", tensor, out)

    def broadcast_(self, tensor: Tensor, root: int) -> Underway:
        stream = self._stream

        def read(slots: Tensor, a: int, b: int) -> None:
            if stream.rank != root:
                _window(_flat(_movable(tensor)), a, b).copy_(slots[root])

        shows = stream.rank == root
        return stream.start(_in_windows(stream, "broadcast", tensor, 1, read, root=root, shows=shows))

    def all_to_all_v(self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]) -> Underway:
        return self._stream.start(_exchange(self._stream, flat, out, send, receive))

    def packed(
        self, kind: str, tensors: Sequence[Tensor], receive: Receive, sizes: Sequence[int], own: int, op: str
    ) -> Handle | None:
        if any(
            self.carrier(each, op, False, False) is not self or each.dtype not in CARRIED_DTYPES for each in tensors
        ):
            return None
        stream = self._channel.background["gathers" if kind == "all_gather" else "reductions"]
        if kind == "all_gather":
            return stream.start(messages.all_gather(stream, tensors, sizes, receive))
        if kind == "reduce_scatter":
            return stream.start(messages.reduce_scatter(stream, tensors, sizes, own, op, receive))
        return stream.start(messages.all_reduce(stream, tensors, op, receive))


def _in_windows(  # noqa: PLR0913  # a request, and what is shown
    stream: Stream,
    kind: str,
    tensor: Tensor,
    ways: int,
    read: Read,
    op: str = "",
    root: int = 0,
    shows: bool = True,
) -> Steps:
    """Rounds that each show a window of the tensor's `ways` equal rows.

    `read(slots, a, b)` takes elements a to b from all ranks: of their only row, or of the row with this rank's number.
    """
    shown = _movable(tensor)
    what = request(kind, shown.dtype, shown.numel(), op, root)
    length = shown.numel() // ways  # 10 elements, of an all-to-all of 2: rows of 5
    window = stream.slot_bytes // shown.element_size() // ways  # slots of 1 MiB, float32, 2 rows: 131072
    for a in range(0, max(length, 1), window):
        b = min(a + window, length)
        slots, own = stream.slots(shown.dtype, ways * (b - a), ways)
        if shows and b - a == length:
            own.copy_(_flat(shown))
        elif shows:
            own.view(ways, b - a).copy_(shown.view(ways, length)[:, a:b])  # rows of 5, window 2:4
        yield what
        read(slots, a, b)


def _reduce(stream: Stream, kind: str, tensor: Tensor, out: Tensor, op: str) -> Underway:
    """Into `out`, which may be the tensor itself, the reduction of all elements, or of the block for this rank."""
    ways = stream.size if kind == "reduce_scatter" else 1

    def read(slots: Tensor, a: int, b: int) -> None:
        reduce_rows(slots, op, _window(_flat(out), a, b))

    return stream.start(_in_windows(stream, kind, tensor, ways, read, op))


def _reduce_by_parts(stream: Stream, tensor: Tensor, op: str) -> Steps:
    """In place: every rank reduces the part with its number into its next slot, and reads the parts of all."""
    flat, what = _flat(tensor), request("all_reduce_by_parts", tensor.dtype, tensor.numel(), op)
    for window in torch.split(flat, stream.slot_bytes // tensor.element_size()):
        slots, own = stream.slots(tensor.dtype, window.numel())
        own.copy_(window)
        yield what
        part = -(-window.numel() // stream.size)  # 10 elements of 4 ranks: parts of 3, 3, 3, 1
        start = min(stream.rank * part, window.numel())  # 10 in parts of 3, rank 3: 9:10
        stop = min(start + part, window.numel())
        parts, own = stream.slots(tensor.dtype, part)
        reduce_rows(slots[:, start:stop], op, own[: stop - start])
        yield what
        full, rest = divmod(window.numel(), part)  # 10 by 3: 3 whole parts and 1
        window[: full * part].view(full, part).copy_(parts[:full])
        if rest:
            window[full * part :].copy_(parts[full, :rest])


def _move(stream: Stream, kind: str, tensor: Tensor, out: Tensor) -> Underway:
    """Into `out`, of an "all_gather" the tensors of all ranks, of an "all_to_all" the block of each for this one."""
    ways = stream.size if kind == "all_to_all" else 1

    def read(slots: Tensor, a: int, b: int) -> None:
        into = _movable(out)
        rows = into.view(stream.size, into.numel() // stream.size)
        (rows if b - a == rows.shape[1] else rows[:, a:b]).copy_(slots)

    return stream.start(_in_windows(stream, kind, tensor, ways, read))


def _exchange(stream: Stream, flat: Tensor, out: Tensor, send: list[int], receive: list[int]) -> Steps:
    """Blocks of exact sizes. Each rank shows its whole input, a slot in each round.

    What the others have to read of it follows from the counts that ranks publish in the first round.
    """
    width, window = flat.element_size(), stream.slot_bytes
    flat, out = as_bytes(flat), as_bytes(out)  # a rank without any element may not know the dtype
    send, receive = [n * width for n in send], [n * width for n in receive]  # 3 of float32: 12 bytes
    what = request("all_to_all_v", flat.dtype, 0)
    sources: list[tuple[int, int, int]] = []  # rank, first and last byte of the block for this one
    arrived = [end - count for end, count in zip(accumulate(receive), receive, strict=True)]  # receive 3, 1, 2: 0, 3, 4
    a, longest = 0, 1
    while a < longest:
        shown = flat[a : a + window]
        slots, own = stream.slots(flat.dtype, window)
        own[: shown.numel()].copy_(shown)
        if a == 0:
            stream.say((*send, flat.numel()))
        yield what
        if a == 0:
            sources.extend(_sources(stream, receive))
            longest = max(stream.said(rank, stream.size) for rank in range(stream.size))
        for rank, first, last in sources:
            low, high = max(first, a), min(last, a + window)  # block 3:9, window 4:8: 4:8
            if low < high:
                place = arrived[rank] + low - first  # block 3:9 from 4 on: 1 behind its begin
                out[place : place + high - low].copy_(slots[rank, low - a : high - a])
        a += window


def _sources(stream: Stream, receive: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of each rank that sends something: its number, where in its input that begins, and where it ends."""
    for rank, count in enumerate(receive):
        sent = stream.said(rank, stream.rank)
        if sent != count:
            raise stream.peers.fail(
                f"all_to_all_v: rank {rank} of the group sends {sent} bytes to rank {stream.rank}, "
                f"which expects {count}"
            )
        if count:
            first = sum(stream.said(rank, before) for before in range(stream.rank))  # 3, 1, 2: rank 2 from 4
            yield rank, first, first + count


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where its dtype is none that shared memory names."""
    return tensor if tensor.dtype in CARRIED_DTYPES else as_bytes(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """All elements in one dim; a view takes a microsecond, so none is made of what has one."""
    return tensor if tensor.ndim == 1 else tensor.view(-1)


def _window(flat: Tensor, a: int, b: int) -> Tensor:
    """Elements a to b; a slice takes a microsecond, so none is made of all."""
    return flat if b - a == flat.numel() else flat[a:b]
