"""Positions for heads, all to all: from some positions of all heads to all positions of some heads, and back.

With 8 query heads, 2 heads of keys and 4 ranks, rank 1 gets query heads 2 and 3 and head 0 of the keys, which rank 0
gets too.  Heads that the ranks do not divide are shared out as `torch.chunk` does, so that some ranks may have none.

May import: sequence_layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.internal import apply, first_order_only, unwatched
from shoal_mesh import Comm, all_to_all_blocks, purpose

from .sequence_layout import Range, SequenceLayout


class HeadExchange:
    """Who gets which heads of queries and of keys, of which there are a divisor as many."""

    def __init__(self, heads: int, shared: int, layout: SequenceLayout, comm: Comm) -> None:
        self.layout = layout
        self.comm = comm
        self.group: int = heads // max(shared, 1)
        # 6 query heads, 3 of keys and 4 ranks: queries (0, 2) (2, 4) (4, 6) (6, 6), keys (0, 1) (1, 2) (2, 3) (0, 0).
        size = max(-(-heads // comm.size), 1)
        self.queries: list[tuple[int, int]] = [
            (min(rank * size, heads), min((rank + 1) * size, heads)) for rank in range(comm.size)
        ]
        self.keys: list[tuple[int, int]] = [
            (a // self.group, -(-b // self.group)) if a < b else (0, 0) for a, b in self.queries
        ]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, all heads, local length, width) -> (batch, own heads, global length, width), in global order.

        Every query head has a head of keys of its own where groups do not fit the rank's heads.
        """
        tensors = q.contiguous(), k.contiguous(), v.contiguous()
        with unwatched():
            q, k, v = apply(_Exchange, self, [self.queries, self.keys, self.keys], True, *tensors)
        first, last = self.queries[self.comm.rank]
        count = self.keys[self.comm.rank][1] - self.keys[self.comm.rank][0]
        if count and (first % self.group or (last - first) != count * self.group):
            own = torch.arange(first, last, device=q.device) // self.group - self.keys[self.comm.rank][0]
            k, v = k.index_select(1, own), v.index_select(1, own)
        return q, k, v

    def to_positions(self, out: Tensor) -> Tensor:
        """(batch, own query heads, global length, width) -> (batch, all query heads, local length, width)."""
        with unwatched():
            exchanged: tuple[Tensor] = apply(_Exchange, self, [self.queries], False, out)
        return exchanged[0]

    def exchange_heads(self, tensors: list[Tensor], ranges: list[list[Range]]) -> list[Tensor]:
        """`to_heads`, of plain tensors: one all-to-all for all of them."""
        of_ranks, sizes = [*zip(*ranges, strict=True)], self.layout.sizes  # rank -> its heads of each tensor
        sent = [[x[:, a:b] for x, (a, b) in zip(tensors, own, strict=True)] for own in of_ranks]
        arrived = self._empty(tensors, [of_ranks[self.comm.rank]] * self.comm.size, sizes)
        with purpose("attention: heads for positions"):
            all_to_all_blocks(sent, self.comm, arrived)
        return [self.layout.in_order(blocks, 2) for blocks in zip(*arrived, strict=True)]

    def exchange_positions(self, tensors: list[Tensor], ranges: list[list[Range]], heads: list[int]) -> list[Tensor]:
        """`to_positions`, of plain tensors; heads that several ranks hold are summed."""
        of_ranks, size = [*zip(*ranges, strict=True)], self.layout.sizes[self.comm.rank]
        sent = [[self.layout.shard(x, 2, rank) for x in tensors] for rank in range(self.comm.size)]
        arrived = self._empty(tensors, of_ranks, [size] * self.comm.size)
        with purpose("attention: heads for positions"):
            all_to_all_blocks(sent, self.comm, arrived)
        summed = [x.new_zeros(x.shape[0], count, size, x.shape[-1]) for x, count in zip(tensors, heads, strict=True)]
        for total, each, blocks in zip(summed, ranges, zip(*arrived, strict=True), strict=True):
            for (a, b), block in zip(each, blocks, strict=True):
                total[:, a:b] += block
        return summed

    def _empty(
        self, tensors: list[Tensor], heads: Sequence[Sequence[Range]], positions: Sequence[int]
    ) -> list[list[Tensor]]:
        """From each rank a block of each tensor, of some heads and positions, in memory one after the other."""
        shapes = [
            [(x.shape[0], b - a, size, x.shape[-1]) for x, (a, b) in zip(tensors, own, strict=True)]
            for own, size in zip(heads, positions, strict=True)
        ]
        counts = [prod(shape) for blocks in shapes for shape in blocks]
        flat = iter(torch.split_with_sizes(tensors[0].new_empty(sum(counts)), counts))
        return [[next(flat).view(shape) for shape in blocks] for blocks in shapes]


class _Exchange(Function):
    """S(sequence) -> S(heads), for several tensors, or back; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, ranges: Any, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        heads = [x.shape[1] for x in tensors] if to_heads else [each[-1][1] for each in ranges]
        gather = partial(exchange.exchange_heads, ranges=ranges)
        scatter = partial(exchange.exchange_positions, ranges=ranges, heads=heads)
        run, ctx.transposed = (gather, scatter) if to_heads else (scatter, gather)
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only("attention of a sharded sequence has first derivatives only")
        return None, None, None, *ctx.transposed(list(grads))
