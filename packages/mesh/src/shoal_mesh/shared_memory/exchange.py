"""The transport between CPU ranks of one host: collectives as steps of a stream of rounds.

A message that is larger than a slot takes several rounds, and each round shows a window of it.
Every function returns when its first round is shown; `wait` completes the result. Every rank adds
terms in the order of ranks, so all ranks have the same bits. Many tensors are packed straight into
the slots and read straight from them: no rank has a second copy of the message.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..transport import Handle, Receive, Sizes, Transport, as_bytes
from ..watch.recorder import (
    CARRIED_DTYPES,
    CARRIED_OPS,
    name_of,
    number_of,
    refuse_recorded,
    request,
)
from .channel import Channel, StepwiseWork, Stream
from .packed_messages import PackedMessage, all_reduce_packed, exchange_packed
from .rounds import Steps
from .row_reductions import elements_between, flat_of, reduce_rows

# An all-reduce of more bytes than this takes two rounds between three or more ranks: each rank
# reduces one part, and then reads the parts of the other ranks. Less memory moves this way.
_ONE_ROUND_SUM_BYTES = 1 << 16


class SharedMemoryTransport(Transport):
    """The transport of a group whose ranks have a channel, with the `backend` as a fallback.

    In the background it carries only messages of one round, which the other ranks can read at once.
    Messages of several rounds go to the backend, whose threads carry them on. Messages use the
    channel's foreground if no `stream` is given.
    """

    __slots__ = ("_backend", "_channel", "stream")

    def __init__(self, channel: Channel, backend: Transport, stream: Stream | None = None) -> None:
        self._channel = channel
        self._backend = backend
        self.stream: Stream = channel.foreground if stream is None else stream

    def carrier(self, tensor: Tensor, op: str, background: bool, uneven: bool) -> Transport:
        if not is_carried(tensor, op):
            return self._backend
        if not background:
            return self
        stream_name = "reductions" if op else "gathers"
        stream = self._channel.background[stream_name]
        # of uneven blocks, this rank does not have the number of rounds yet (`_exchange`)
        if uneven or tensor.nbytes > stream.slot_bytes:
            return self._backend
        return SharedMemoryTransport(self._channel, self._backend, stream)

    def all_reduce_(self, tensor: Tensor, op: str, background: bool) -> StepwiseWork:
        stream = self.stream
        if background or stream.size == 2 or tensor.nbytes <= _ONE_ROUND_SUM_BYTES:
            return stream.start(_in_windows(stream, "all_reduce", tensor, tensor, op=op))
        return stream.start(all_reduce_packed(stream, [tensor], op, None))

    def all_gather(self, tensor: Tensor, out: Tensor) -> StepwiseWork:
        return self.stream.start(_in_windows(self.stream, "all_gather", tensor, out))

    def reduce_scatter(self, tensor: Tensor, out: Tensor, op: str) -> StepwiseWork:
        return self.stream.start(_in_windows(self.stream, "reduce_scatter", tensor, out, op=op))

    def all_to_all(self, tensor: Tensor, out: Tensor) -> StepwiseWork:
        return self.stream.start(_in_windows(self.stream, "all_to_all", tensor, out))

    def broadcast_(self, tensor: Tensor, root: int) -> StepwiseWork:
        return self.stream.start(_in_windows(self.stream, "broadcast", tensor, tensor, root=root))

    def all_to_all_v(
        self, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
    ) -> StepwiseWork:
        return self.stream.start(_exchange(self.stream, flat, out, send, receive=receive))

    def start_packed(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        receive: Receive,
        sizes: Sizes,
        own_rank: int,
        op: str,
    ) -> Handle | None:
        if not all(is_carried(tensor, op) and _has_number(tensor) for tensor in tensors):
            return None
        if kind == "all_gather":
            stream = self._channel.background["gathers"]
        else:
            stream = self._channel.background["reductions"]
        if kind == "all_reduce":
            return stream.start(all_reduce_packed(stream, tensors, op, receive))
        message = PackedMessage(stream, kind, sizes, own_rank, op=op)
        return stream.start(exchange_packed(message, tensors, receive))


def is_carried(tensor: Tensor, op: str) -> bool:
    """Return whether shared memory can carry a tensor, reduced with `op` if given."""
    is_reducible = not op or (op in CARRIED_OPS and tensor.dtype in CARRIED_DTYPES)
    return tensor.is_cpu and is_reducible


# --- one tensor -----------------------------------------------------------------------------------


def _in_windows(
    stream: Stream, kind: str, tensor: Tensor, out: Tensor, op: str = "", root: int | None = None
) -> Steps:
    """Run rounds in which each rank shows a window of its tensor's rows, and reads all ranks'.

    The tensor of a reduce-scatter or an all-to-all has one row for each rank, and each rank reads
    the rows with its number. Other tensors are one row. Only the root of a broadcast shows its row.
    An all-to-all of abcdef and ghijkl, in windows of 2 elements of both rows:

        round 1   slot 0  ab de   slot 1  gh jk   rank 0 reads ab, gh   rank 1 reads de, jk
        round 2   slot 0  c  f    slot 1  i  l    rank 0 reads c, i     rank 1 reads f, l
    """
    source = _movable(tensor)
    target = _movable(out)
    row_count = stream.size if kind in ("reduce_scatter", "all_to_all") else 1
    number = request(kind, source.dtype, source.numel(), op, root=root or 0)
    # an all-to-all of 10 elements between 2 ranks: rows of 5 elements
    length = source.numel() // row_count
    # slots of 1 MiB, float32, 2 rows: windows of 131072 elements
    window = stream.slot_bytes // source.element_size() // row_count
    shows = root is None or root == stream.rank
    for start in range(0, max(length, 1), window):
        stop = min(start + window, length)
        width = stop - start
        slots, slot = stream.slots(source.dtype, row_count * width, row_count)
        if shows and width == length:
            slot.copy_(flat_of(source))
        elif shows:
            # rows of 5, window 2:4
            rows = source.view(row_count, length)
            slot.view(row_count, width).copy_(rows[:, start:stop])
        yield number
        if op:
            reduce_rows(slots, op, elements_between(flat_of(target), start, stop))
        elif root is None:
            rows = target.view(stream.size, target.numel() // stream.size)
            if width != rows.shape[1]:
                rows = rows[:, start:stop]
            rows.copy_(slots)
        elif not shows:
            elements_between(flat_of(target), start, stop).copy_(slots[root])


def _exchange(
    stream: Stream, flat: Tensor, out: Tensor, send: list[int], receive: list[int]
) -> Steps:
    """Exchange blocks of exact sizes: each rank shows its whole input, a slot in each round.

    The ranks publish byte counts in the first round, and each rank derives from them the parts to
    read.
    """
    element_bytes = flat.element_size()
    window = stream.slot_bytes
    published = stream.peers.published
    # A rank without any element may not know the dtype, and publishes 0.
    refuse_recorded(flat.numel())
    has_elements = flat.numel() or out.numel()
    dtype = number_of(flat.dtype) + 1 if has_elements else 0
    flat = as_bytes(flat)
    out = as_bytes(out)
    # 3 elements of float32: 12 bytes
    sent_bytes = [count * element_bytes for count in send]
    received_bytes = [count * element_bytes for count in receive]
    number = request("all_to_all_v", flat.dtype, 0)
    sources: list[_SourceBlock] = []
    start = 0
    longest = 1
    while start < longest:
        shown = flat[start : start + window]
        slots, slot = stream.slots(flat.dtype, window)
        slot[: shown.numel()].copy_(shown)
        if start == 0:
            # for the next round, which `yield` shows
            own_numbers = published[stream.round + 1 & 1][stream.rank]
            own_numbers[:] = array("Q", (*sent_bytes, flat.numel(), dtype, 0))
        yield number
        if start == 0:
            # of each rank: the bytes for every rank, the sum of these, and the number of the dtype
            counts = [words.tolist()[:-1] for words in published[stream.round & 1]]
            _require_one_dtype(stream, [counts_of_rank[-1] for counts_of_rank in counts])
            sources = _source_blocks(stream, counts, received_bytes)
            longest = max(counts_of_rank[-2] for counts_of_rank in counts)
        for rank, first, last, target in sources:
            # block 3:9, window 4:8: bytes 4:8
            low = max(first, start)
            high = min(last, start + window)
            if low < high:
                # byte 4 of the input is one behind the begin of block 3:9
                place = target + low - first
                arrived = slots[rank, low - start : high - start]
                out[place : place + high - low].copy_(arrived)
        start += window


class _SourceBlock(NamedTuple):
    """A block for this rank in the input of another rank.

    Attributes:
        rank: the other rank.
        first: its first byte in the input.
        last: the byte after its last one.
        target: where it begins in the output.
    """

    rank: int
    first: int
    last: int
    target: int


def _source_blocks(
    stream: Stream, counts: Sequence[Sequence[int]], receive: Sequence[int]
) -> list[_SourceBlock]:
    """Return the blocks for this rank; raise if a rank sends another number of bytes than expected.

    `counts[i][j]` is the number of bytes that rank i sends to rank j.
    """
    sources = []
    target = 0
    for rank, (sent, expected) in enumerate(zip(counts, receive, strict=True)):
        count = sent[stream.rank]
        if count != expected:
            raise stream.peers.fail(
                f"all_to_all_v: rank {rank} of the group sends {count} bytes to rank "
                f"{stream.rank}, but it expects {expected}"
            )
        if count:
            # rank i sends 3, 1 and 2 bytes: the block for rank 2 begins at 4
            first = sum(sent[: stream.rank])
            sources.append(_SourceBlock(rank, first, first + count, target))
        target += count
    return sources


def _require_one_dtype(stream: Stream, numbers: Sequence[int]) -> None:
    """Raise a PeerError if ranks exchange elements of different dtypes.

    The number of the dtype is 0 on ranks without any element.
    """
    if len({*numbers} - {0}) <= 1:
        return
    peers = stream.peers
    dtypes = []
    for rank, number in zip(peers.ranks, numbers, strict=True):
        if number:
            dtypes.append(f"rank {rank}: {name_of(number - 1)}")
    raise peers.fail(f"all_to_all_v: ranks exchange different dtypes: {', '.join(dtypes)}")


def _has_number(tensor: Tensor) -> bool:
    """Return whether shared memory has a number for the dtype of a tensor."""
    return tensor.dtype in CARRIED_DTYPES


def _movable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes if shared memory has no number for its dtype."""
    return tensor if _has_number(tensor) else as_bytes(tensor)
