"""Collectives that also compare a statement of each rank, in the message that they send anyway.

Ranks that disagree about a layout may send messages of equal sizes, whose elements belong to other
places. Between ranks of one host, a number of the statement is published in shared memory. Other
transports send it as 64 elements at the beginning of each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from .. import _torch
from .._torch import is_traced
from ..argument_types import by_ranks
from ..groups.process_groups import Comm
from ..groups.world import all_gather_objects
from ..shared_memory.channel import Stream
from ..shared_memory.exchange import SharedMemoryTransport
from ..watch.recorder import number_of_text
from .blocks import Blocks, all_to_all_blocks, pack_blocks, unpack_blocks
from .calls import carrier_of
from .even import broadcast

# the elements of a header; a number of `number_of_text` has 57 bits
_BITS = 64


def all_to_all_blocks_compared(
    blocks: Blocks, comm: Comm, out: Blocks, statements: Sequence[str], *, like: Tensor
) -> str:
    """Run `all_to_all_blocks`, unless ranks make different statements.

    Args:
        blocks: the blocks for every rank.
        comm: the communicator.
        out: the places for the blocks of every rank.
        statements: lines that must be equal on all ranks.
        like: a tensor of the dtype of the blocks, on their device; a rank may have no blocks.

    Returns:
        The first line that differs, with the ranks, on all ranks; then `out` is not filled. "" if
        all are equal. Nothing is compared with the fake backend, and while a compiler traces.

    Example:
        >>> def example() -> str:
        ...     comm = comm_over((0, 1))
        ...     blocks = [[torch.ones(1)], [torch.ones(1)]]
        ...     statement = f"rows {comm.rank}"
        ...     return all_to_all_blocks_compared(
        ...         blocks, comm, blocks, [statement], like=torch.ones(1)
        ...     )
        >>> launch(example, 2)[1]
        'rank 0: rows 0; rank 1: rows 1'
    """
    if not _compares(comm, like):
        all_to_all_blocks(blocks, comm, out)
        return ""
    number = number_of_text("\n".join(statements))
    stream = _stream_of(comm, like)
    if stream is not None:
        with stream.comparing(number) as numbers:
            all_to_all_blocks(blocks, comm, out)
        return _difference(comm, statements) if len({*numbers}) > 1 else ""
    header = _header(number, like)
    headers = [torch.empty_like(header) for _ in out]
    sent = [[header, *blocks_of_rank] for blocks_of_rank in blocks]
    arrived = [[own, *places] for own, places in zip(headers, out, strict=True)]
    all_to_all_blocks(sent, comm, arrived)
    differ = any(_number_in(arrived_header) != number for arrived_header in headers)
    return _difference(comm, statements) if differ else ""


def broadcast_blocks_compared(
    blocks: Sequence[Tensor], comm: Comm, src: int, statements: Sequence[str]
) -> str:
    """Overwrite blocks with those of the rank `src`, unless ranks make different statements.

    Args:
        blocks: at least one tensor; of one dtype, and the same shapes on all ranks.
        comm: the communicator.
        src: index of a rank along the communicator.
        statements: as for `all_to_all_blocks_compared`.

    Returns:
        What `all_to_all_blocks_compared` returns. Without shared memory, only a rank that differs
        from `src` can know it.
    """
    if not _compares(comm, blocks[0]):
        _broadcast_blocks(blocks, comm, src)
        return ""
    number = number_of_text("\n".join(statements))
    stream = _stream_of(comm, blocks[0])
    if stream is not None:
        with stream.comparing(number) as numbers:
            copied = broadcast(pack_blocks(blocks), comm, src)
        if len({*numbers}) > 1:
            return _difference(comm, statements)
        if comm.rank != src:
            unpack_blocks(copied, blocks)
        return ""
    header = _header(number, blocks[0])
    _broadcast_blocks([header, *blocks], comm, src)
    if _number_in(header) == number:
        return ""
    return f"rank {comm.ranks[comm.rank]}: {statements[0]}; rank {comm.ranks[src]}: another one"


def _broadcast_blocks(blocks: Sequence[Tensor], comm: Comm, src: int) -> None:
    """Overwrite blocks with those of the rank `src`, in one message."""
    copied = broadcast(pack_blocks(blocks), comm, src)
    if comm.rank != src:
        unpack_blocks(copied, blocks)


def _compares(comm: Comm, like: Tensor) -> bool:
    """Return whether messages come from other ranks; a fake backend brings none."""
    return comm.size > 1 and "fake" not in comm.backend and not is_traced(like)


def _stream_of(comm: Comm, like: Tensor) -> Stream | None:
    """Return the stream of shared memory that carries a message of the communicator, if any."""
    carrier = carrier_of(comm, like)
    return carrier.stream if isinstance(carrier, SharedMemoryTransport) else None


def _header(number: int, like: Tensor) -> Tensor:
    """Return a number as elements of the dtype of a message, on its device.

    The first byte of each element is one bit of the number, 0 or 1, because copies of bool do not
    keep other bytes. No dtype converts the bits, since packed dtypes have no conversions.
    """
    parts = torch.zeros(_BITS, like.element_size(), dtype=torch.uint8, device="cpu")
    bits = [number >> place & 1 for place in range(_BITS)]
    parts[:, 0] = torch.tensor(bits, device="cpu")
    return parts.view(like.dtype).view(_BITS).to(like.device)


def _number_in(header: Tensor) -> int:
    """Return the number of a header."""
    parts = header.cpu().view(torch.uint8).view(_BITS, header.element_size())
    return sum(bit << place for place, bit in enumerate(parts[:, 0].tolist()))


def _difference(comm: Comm, statements: Sequence[str]) -> str:
    """Return the first line in which the statements of ranks differ, with the ranks."""
    of_ranks = all_gather_objects(comm.group, list(statements))
    ranks = _torch.ranks_in_order(comm.group)
    for lines in zip_longest(*of_ranks, fillvalue="nothing"):
        if len({*lines}) > 1:
            texts = by_ranks(dict(zip(ranks, lines, strict=True)))
            return "; ".join(f"{names}: {line}" for names, line in texts.items())
    raise AssertionError("the numbers differ")
