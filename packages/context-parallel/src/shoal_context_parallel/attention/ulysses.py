"""`attend_by_heads`: attention of some heads on each rank (Ulysses).

An all-to-all exchanges positions for heads: a rank that holds some positions of all heads gets all
positions of some heads. A second all-to-all exchanges the output back. For example, with 8 query
heads, 2 heads of keys and 4 ranks, rank 1 gets the query heads 2 and 3, and head 0 of the keys,
which rank 0 gets too. If the number of ranks does not divide the number of heads, heads are
distributed as by `torch.chunk`, and some ranks may have none.

May import: block_attention, head_shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Shard, Spec
from shoal_dtensor.internal import apply, first_order_only, redistribute_shards, unwatched
from shoal_mesh import DeviceMesh, purpose

from ..sequence_layout import Range, SequenceLayout, order_gathered
from .block_attention import FIRST_ORDER, AttentionTask, rotated_attention
from .head_shares import HeadShares


class HeadMove(NamedTuple):
    """The exchange of one tensor: its placement before and after.

    Attributes:
        source: the spec before the exchange.
        target: the spec after it.
    """

    source: Spec
    target: Spec

    def inverted(self) -> HeadMove:
        """Return the exchange back."""
        return HeadMove(self.target, self.source)


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, task: AttentionTask, layout: SequenceLayout, mesh: DeviceMesh
) -> Tensor:
    """Compute attention of this rank's heads over the whole sequence (Ulysses).

    Args:
        q: (batch, all query heads, local length, width).
        k: (batch, all heads of keys, local length, width).
        v: (batch, all heads of keys, local length, width of values).
        task: attention on a rank that holds the whole sequence.
        layout: the positions that each rank holds outside of this function.
        mesh: a mesh with one axis.

    Returns:
        (batch, all query heads, local length, width of values).
    """
    rank = mesh.comm(0).rank
    query_heads = q.shape[1]
    shares = HeadShares.of(query_heads, k.shape[1], mesh.size())
    k = _repeat_shared_heads(k, shares.keys)
    v = _repeat_shared_heads(v, shares.keys)
    key_heads = k.shape[1]
    move_q = _positions_to_heads(q, query_heads, shares.queries, layout, mesh=mesh)
    move_k = _positions_to_heads(k, key_heads, shares.keys, layout, mesh=mesh)
    move_v = _positions_to_heads(v, key_heads, shares.keys, layout, mesh=mesh)
    with unwatched():
        exchanged = apply(HeadExchange, [move_q, move_k, move_v], q, k, v)
    # (batch, own heads, global length, width): in dim 2 the positions of the ranks follow one
    # another, as after an all-gather.
    q, k, v = [order_gathered(tensor, layout, 2) for tensor in exchanged]
    keys_of_queries = shares.keys_of_queries(rank)
    if keys_of_queries is not None:
        # The rank's query heads are not complete groups, so each gets a copy of its head of keys.
        index = torch.tensor(keys_of_queries, device=q.device)
        k = k.index_select(1, index)
        v = v.index_select(1, index)
    if q.shape[1]:
        out = rotated_attention(q, k, v, task)
    else:
        # Without heads the result is empty. It depends on q, k and v, so that backward runs the
        # exchanges of their gradients here too.
        out = q @ k.transpose(-1, -2) @ v
    # Before the exchange back, dim 2 must again have the positions of one rank after another.
    shards = [layout.shard(out, 2, holder) for holder in range(layout.ranks)]
    out_by_rank = torch.cat(shards, 2)
    move_out = _positions_to_heads(out, query_heads, shares.queries, layout, mesh=mesh)
    with unwatched():
        (result,) = apply(HeadExchange, [move_out.inverted()], out_by_rank)
    attended: Tensor = result
    return attended


def _repeat_shared_heads(tensor: Tensor, shares: Sequence[Range]) -> Tensor:
    """Return the heads of keys for rank after rank; each rank that reads a head gets a copy."""
    # Example: 2 heads, and the shares 0:1, 0:1, 1:2 and 1:2 of 4 ranks -> the heads 0 0 1 1.
    sent_heads = sum(stop - start for start, stop in shares)
    if sent_heads <= tensor.shape[1]:
        return tensor
    return torch.cat([tensor[:, start:stop] for start, stop in shares], 1)


def _positions_to_heads(
    tensor: Tensor, heads: int, shares: Sequence[Range], layout: SequenceLayout, *, mesh: DeviceMesh
) -> HeadMove:
    """Return the move S(sequence) -> S(heads) of a global tensor (batch, heads, length, width).

    Args:
        tensor: the local tensor before or after the move; gives batch, width and dtype.
        heads: number of heads on all ranks.
        shares: the heads of each rank after the move.
        layout: the positions of each rank before the move. In the global tensor of the specs they
            follow one another by rank, so they are not in order.
        mesh: a mesh with one axis.
    """
    batch = tensor.shape[0]
    width = tensor.shape[-1]
    shape = (batch, heads, layout.length, width)
    by_position = Shard(2, sizes=layout.sizes)
    heads_of_ranks = tuple(stop - start for start, stop in shares)
    by_head = Shard(1, sizes=heads_of_ranks)
    source = Spec(mesh, [by_position], shape, None, dtype=tensor.dtype)
    return HeadMove(source, source.with_(placements=[by_head]))


class HeadExchange(Function):
    """Function S(sequence) -> S(heads), or back, of several tensors by one all-to-all.

    Gradients are exchanged in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, moves: Sequence[HeadMove], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return _exchange(tensors, moves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only(FIRST_ORDER)
        return None, *_exchange(grads, [move.inverted() for move in ctx.moves])


def _exchange(tensors: Sequence[Tensor], moves: Sequence[HeadMove]) -> tuple[Tensor, ...]:
    with purpose("attention: exchange heads for positions"):
        in_flight = redistribute_shards([tensor.contiguous() for tensor in tensors], moves)
        return tuple(in_flight.wait())
