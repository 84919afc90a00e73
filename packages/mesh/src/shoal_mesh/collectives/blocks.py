"""One all-to-all of exact blocks: each rank sends all its blocks to all others in one message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from .._torch import is_traced
from ..argument_types import require, require_each
from ..errors import CollectiveError, CollectiveTypeError
from ..events import observers, run_observed
from ..groups.process_groups import Comm
from ..groups.world import device_of
from . import calls
from .calls import (
    LOST_GRADIENT,
    Along,
    as_plain,
    check_operand,
    is_dense,
    loses_gradient,
    materialize,
    refuse_gradient,
    refuse_transformed,
    require_tensors,
    resolve,
)
from .flat_messages import parts_like
from .graph_dependences import with_dependence

Blocks = Sequence[Sequence[Tensor]]


def all_to_all_blocks(blocks: Blocks, comm: Along, out: Blocks) -> Blocks:
    """Exchange blocks between all ranks, `S -> S`, and return `out`, filled.

    Block k of `blocks[j]` on rank i arrives in block k of `out[i]` on rank j. This is one
    collective, whatever the number of blocks. Blocks may be views with any strides. They are copied
    once into a buffer and once out of it; blocks that are adjacent in memory are not copied. The
    blocks of a rank for itself are copied straight from `blocks[rank]` to `out[rank]`, unless they
    are in memory between the blocks for other ranks.

    Args:
        blocks: for every rank of the communicator, in index order, the blocks that it gets; any
            shapes, empty ones and none allowed. One dtype, the same on all ranks.
        comm: a communicator, or (mesh, axes).
        out: for every rank the tensors or views that its blocks are written to, in the order and
            with the shapes that it sends; they do not overlap.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: not one list per rank, several dtypes, or the blocks that this rank keeps
            have other shapes in `out`.

    Example:
        Every rank has one row of a matrix, and gets one of its columns:

        >>> def column(row: torch.Tensor) -> torch.Tensor:
        ...     comm = comm_over((0, 1))
        ...     out = torch.empty(2)
        ...     all_to_all_blocks([[row[:1]], [row[1:]]], comm, [[out[:1]], [out[1:]]])
        ...     return out
        >>> launch(column, 2, torch.tensor([3.0, 5.0]))[1]
        tensor([5., 5.])
    """
    comm = comm if type(comm) is Comm else resolve(comm)
    has_subclasses = _check_blocks(blocks, comm, out)
    refuse_transformed(chain.from_iterable((*blocks, *out)))
    if loses_gradient(chain.from_iterable((*blocks, *out))):
        received = [_empty_like(outputs) for outputs in out]
        refuse_gradient(partial(all_to_all_blocks, blocks, comm, received))
    if has_subclasses:
        _exchange_plain(blocks, comm, out)
    elif comm.size == 1:
        _copy_each(blocks[0], out[0])
    else:
        _exchange_blocks(blocks, comm, out)
    return out


def _empty_like(blocks: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(block) for block in blocks]


def _exchange_plain(blocks: Blocks, comm: Comm, out: Blocks) -> None:
    """Run the collective on the plain tensors of tensor subclasses."""
    plain_blocks = [list(map(as_plain, blocks_of_rank)) for blocks_of_rank in blocks]
    plain_out = [list(map(as_plain, places_of_rank)) for places_of_rank in out]
    all_to_all_blocks(plain_blocks, comm, plain_out)
    arrived = zip(chain.from_iterable(out), chain.from_iterable(plain_out), strict=True)
    for place, plain in arrived:
        # `as_plain` has copied a subclass that computes its values
        if place.data_ptr() != plain.data_ptr():
            place.copy_(plain)


def _exchange_blocks(blocks: Blocks, comm: Comm, out: Blocks) -> None:
    """Run the collective on plain tensors, between several ranks.

    The message of rank 1 of 3, whose own blocks b are copied straight to their places:

        blocks   a a | b b | c         sent      a a c    to ranks 0 and 2
        out      x   | y y | z z       received  x z z    from ranks 0 and 2, while y y = b b
    """
    own_rank = comm.rank
    order = calls.group_to_index(comm)
    example = next(chain.from_iterable((*blocks, *out)), None)
    # A rank without any block sends and receives no elements, so the dtype does not matter.
    if example is None:
        example = torch.empty(0, dtype=torch.uint8, device=device_of(comm.group))
    traced = is_traced(example)
    # If this rank's own blocks are in memory between the blocks for other ranks, one view has all
    # blocks, and the own ones are sent with the others.
    keeps_own = traced or not (
        _are_around_own(blocks, order, own_rank) or _are_around_own(out, order, own_rank)
    )
    kept = own_rank if keeps_own else None
    sends = _blocks_in_message(blocks, order, kept)
    arrivals = _blocks_in_message(out, order, kept)
    flat = _pack(list(chain.from_iterable(sends)), example)

    def run() -> None:
        places = list(chain.from_iterable(arrivals))
        target = None if traced else _as_one(places)
        pending = calls.all_to_all_exact(flat, comm, _counts(sends), _counts(arrivals), out=target)
        if keeps_own:
            _copy_each(blocks[own_rank], out[own_rank])
        received = pending.wait()
        if target is None:
            _unpack(received, places)
        if traced and not received.numel():
            _depend_on(received, out)

    if not observers:
        run()
        return
    sent_counts = _counts(blocks)
    received_counts = _counts(out)
    sent_counts[own_rank] = 0
    received_counts[own_rank] = 0
    # If this rank has no blocks, the dtype is unknown, and the event has no tensor.
    tensors: tuple[Tensor, ...] = ()
    if any(blocks) or any(out):
        tensors = (flat[: sum(sent_counts)],)
    flow = (sent_counts, received_counts)
    run_observed(run, "all_to_all_single", comm, tensors, flow=flow)


def _blocks_in_message(blocks: Blocks, order: Sequence[int], kept: int | None) -> Blocks:
    """Return the blocks of every rank in the order of the group, without those of rank `kept`."""
    return [() if rank == kept else blocks[rank] for rank in order]


def _depend_on(received: Tensor, out: Blocks) -> None:
    """Have the first output depend on an empty message, which the compiler would drop."""
    first = next(chain.from_iterable(out), None)
    if first is not None:
        first.copy_(with_dependence(first, received))


def pack_blocks(blocks: Sequence[Tensor], *, like: Tensor | None = None) -> Tensor:
    """Return the elements of the blocks one after another, 1-D.

    The result is a view if the blocks are adjacent in memory, and a copy otherwise.

    Args:
        blocks: tensors of one dtype, of any shapes and strides.
        like: gives dtype and device where there are no blocks.

    Raises:
        CollectiveTypeError: no list of tensors, or neither blocks nor `like`.

    Example:
        >>> x = torch.arange(6).view(2, 3)
        >>> pack_blocks([x[:, 2:], x[:, :1]])
        tensor([2, 5, 0, 3])
    """
    require_tensors(blocks, "blocks must be a list of tensors")
    kinds = Tensor | None if blocks else Tensor
    allowed = "like= is a tensor of the dtype of the blocks, needed if there are none"
    require(like, kinds, allowed, CollectiveTypeError)
    return _pack(blocks, like)


def _pack(blocks: Sequence[Tensor], like: Tensor | None) -> Tensor:
    """Run `pack_blocks` on checked arguments."""
    filled = [block for block in blocks if block.numel()]
    if len(filled) == 1:
        return materialize(filled[0]).view(-1)
    if not filled:
        example = blocks[0] if blocks else like
        assert example is not None, "no blocks, no dtype"
        return with_dependence(example.new_empty((0,)), example)
    if is_traced(filled[0]):
        return torch.cat([block.reshape(-1) for block in filled])
    joined = _as_one(filled)
    if joined is not None:
        return joined
    if all(block.is_contiguous() for block in filled):
        return torch.cat([block.view(-1) for block in filled])
    flat = filled[0].new_empty((_count(filled),))
    _copy_each(filled, parts_like(flat, filled))
    return flat


def unpack_blocks(flat: Tensor, out: Sequence[Tensor]) -> None:
    """Copy the elements of a 1-D tensor to blocks, one after the other.

    Args:
        flat: (n,), n being the number of elements of all blocks.
        out: tensors or views of any shapes and strides.

    Raises:
        CollectiveTypeError: no tensor, or no list of tensors.
        CollectiveError: the blocks have more or fewer elements than the tensor.

    Example:
        >>> x = torch.zeros(2, 3, dtype=torch.long)
        >>> unpack_blocks(torch.tensor([2, 5, 1, 4]), [x[:, 2:], x[:, :1]])
        >>> x
        tensor([[1, 0, 2],
                [4, 0, 5]])
    """
    require_tensors(out, "blocks must be a list of tensors")
    for tensor in (flat, *out):
        if type(tensor) is not Tensor or not is_dense(tensor):
            check_operand(tensor)
    if loses_gradient((flat, *out)):
        raise CollectiveError(LOST_GRADIENT)
    if flat.shape != (_count(out),):
        shapes = [tuple(block.shape) for block in out]
        raise CollectiveError(
            f"unpack_blocks into blocks of shapes {shapes} takes their elements in 1-D, got "
            f"{tuple(flat.shape)}"
        )
    _unpack(flat, out)


def _unpack(flat: Tensor, out: Sequence[Tensor]) -> None:
    """Run `unpack_blocks` on checked arguments."""
    filled = [block for block in out if block.numel()]
    if filled:
        _copy_each(parts_like(flat, filled), filled)


def _check_blocks(blocks: Blocks, comm: Comm, out: Blocks) -> bool:
    """Check the arguments of this rank; return whether any block is of a tensor subclass."""
    allowed = "all_to_all_blocks takes one list of tensors per rank"
    require_each(blocks, Sequence, allowed, CollectiveTypeError)
    require_each(out, Sequence, allowed, CollectiveTypeError)
    if not len(blocks) == len(out) == comm.size:
        raise CollectiveError(
            f"all_to_all_blocks over {comm.size} ranks takes one list of blocks and one of outputs "
            f"per rank, got {len(blocks)} and {len(out)}"
        )
    dtypes = set()
    has_subclasses = False
    for block in chain(chain.from_iterable(blocks), chain.from_iterable(out)):
        if type(block) is not Tensor:
            check_operand(block, "a block")
            has_subclasses = has_subclasses or not is_traced(block)
        elif not is_dense(block):
            check_operand(block, "a block")
        dtypes.add(block.dtype)
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise CollectiveError(f"all_to_all_blocks moves one dtype, got {names}")
    sent = [tuple(block.shape) for block in blocks[comm.rank]]
    expected = [tuple(block.shape) for block in out[comm.rank]]
    if sent != expected:
        raise CollectiveError(
            f"rank {comm.rank} keeps blocks of shapes {sent}, but its outputs for them have "
            f"{expected}"
        )
    return has_subclasses


def _counts(blocks: Blocks) -> list[int]:
    """Return the number of elements of all blocks of each rank."""
    return list(map(_count, blocks))


def _count(blocks: Sequence[Tensor]) -> int:
    """Return the number of elements of some blocks."""
    return sum([block.numel() for block in blocks])


def _copy_each(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for block, place in zip(source, target, strict=True):
        place.copy_(block)


def _are_around_own(blocks: Blocks, order: Sequence[int], own_rank: int) -> bool:
    """Return whether the blocks of all ranks are adjacent in memory, but not without this rank's.

    An example are the rows of a matrix of which this rank keeps some in the middle: one view has
    all rows, so no buffer is needed. Returns False if this rank's own blocks have more elements
    than the other blocks.
    """
    others = list(chain.from_iterable(_blocks_in_message(blocks, order, own_rank)))
    if _count(blocks[own_rank]) > _count(others) or _as_one(others) is not None:
        return False
    every_block = list(chain.from_iterable(_blocks_in_message(blocks, order, None)))
    return _as_one(every_block) is not None


def _as_one(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return the blocks as one 1-D view of their memory if they are adjacent in it, else None."""
    filled = [block for block in blocks if block.numel()]
    if not filled:
        return None
    first = filled[0]
    end = filled[0].data_ptr()
    width = first.element_size()
    for block in filled:
        if block.data_ptr() != end or not block.is_contiguous():
            return None
        if block.is_conj() or block.is_neg():
            return None
        end += block.numel() * width
    total = (end - first.data_ptr()) // width
    # Blocks that are adjacent in memory may still belong to two allocations. The view must end
    # inside the allocation of the first block.
    if (first.storage_offset() + total) * width > first.untyped_storage().nbytes():
        return None
    return first.as_strided((total,), (1,))
