"""The collectives, as turns of a channel.

Blocks are contiguous, follow one another and are in the order of the group. Every function returns its last turn
published: `wait` on it completes the result. Messages of more than a slot take several turns, of which all but the last
are completed here. Sums are taken in the order of ranks, wherever they are taken, so all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from .._torch import plain_kernels
from .channel import Channel, Turn
from .request import request

__all__ = [
    "all_gather",
    "all_reduce_",
    "all_to_all",
    "all_to_all_v",
    "broadcast_",
    "reduce_rows",
    "reduce_scatter",
]

# Of more than this, three or more ranks each reduce one part and read the others', which moves less memory and meets
# twice.
_ONE_TURN_SUM_BYTES = 1 << 16
Copy = Callable[[Tensor, int, int], None]
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


def _in_turns(channel: Channel, what: int, like: Tensor, ways: int, write: Copy, read: Copy) -> Turn:
    """Turns that each take a window of `like`'s `ways` equal rows; the last one stays open.

    `write(own, a, b)` fills the own slot with elements a to b of every row, `read(slots, a, b)` takes them from all;
    of several rows those with this rank's number.
    """
    length = like.numel() // ways
    step = channel.slot_bytes // like.element_size() // ways
    for a in range(0, max(length, 1), step):
        b = min(a + step, length)
        slots, own = channel.begin(like.dtype, ways * (b - a), ways)  # which completes the turn before
        write(own, a, b)
        turn = channel.publish(what, partial(read, slots, a, b))
    return turn


def _to_each(tensor: Tensor, ways: int) -> Copy:
    """The `write` that shows a window of `ways` equal blocks."""
    length = tensor.numel() // ways

    def write(own: Tensor, a: int, b: int) -> None:
        if b - a == length:
            own.copy_(_flat(tensor))
        else:
            own.view(ways, b - a).copy_(tensor.view(ways, length)[:, a:b])

    return write


def _flat(tensor: Tensor) -> Tensor:
    """All elements in one dim; a view takes a microsecond, so none is made of what has one."""
    return tensor if tensor.ndim == 1 else tensor.view(-1)


def _window(flat: Tensor, a: int, b: int) -> Tensor:
    """Elements a to b; a slice takes a microsecond, so none is made of all."""
    return flat if b - a == flat.numel() else flat[a:b]


def _columns(rows: Tensor, a: int, b: int) -> Tensor:
    """Elements a to b of every row, likewise."""
    return rows if b - a == rows.shape[1] else rows[:, a:b]


@plain_kernels
def all_reduce_(channel: Channel, tensor: Tensor, op: str, background: bool) -> Turn:
    """Reduce in place; in the background in one turn, which is visible to the others at once and moves more memory."""
    flat = _flat(tensor)

    def write(own: Tensor, a: int, b: int) -> None:
        own.copy_(_window(flat, a, b))

    def read(slots: Tensor, a: int, b: int) -> None:
        reduce_rows(slots, op, _window(flat, a, b))

    if background or channel.size == 2 or tensor.nbytes <= _ONE_TURN_SUM_BYTES:
        what = request("all_reduce", tensor.dtype, tensor.numel(), op)
        return _in_turns(channel, what, tensor, 1, write, read)
    what = request("all_reduce_by_parts", tensor.dtype, tensor.numel(), op)
    for window in torch.split(flat, channel.slot_bytes // tensor.element_size()):
        slots, own = channel.begin(tensor.dtype, window.numel())
        own.copy_(window)
        channel.publish(what, _nothing).wait()
        turn = _reduce_own_part(channel, slots, window, op, what)
    return turn


def _nothing() -> None:
    """What there is to read where the next turn reads it."""


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


@plain_kernels
def all_gather(channel: Channel, tensor: Tensor, out: Tensor) -> Turn:
    """(m, ...) -> (size * m, ...)."""
    flat, rows = _flat(tensor), out.view(channel.size, tensor.numel())

    def write(own: Tensor, a: int, b: int) -> None:
        own.copy_(_window(flat, a, b))

    def read(slots: Tensor, a: int, b: int) -> None:
        _columns(rows, a, b).copy_(slots)

    return _in_turns(channel, request("all_gather", tensor.dtype, tensor.numel()), tensor, 1, write, read)


@plain_kernels
def reduce_scatter(channel: Channel, tensor: Tensor, out: Tensor, op: str) -> Turn:
    """(size * m, ...) -> (m, ...)."""
    size, flat = channel.size, _flat(out)

    def read(slots: Tensor, a: int, b: int) -> None:
        reduce_rows(slots, op, _window(flat, a, b))

    what = request("reduce_scatter", tensor.dtype, tensor.numel(), op)
    return _in_turns(channel, what, tensor, size, _to_each(tensor, size), read)


@plain_kernels
def all_to_all(channel: Channel, tensor: Tensor, out: Tensor) -> Turn:
    """(size * m, ...) -> (size * m, ...): block j goes to rank j, block i comes from rank i."""
    size = channel.size
    into = out.view(size, tensor.numel() // size)

    def read(slots: Tensor, a: int, b: int) -> None:
        _columns(into, a, b).copy_(slots)

    what = request("all_to_all", tensor.dtype, tensor.numel())
    return _in_turns(channel, what, tensor, size, _to_each(tensor, size), read)


@plain_kernels
def broadcast_(channel: Channel, tensor: Tensor, root: int) -> Turn:
    """Overwrite with the tensor of one rank."""
    flat, what = _flat(tensor), request("broadcast", tensor.dtype, tensor.numel(), "", root)

    def write(own: Tensor, a: int, b: int) -> None:
        if channel.rank == root:
            own.copy_(_window(flat, a, b))

    def read(slots: Tensor, a: int, b: int) -> None:
        if channel.rank != root:
            _window(flat, a, b).copy_(slots[root])

    return _in_turns(channel, what, tensor, 1, write, read)


@plain_kernels
def all_to_all_v(channel: Channel, flat: Tensor, send: Sequence[int], receive: Sequence[int], out: Tensor) -> None:
    """1-D blocks of `send[j]` bytes for rank j -> `receive[i]` bytes from rank i; completes at once.

    Each rank shows its whole input, a slot in each turn. What the others have to read of it follows from the counts
    that ranks publish in the first turn.

    Raises:
        CollectiveError: a rank sends another number of bytes than this one expects.
    """
    step, what = channel.slot_bytes, request("all_to_all_v", flat.dtype, 0)
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
