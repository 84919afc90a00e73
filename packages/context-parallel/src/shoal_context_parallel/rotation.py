"""How the blocks of keys and values come to every rank, and their gradients back: around a ring, or gathered.

A block is one flat tensor: keys, then values, of one rank.  Each generator yields the rank's own block first and starts
the next message before it does, so that blocks travel while the one before is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shoal_mesh import Comm, all_gather_v, all_to_all_v, purpose, reduce_scatter_v
from shoal_mesh.internal import Pending

Blocks = Iterator[tuple[int, Tensor]]  # whose block, and the block
Gradient = Callable[[int, Tensor], Tensor]  # of whose block: the summand of this rank's queries


def around_ring(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Each rank's block in turn, from the rank before in the ring; two blocks are in memory at a time.

    Args:
        block: this rank's, flat.
        sizes: elements of each rank's block.
        comm: the axis.
    """
    owner = comm.rank
    for step in range(comm.size):
        last = step == comm.size - 1
        pending = None if last else _to_next(block, sizes, owner, comm, "keys and values")
        yield owner, block
        if pending is not None:
            block, owner = pending.wait(), (owner - 1) % comm.size


def ring_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """The gradient of this rank's block: a sum that travels behind the blocks, and comes home after the last step."""
    arriving: Pending | None = None
    for owner, block in blocks:
        summed = gradient(owner, block)
        if arriving is not None:
            summed += arriving.wait()
        arriving = _to_next(summed, sizes, owner, comm, "gradients of keys and values")
    assert arriving is not None, "an axis has a rank"
    return arriving.wait()


def _to_next(block: Tensor, sizes: list[int], owner: int, comm: Comm, what: str) -> Pending:
    """Send a block to the next rank, and receive the one of the rank before, which is of the owner before."""
    if comm.size == 1:
        return Pending(block, None)
    send, receive = [0] * comm.size, [0] * comm.size
    send[(comm.rank + 1) % comm.size] = block.numel()
    receive[(comm.rank - 1) % comm.size] = sizes[(owner - 1) % comm.size]
    with purpose(f"ring attention: {what}"):
        return all_to_all_v(block, comm, send, receive, async_op=True)


def gathered(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Each rank's block, in the order of `around_ring`, all from one all-gather."""
    with purpose("attention: gather keys and values"):
        pending = all_gather_v(block, comm, sizes, async_op=True)
    yield comm.rank, block
    blocks = torch.split_with_sizes(pending.wait(), sizes)
    for step in range(1, comm.size):
        owner = (comm.rank - step) % comm.size
        yield owner, blocks[owner]


def gathered_gradients(gradient: Gradient, blocks: Blocks, sizes: list[int], comm: Comm) -> Tensor:
    """The gradient of this rank's block: the ranks' summands, by one reduce-scatter."""
    summands: dict[int, Tensor] = {}
    for owner, block in blocks:
        summands[owner] = gradient(owner, block)
    flat = torch.cat([summands[owner] for owner in range(comm.size)])
    with purpose("attention: gradients of keys and values"):
        return reduce_scatter_v(flat, comm, sizes)


ROTATIONS = {"ring": (around_ring, ring_gradients), "allgather": (gathered, gathered_gradients)}
"""By method: how blocks come, and how their gradients go home."""
