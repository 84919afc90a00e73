"""Positions for heads, all to all: from some positions of all heads to all positions of some heads, and back.

With 8 query heads, 2 heads of keys and 4 ranks, rank 1 gets query heads 2 and 3 and head 0 of the keys, which rank 0
gets too.  Heads that the ranks do not divide are shared out as `torch.chunk` does, so that some ranks may have none.

May import: sequence_layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Shard, Spec
from shoal_dtensor.internal import apply, first_order_only, redistribute_shards, shard_sizes, spans, unwatched
from shoal_mesh import DeviceMesh, purpose

from .sequence_layout import Range, SequenceLayout

Moves = list[tuple[Spec, Spec]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_heads(attend: Attend, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mesh: DeviceMesh) -> Tensor:
    """(batch, all heads, local length, width) to that, by `attend` of (batch, own heads, global length, width)."""
    heads, shared, rank = q.shape[1], k.shape[1], mesh.comm(0).rank
    group: int = heads // max(shared, 1)
    # 6 query heads, 3 of keys and 4 ranks: queries (0, 2) (2, 4) (4, 6) (6, 6), keys (0, 1) (1, 2) (2, 3) (0, 0).
    queries = spans(shard_sizes(heads, Shard(0), mesh.size()))
    keys = [(a // group, -(-b // group)) if a < b else (0, 0) for a, b in queries]

    def move(like: Tensor, shares: Sequence[Range], count: int) -> tuple[Spec, Spec]:
        """S(sequence) and S(heads) of a tensor with so many heads; ranks' positions follow one another."""
        shape, sizes = (like.shape[0], count, layout.length, like.shape[-1]), tuple(b - a for a, b in shares)
        source = Spec(mesh, [Shard(2, sizes=layout.sizes)], shape, None, like.dtype)
        return source, source.with_(placements=[Shard(1, sizes=sizes)])

    if sum(b - a for a, b in keys) > shared:  # several ranks read a head: a copy for each
        k, v = (torch.cat([x[:, a:b] for a, b in keys], 1) for x in (k, v))
    moves = [move(x, own, x.shape[1]) for x, own in zip((q, k, v), (queries, keys, keys), strict=True)]
    with unwatched():
        moved = apply(_Exchange, moves, q, k, v)
    q, k, v = (layout.in_order(x.split(layout.sizes, 2), 2) for x in moved)
    first, last = queries[rank]
    count = keys[rank][1] - keys[rank][0]
    if count and (first % group or (last - first) != count * group):
        # Groups do not fit the rank's heads: a head of keys for every query head.
        own = torch.arange(first, last, device=q.device) // group - keys[rank][0]
        k, v = k.index_select(1, own), v.index_select(1, own)
    out = attend(q, k, v)
    rows = torch.cat([layout.shard(out, 2, each) for each in range(layout.ranks)], 2)
    source, target = move(out, queries, heads)
    with unwatched():
        (result,) = apply(_Exchange, [(target, source)], rows)
    return result  # type: ignore[no-any-return]  # of torch


class _Exchange(Function):
    """S(sequence) -> S(heads), of several tensors by one all-to-all, or back; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return _moved(tensors, moves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only("attention of a sharded sequence has first derivatives only")
        return None, *_moved(grads, [(target, source) for source, target in ctx.moves])


def _moved(tensors: Sequence[Tensor], moves: Moves) -> tuple[Tensor, ...]:
    with purpose("attention: heads for positions"):
        return tuple(redistribute_shards([tensor.contiguous() for tensor in tensors], moves).wait())
