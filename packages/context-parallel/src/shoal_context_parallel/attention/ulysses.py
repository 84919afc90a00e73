"""`attend_by_heads`: attention of some heads on each rank (Ulysses).

An all-to-all exchanges positions for heads: from some positions of all heads to all positions of
some heads. Another one exchanges the output back. For example, with 8 query heads, 2 heads of keys
and 4 ranks, rank 1 gets the query heads 2 and 3, and head 0 of the keys, which rank 0 gets too. If
the number of ranks does not divide the number of heads, heads are distributed as by `torch.chunk`,
and some ranks may have none.

May import: block_attention, head_shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Shard, Spec
from shoal_dtensor.internal import apply, first_order_only, redistribute_shards, unwatched
from shoal_mesh import DeviceMesh, purpose

from ..sequence_layout import Range, SequenceLayout, order_gathered
from .block_attention import Task, rotated_attention
from .head_shares import HeadShares

# Source and target of each tensor of an exchange.
Moves = list[tuple[Spec, Spec]]


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, whole: Task, layout: SequenceLayout, mesh: DeviceMesh
) -> Tensor:
    """Compute attention of this rank's heads over the whole sequence (Ulysses).

    Tensors (batch, all heads, local length, width) are exchanged for (batch, own heads, global
    length, width), and the output is exchanged back.
    """
    heads = q.shape[1]
    shares = HeadShares.of(heads, k.shape[1], mesh.size())
    sent_heads = sum(stop - start for start, stop in shares.keys)
    is_repeated = sent_heads > k.shape[1]
    if is_repeated:
        # if several ranks read a head of keys, each of them gets a copy
        k = _concatenate_shares(k, shares.keys)
        v = _concatenate_shares(v, shares.keys)
    key_heads = k.shape[1]
    move_q = _heads_for_positions(q, heads, shares.queries, layout, mesh=mesh)
    move_k = _heads_for_positions(k, key_heads, shares.keys, layout, mesh=mesh)
    move_v = _heads_for_positions(v, key_heads, shares.keys, layout, mesh=mesh)
    with unwatched():
        exchanged = apply(HeadExchange, [move_q, move_k, move_v], q, k, v)
    # In dim 2 the positions of the ranks follow one another, as after an all-gather.
    q, k, v = [order_gathered(tensor, layout, 2) for tensor in exchanged]
    rank = mesh.comm(0).rank
    keys_of_queries = shares.keys_of_queries(rank)
    if keys_of_queries is not None:
        # The rank's query heads are not complete groups, so each gets a copy of its head of keys.
        index = torch.tensor(keys_of_queries, device=q.device)
        k = k.index_select(1, index)
        v = v.index_select(1, index)
    if q.shape[1]:
        out = rotated_attention(q, k, v, whole)
    else:
        # Without heads the result is empty. It depends on q, k and v, so that backward runs the
        # exchanges of their gradients here too.
        out = q @ k.transpose(-1, -2) @ v
    shards = [layout.shard(out, 2, rank) for rank in range(layout.ranks)]
    rows = torch.cat(shards, 2)
    source, target = _heads_for_positions(out, heads, shares.queries, layout, mesh=mesh)
    with unwatched():
        (result,) = apply(HeadExchange, [(target, source)], rows)
    attended: Tensor = result
    return attended


def _concatenate_shares(tensor: Tensor, shares: Sequence[Range]) -> Tensor:
    """Return the heads of rank after rank; a head that several ranks read is repeated."""
    return torch.cat([tensor[:, start:stop] for start, stop in shares], 1)


def _heads_for_positions(
    tensor: Tensor, heads: int, shares: Sequence[Range], layout: SequenceLayout, *, mesh: DeviceMesh
) -> tuple[Spec, Spec]:
    """Return the specs S(sequence) and S(heads) of a tensor with so many heads.

    The ranks' positions follow one another.
    """
    batch = tensor.shape[0]
    width = tensor.shape[-1]
    shape = (batch, heads, layout.length, width)
    by_position = Shard(2, sizes=layout.sizes)
    heads_of_ranks = tuple(stop - start for start, stop in shares)
    by_head = Shard(1, sizes=heads_of_ranks)
    source = Spec(mesh, [by_position], shape, None, dtype=tensor.dtype)
    return source, source.with_(placements=[by_head])


class HeadExchange(Function):
    """Function S(sequence) -> S(heads), or back, of several tensors by one all-to-all.

    Gradients are exchanged in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, moves: Moves, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return _exchange(tensors, moves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only(
            "attention of a sharded sequence cannot be differentiated twice: call backward() "
            "without create_graph=True"
        )
        back = [(target, source) for source, target in ctx.moves]
        return None, *_exchange(grads, back)


def _exchange(tensors: Sequence[Tensor], moves: Moves) -> tuple[Tensor, ...]:
    with purpose("attention: exchange heads for positions"):
        pending = redistribute_shards([tensor.contiguous() for tensor in tensors], moves)
        return tuple(pending.wait())
