"""Products that overlap their collective, in chunks of dim 0 ("async TP", on any backend).

    gathered_product  x: S(d) -> x: R, x W^T  while one chunk is multiplied, the next are gathered
    reduced_product   x -> x W^T: R | S(d)    while one chunk is reduced, the next is multiplied

The values equal the values of one product. If dim 0 is sharded, a chunk holds some rows of every
rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import linear

from shoal_dtensor import Placement, Shard
from shoal_dtensor.internal import dispatch_modes, selectively_checkpointed, unwatched
from shoal_mesh import Comm
from shoal_mesh.internal import all_reduce_

from ..sharding.module_sharding import Collective, ModuleCall, ModuleSharding, Overlap
from .collective_functions import ActivationShard, Sizes, gather_dim, reduce_scatter_dim


def chunks_of(sharding: ModuleSharding) -> int:
    """Return the number of chunks of a style with `.overlapped(chunks)`; 1 for any other style."""
    return sharding.options.chunks if isinstance(sharding.options, Overlap) else 1


def gathered_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, shard: ActivationShard, chunks: int
) -> tuple[Tensor, Tensor]:
    """Gather `x` and multiply it by a weight (out, in); return the gathered `x` and the product.

    `x` is this rank's shard (..., in) and has two dims or more.
    """
    comm, dim, sizes = shard
    shape = list(x.shape)
    shape[dim] = shape[dim] * comm.size if sizes is None else sum(sizes)
    # Blocks of rows of the gathered x by the rank that they come from. Example: 2 rows from each of
    # 4 ranks -> blocks 2 2 2 2, which start at 0 2 4 6. If another dim is sharded, all rows are one
    # block.
    is_row_sharded = dim % x.ndim == 0
    blocks = tuple(x.shape[:1])
    if is_row_sharded:
        blocks = sizes or blocks * comm.size
    count = _chunk_count(chunks, x.shape[0], sizes if is_row_sharded else None)
    lengths = [_lengths_in_chunk(blocks, chunk, count) for chunk in range(count)]
    pending = []
    for rows, chunk_lengths in zip(x.tensor_split(count), lengths, strict=True):
        chunk_sizes = chunk_lengths if is_row_sharded and sizes else sizes
        pending.append(gather_dim(rows, comm, dim, chunk_sizes, async_op=True))
    full = x.new_empty(shape)
    product = x.new_empty([*shape[:-1], weight.shape[0]])
    starts = [0, *accumulate(blocks)][:-1]
    for gathered, chunk_lengths in zip(pending, lengths, strict=True):
        parts = torch.split_with_sizes(gathered.wait(), list(chunk_lengths))
        for i, part in enumerate(parts):
            start = starts[i]
            end = start + len(part)
            full[start:end] = part
            _multiply(part, weight, bias, product[start:end])
            starts[i] = end
    return full, product


def _lengths_in_chunk(blocks: tuple[int, ...], chunk: int, count: int) -> tuple[int, ...]:
    """Return the number of rows of each block in one of `count` chunks, as by `tensor_split`.

    Example: blocks of 1, 4, 0 and 3 rows have (1, 2, 0, 1) rows in the first of three chunks, and
    (0, 1, 0, 1) in the second and in the third.
    """
    return tuple(size // count + (chunk < size % count) for size in blocks)


def reduced_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm_or_shard: Comm | ActivationShard,
    *,
    chunks: int,
) -> Tensor:
    """Multiply `x` (..., in) by a weight (out, in), reduce over the ranks, and add the bias.

    `comm_or_shard` is the communicator of an all-reduce, or the shard to which the product is
    reduce-scattered. An all-reduce is in place.
    """
    if chunks > 1:
        with unwatched():
            out = _reduced_in_chunks(x, weight, comm_or_shard, chunks)
            return out if bias is None else out.add_(bias)
    out = linear(x, weight)
    if dispatch_modes() and selectively_checkpointed():
        # The checkpoint may have saved the product, so the reduction writes to a copy.
        with unwatched():
            return _reduced(out.clone(), bias, comm_or_shard)
    return _reduced(out, bias, comm_or_shard)


def _reduced(out: Tensor, bias: Tensor | None, comm_or_shard: Comm | ActivationShard) -> Tensor:
    if isinstance(comm_or_shard, ActivationShard):
        out = reduce_scatter_dim(out, *comm_or_shard)
    else:
        all_reduce_(out, comm_or_shard)
    if bias is not None:
        out += bias
    return out


def _reduced_in_chunks(
    x: Tensor, weight: Tensor, comm_or_shard: Comm | ActivationShard, chunks: int
) -> Tensor:
    """Return the reduced product, computed in chunks that overlap the reductions."""
    if isinstance(comm_or_shard, ActivationShard):
        scattered = []
        for rows, target in _chunks(x, comm_or_shard, chunks):
            product_rows = linear(rows, weight)
            scattered.append(reduce_scatter_dim(product_rows, *target, async_op=True))
        return torch.cat([pending.wait() for pending in scattered])
    product = x.new_empty([*x.shape[:-1], weight.shape[0]])
    count = _chunk_count(chunks, x.shape[0])
    reduced = []
    for rows, out in zip(x.tensor_split(count), product.tensor_split(count), strict=True):
        _multiply(rows, weight, None, out)
        reduced.append(all_reduce_(out, comm_or_shard, async_op=True))
    for pending in reduced:
        pending.wait()
    return product


def chunked_collectives(
    call: ModuleCall,
    collectives: Iterable[Collective],
    full: Tensor | None,
    placement: Placement,
    *chunked: tuple[str, bool],
) -> Iterator[Collective]:
    """Yield the collectives of a Linear, with the number of chunks of each.

    Args:
        call: the call of the Linear.
        collectives: the collectives without overlap.
        full: the tensor of all ranks that the collectives gather or reduce.
        placement: the sharding of `full`.
        chunked: (op, backward) of the collectives that run in chunks.
    """
    count = 1
    if full is not None and full.ndim > 1:
        rows = full.shape[0]
        sizes = None
        if isinstance(placement, Shard) and placement.dim in (0, -full.ndim):
            rows //= call.ranks
            sizes = placement.sizes
        count = _chunk_count(chunks_of(call.sharding), rows, sizes)
    for collective in collectives:
        if (collective.op, collective.backward) in chunked:
            collective = collective._replace(chunks=count)
        yield collective


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b to `out`, which is contiguous."""
    rows = x.flatten(0, -2)
    into = out.flatten(0, -2)
    if bias is None:
        torch.mm(rows, weight.t(), out=into)
    else:
        torch.addmm(bias, rows, weight.t(), out=into)


def _chunks(
    x: Tensor, activation: ActivationShard, chunks: int
) -> Iterator[tuple[Tensor, ActivationShard]]:
    """Yield chunks of rows of `x`, each with the shard to which its product is reduce-scattered.

    The results, one after another, are this rank's rows in order.
    """
    comm, dim, sizes = activation
    if dim != 0:
        for rows in x.tensor_split(_chunk_count(chunks, x.shape[0])):
            yield rows, activation
        return
    # Example: 4 rows that are scattered to 2 ranks, in 2 chunks -> the first chunk has the rows
    # 0 and 2, the second has 1 and 3. Rank 0 gets row 0, then row 1; rank 1 gets row 2, then row 3.
    sizes_of_ranks = [x.shape[0] // comm.size] * comm.size if sizes is None else list(sizes)
    shards = torch.split_with_sizes(x, sizes_of_ranks)
    count = _chunk_count(chunks, max(sizes_of_ranks))
    split_shards = [shard.tensor_split(count) for shard in shards]
    for parts in zip(*split_shards, strict=True):
        sizes_in_chunk = None if sizes is None else tuple(map(len, parts))
        yield torch.cat(parts), ActivationShard(comm, dim, sizes_in_chunk)


def _chunk_count(chunks: int, rows: int, sizes: Sizes = None) -> int:
    """Return the number of chunks, equal on all ranks, for `rows` rows or shards of `sizes`."""
    most = rows if sizes is None else max(sizes)
    return max(1, min(chunks, most))
