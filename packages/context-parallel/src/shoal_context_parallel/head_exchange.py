"""Positions for heads, all to all: from some positions of all heads to all positions of some heads, and back.

With 8 query heads, 2 heads of keys and 4 ranks, rank 1 gets query heads 2 and 3 and head 0 of the keys, which rank 0
gets too.  Heads that the ranks do not divide are shared out as `torch.chunk` does, so that some ranks may have none.

May import: sequence_layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import Shard, Spec
from shoal_dtensor.internal import apply, first_order_only, redistribute_shards, shard_sizes, spans, unwatched
from shoal_mesh import DeviceMesh, purpose

from .sequence_layout import Range, SequenceLayout

Moves = list[tuple[Spec, Spec]]


class HeadExchange:
    """Who gets which heads of queries and of keys, of which there are a divisor as many."""

    def __init__(self, heads: int, shared: int, layout: SequenceLayout, mesh: DeviceMesh) -> None:
        self.layout, self.mesh, self.rank = layout, mesh, mesh.comm(0).rank
        self.group: int = heads // max(shared, 1)
        # 6 query heads, 3 of keys and 4 ranks: queries (0, 2) (2, 4) (4, 6) (6, 6), keys (0, 1) (1, 2) (2, 3) (0, 0).
        self.queries: list[Range] = spans(shard_sizes(heads, Shard(0), mesh.size()))
        self.keys: list[Range] = [(a // self.group, -(-b // self.group)) if a < b else (0, 0) for a, b in self.queries]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, all heads, local length, width) -> (batch, own heads, global length, width), in global order.

        Every query head has a head of keys of its own where groups do not fit the rank's heads.
        """
        if sum(b - a for a, b in self.keys) > k.shape[1]:  # several ranks read a head: a copy for each
            k, v = (torch.cat([x[:, a:b] for a, b in self.keys], 1) for x in (k, v))
        heads = (self.queries, self.keys, self.keys)
        moves = [self._move(x, own, x.shape[1]) for x, own in zip((q, k, v), heads, strict=True)]
        with unwatched():
            moved = apply(_Exchange, moves, q, k, v)
        q, k, v = (self.layout.in_order(x.split(self.layout.sizes, 2), 2) for x in moved)
        first, last = self.queries[self.rank]
        count = self.keys[self.rank][1] - self.keys[self.rank][0]
        if count and (first % self.group or (last - first) != count * self.group):
            own = torch.arange(first, last, device=q.device) // self.group - self.keys[self.rank][0]
            k, v = k.index_select(1, own), v.index_select(1, own)
        return q, k, v

    def to_positions(self, out: Tensor) -> Tensor:
        """(batch, own query heads, global length, width) -> (batch, all query heads, local length, width)."""
        rows = torch.cat([self.layout.shard(out, 2, rank) for rank in range(self.layout.ranks)], 2)
        source, target = self._move(out, self.queries, self.queries[-1][1])
        with unwatched():
            (moved,) = apply(_Exchange, [(target, source)], rows)
        return moved  # type: ignore[no-any-return]  # of torch

    def _move(self, like: Tensor, heads: Sequence[Range], count: int) -> tuple[Spec, Spec]:
        """S(sequence) and S(heads) of a tensor with so many heads; ranks' positions follow one another."""
        shape = like.shape[0], count, self.layout.length, like.shape[-1]
        sizes = self.layout.sizes, tuple(b - a for a, b in heads)
        of_positions, of_heads = (Shard(dim, sizes=each) for dim, each in zip((2, 1), sizes, strict=True))
        source = Spec(self.mesh, [of_positions], shape, None, like.dtype)
        return source, source.with_(placements=[of_heads])


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
