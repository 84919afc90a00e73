"""The transport between CPU ranks of one host: collectives as turns of a channel.

Every function returns its last turn published: `wait` on it completes the result. Messages of more than a slot take
several turns, of which all but the last are completed here. Sums are taken in the order of ranks, wherever they are
taken, so all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from .._torch import plain_kernels
from ..transport import Handle, Receive, Transport, as_bytes
from . import messages
from .channel import SLOT_BYTES, Channel, Turn
from .messages import reduce_rows
from .request import DTYPES, OPS, request

# Of more than this, three or more ranks reduce one part each and read the others': they move less memory, in two turns.
_ONE_TURN_SUM_BYTES = 1 << 16
_DTYPES = frozenset(DTYPES)
Read = Callable[[Tensor, int, int], None]


class SharedMemoryTransport:
    """The transport of a group whose ranks have a channel. What it does not carry, the backend of the group does.

    In the background it takes messages of one turn only, which are visible to the others at once: what takes several is
    left to the backend, whose threads do it.
    """

    __slots__ = ("_backend", "_channel")

    def __init__(self, channel: Channel, backend: Transport) -> None:
        self._channel, self._backend = channel, backend

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        if not tensor.is_cpu or type(tensor) is not Tensor or (op and (op not in OPS or tensor.dtype not in _DTYPES)):
            return self._backend
        # How many turns uneven blocks take, no rank knows before it has met the others.
        return self._backend if background and (uneven or tensor.nbytes > SLOT_BYTES) else self

    @plain_kernels
    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> Turn:
        channel, flat = self._channel, _flat(tensor)
        if background or channel.size == 2 or tensor.nbytes <= _ONE_TURN_SUM_BYTES:
            return _reduce(channel, "all_reduce", flat, flat, op)
        what = request("all_reduce_by_parts", tensor.dtype, tensor.numel(), op)
        for window in torch.split(flat, channel.slot_bytes // tensor.element_size()):
            slots, own = channel.begin(tensor.dtype, window.numel())
            own.copy_(window)
            channel.publish(what, lambda: None).wait()  # the next turn reads it
            turn = _reduce_own_part(channel, slots, window, op, what)
        return turn

    @plain_kernels
    def all_gather(self, tensor: Tensor, out: Tensor) -> Turn:
        return _move(self._channel, "all_gather", _movable(tensor), _movable(out))

    @plain_kernels
    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> Turn:
        return _reduce(self._channel, "reduce_scatter", tensor, _flat(out), op)

    @plain_kernels
    def all_to_all(self, tensor: Tensor, out: Tensor) -> Turn:
        return _move(self._channel, "all_to_all", _movable(tensor), _movable(out))

    @plain_kernels
    def broadcast_(self, tensor: Tensor, root: int) -> Turn:
        channel, flat = self._channel, _flat(_movable(tensor))

        def read(slots: Tensor, a: int, b: int) -> None:
            if channel.rank != root:
                _window(flat, a, b).copy_(slots[root])

        what = request("broadcast", flat.dtype, flat.numel(), "", root)
        return _in_turns(channel, what, flat, 1, read, shows=channel.rank == root)

    @plain_kernels
    def all_to_all_v(self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]) -> None:
        """Completes at once. Each rank shows its whole input, a slot in each turn.

        What the others have to read of it follows from the counts that ranks publish in the first turn.

        Raises:
            CollectiveError: a rank sends another number of bytes than this one expects.
        """
        width = flat.element_size()
        flat, out = as_bytes(flat), as_bytes(out)  # a rank without any element may not know the dtype
        send, receive = [n * width for n in send], [n * width for n in receive]
        channel, step, what = self._channel, self._channel.slot_bytes, request("all_to_all_v", flat.dtype, 0)
        sources: list[tuple[int, int, int]] = []  # rank, first and last byte of the block for this one
        arrived = [end - count for end, count in zip(accumulate(receive), receive, strict=True)]
        turns, index = 1, 0

        def read(slots: Tensor, a: int) -> None:
            nonlocal turns
            if index == 0:
                sources.extend(_sources(channel, receive))
                turns = max(max(-(-channel.noted(rank, channel.size) // step), 1) for rank in range(channel.size))
            for rank, first, last in sources:
                low, high = max(first, a), min(last, a + step)
                if low < high:
                    place = arrived[rank] + low - first
                    out[place : place + high - low].copy_(slots[rank, low - a : high - a])

        while index < turns:
            a = index * step
            slots, own = channel.begin(flat.dtype, step)
            window = flat[a : a + step]
            own[: window.numel()].copy_(window)
            notes = (*send, flat.numel()) if index == 0 else ()
            channel.publish(what, partial(read, slots, a), notes).wait()
            index += 1

    def packed(
        self, kind: str, tensors: Sequence[Tensor], receive: Receive, sizes: Sequence[int], own: int, op: str
    ) -> Handle | None:
        if any(self.carrier(each, op, False, False) is not self or each.dtype not in _DTYPES for each in tensors):
            return None
        lane = self._channel.lanes["gathers" if kind == "all_gather" else "reductions"]
        if kind == "all_gather":
            return lane.start(messages.all_gather(lane, tensors, sizes, receive))
        if kind == "reduce_scatter":
            return lane.start(messages.reduce_scatter(lane, tensors, sizes, own, op, receive))
        return lane.start(messages.all_reduce(lane, tensors, op, receive))


def _in_turns(channel: Channel, what: int, shown: Tensor, ways: int, read: Read, shows: bool = True) -> Turn:
    """Turns that each show a window of `shown`'s `ways` equal rows; the last one stays open.

    `read(slots, a, b)` takes elements a to b from all ranks: of their only row, or of the row with this rank's number.
    """
    length = shown.numel() // ways
    step = channel.slot_bytes // shown.element_size() // ways
    for a in range(0, max(length, 1), step):
        b = min(a + step, length)
        slots, own = channel.begin(shown.dtype, ways * (b - a), ways)  # which completes the turn before
        if shows and b - a == length:
            own.copy_(_flat(shown))
        elif shows:
            own.view(ways, b - a).copy_(shown.view(ways, length)[:, a:b])
        turn = channel.publish(what, partial(read, slots, a, b))
    return turn


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where its dtype is none that shared memory names."""
    return tensor if tensor.dtype in _DTYPES else as_bytes(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """All elements in one dim; a view takes a microsecond, so none is made of what has one."""
    return tensor if tensor.ndim == 1 else tensor.view(-1)


def _window(flat: Tensor, a: int, b: int) -> Tensor:
    """Elements a to b; a slice takes a microsecond, so none is made of all."""
    return flat if b - a == flat.numel() else flat[a:b]


def _reduce(channel: Channel, kind: str, tensor: Tensor, flat: Tensor, op: str) -> Turn:
    """Into `flat`, which may be the tensor itself, the reduction of all elements, or of the block for this rank."""

    def read(slots: Tensor, a: int, b: int) -> None:
        reduce_rows(slots, op, _window(flat, a, b))

    ways = channel.size if kind == "reduce_scatter" else 1
    return _in_turns(channel, request(kind, tensor.dtype, tensor.numel(), op), tensor, ways, read)


def _reduce_own_part(channel: Channel, slots: Tensor, window: Tensor, op: str, what: int) -> Turn:
    """Reduce the part of the slots with this rank's number into the other slot, and read the parts of all."""
    part = -(-window.numel() // channel.size)
    start = min(channel.rank * part, window.numel())
    stop = min(start + part, window.numel())
    parts, own = channel.begin(window.dtype, part)
    reduce_rows(slots[:, start:stop], op, own[: stop - start])

    def read() -> None:
        full, rest = divmod(window.numel(), part)
        window[: full * part].view(full, part).copy_(parts[:full])
        if rest:
            window[full * part :].copy_(parts[full, :rest])

    return channel.publish(what, read)


def _move(channel: Channel, kind: str, tensor: Tensor, out: Tensor) -> Turn:
    """Into `out`, of an "all_gather" the tensors of all ranks, of an "all_to_all" the block of each for this one."""
    ways = channel.size if kind == "all_to_all" else 1
    rows = out.view(channel.size, tensor.numel() // ways)

    def read(slots: Tensor, a: int, b: int) -> None:
        (rows if b - a == rows.shape[1] else rows[:, a:b]).copy_(slots)

    return _in_turns(channel, request(kind, tensor.dtype, tensor.numel()), tensor, ways, read)


def _sources(channel: Channel, receive: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of each rank that sends something: its number, where in its input that begins, and where it ends."""
    for rank, count in enumerate(receive):
        sent = channel.noted(rank, channel.rank)
        if sent != count:
            raise channel.fail(
                f"all_to_all_v: rank {rank} of the group sends {sent} bytes to rank {channel.rank}, "
                f"which expects {count}"
            )
        if count:
            first = sum(channel.noted(rank, before) for before in range(channel.rank))
            yield rank, first, first + count
