"""Ring and all-gather: ways to bring the blocks of all ranks to this rank.

A block is one flat tensor with the keys, then the values, of one rank. Blocks are sent around a
ring, or gathered. Their gradients are sent around the ring too, or reduce-scattered. Each generator
of blocks yields the rank's own block first, and starts the next message before it yields, so that a
block is in flight while the computation uses the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_mesh import Comm, all_gather_v, all_to_all_v, purpose, reduce_scatter_v
from shoal_mesh.internal import Pending

# Pairs of a rank, the owner, and its block.
Blocks = Iterator[tuple[int, Tensor]]
# Function of an owner and its block: the term of the block's gradient from this rank's queries.
GradientTerm = Callable[[int, Tensor], Tensor]


def send_around_ring(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Yield each rank's block in turn, starting with this rank's block.

    Two blocks are in memory at a time.

    Args:
        block: this rank's block.
        sizes: number of elements of each rank's block; a single number if this rank holds the
            whole sequence, so that nothing is sent.
        comm: the communicator along the axis.
    """
    # Example: of 3 ranks, rank 1 yields the blocks of 1 0 2. If this rank holds the whole sequence,
    # there is one block, with the index 0.
    owner = comm.rank % len(sizes)
    for _ in range(len(sizes) - 1):
        pending = _send_to_next(block, sizes, owner, comm, contents="keys and values")
        yield owner, block
        # Example, continued: rank 0 first sent its own block, and then passes on the block of 2.
        block = pending.wait()
        owner = (owner - 1) % comm.size
    yield owner, block


def sum_around_ring(
    gradient_term: GradientTerm, blocks: Blocks, sizes: list[int], comm: Comm
) -> Tensor:
    """Return the gradient of this rank's block, as a sum that is sent around the ring.

    The sum of a block's terms follows the block: each rank adds its term while it has the block.
    After the last step the sum is back on the rank that owns the block.
    """
    arriving: Pending | None = None
    for owner, block in blocks:
        summed = gradient_term(owner, block)
        if len(sizes) == 1:
            return summed
        if arriving is not None:
            summed += arriving.wait()
        arriving = _send_to_next(
            summed, sizes, owner, comm, contents="gradients of keys and values"
        )
    assert arriving is not None, "the ring ran at least one step"
    return arriving.wait()


def _send_to_next(
    block: Tensor, sizes: list[int], owner: int, comm: Comm, *, contents: str
) -> Pending:
    """Send the block of `owner` to the next rank, and receive a block from the previous rank.

    While this rank has the block of `owner`, the previous rank has the block of the rank before
    `owner`, and sends it.
    """
    send = [0] * comm.size
    receive = [0] * comm.size
    next_rank = (comm.rank + 1) % comm.size
    previous_rank = (comm.rank - 1) % comm.size
    send[next_rank] = block.numel()
    # Example: rank 1 sends its own block to rank 2, and receives the block of 0 from rank 0.
    receive[previous_rank] = sizes[(owner - 1) % comm.size]
    with purpose(f"ring attention: {contents}"):
        return all_to_all_v(block, comm, send, receive, async_op=True)


def gather_blocks(block: Tensor, sizes: list[int], comm: Comm) -> Blocks:
    """Yield each rank's block, in the order of `send_around_ring`, all from one all-gather."""
    with purpose("attention: gather keys and values"):
        pending = all_gather_v(block, comm, sizes, async_op=True)
    yield comm.rank, block
    blocks = torch.split_with_sizes(pending.wait(), sizes)
    for step in range(1, comm.size):
        # Example: rank 1 of 3 yields the blocks of 0 and 2 after its own.
        owner = (comm.rank - step) % comm.size
        yield owner, blocks[owner]


def scatter_gradients(
    gradient_term: GradientTerm, blocks: Blocks, sizes: list[int], comm: Comm
) -> Tensor:
    """Return the gradient of this rank's block: the ranks' terms, summed by one reduce-scatter."""
    terms = {owner: gradient_term(owner, block) for owner, block in blocks}
    # Example: rank 1 of 3 has computed the terms in the order 1 0 2, and sends them as 0 1 2.
    flat = torch.cat([terms[owner] for owner in range(comm.size)])
    with purpose("attention: gradients of keys and values"):
        return reduce_scatter_v(flat, comm, sizes)


class Rotation(NamedTuple):
    """A way to bring blocks to this rank, and their gradients back to the owners.

    Attributes:
        blocks: yields the blocks of all ranks, from this rank's block and all blocks' sizes.
        gradients: returns the gradient of this rank's block, from the function that computes
            this rank's term of each block's gradient.
    """

    blocks: Callable[[Tensor, list[int], Comm], Blocks]
    gradients: Callable[[GradientTerm, Blocks, list[int], Comm], Tensor]


ROTATIONS = {
    "ring": Rotation(send_around_ring, sum_around_ring),
    "allgather": Rotation(gather_blocks, scatter_gradients),
}
