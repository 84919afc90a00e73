"""Positions for heads, all to all: from some positions of all heads to all positions of some heads, and back.

With 8 query heads, 2 heads of keys and 4 ranks, rank 1 gets query heads 2 and 3 and head 0 of the keys, which rank 0
gets too.  Heads that the ranks do not divide are shared out as `torch.chunk` does, so that some ranks may have none.

May import: sequence_layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.errors import SecondOrderError
from shoal_dtensor.internal import apply, unwatched
from shoal_mesh import Comm, all_to_all_v, purpose

from .sequence_layout import Range, SequenceLayout


class HeadExchange:
    """Who gets which heads of which tensor.

    Args:
        heads: query heads.
        shared: heads of keys, a divisor of them.
        layout: positions of each rank.
        comm: the axis.
    """

    def __init__(self, heads: int, shared: int, layout: SequenceLayout, comm: Comm) -> None:
        self.layout = layout
        self.comm = comm
        self.group: int = heads // max(shared, 1)
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
        own, sizes = self.comm.rank, self.layout.sizes
        shapes = [
            [(x.shape[0], last - first, sizes[rank], x.shape[-1]) for rank in range(self.comm.size)]
            for x, (first, last) in zip(tensors, (each[own] for each in ranges), strict=True)
        ]
        parts = [
            [x[:, slice(*each[rank])] for x, each in zip(tensors, ranges, strict=True)]
            for rank in range(self.comm.size)
        ]
        received = self._all_to_all(parts, [[each[rank] for each in shapes] for rank in range(self.comm.size)])
        return [self.layout.in_order([part[i] for part in received], 2) for i in range(len(tensors))]

    def exchange_positions(self, tensors: list[Tensor], ranges: list[list[Range]], heads: list[int]) -> list[Tensor]:
        """`to_positions`, of plain tensors; heads that several ranks hold are summed."""
        own, sizes = self.comm.rank, self.layout.sizes
        parts = [[self.layout.shard(x, 2, rank) for x in tensors] for rank in range(self.comm.size)]
        shapes = [
            [
                (x.shape[0], each[rank][1] - each[rank][0], sizes[own], x.shape[-1])
                for x, each in zip(tensors, ranges, strict=True)
            ]
            for rank in range(self.comm.size)
        ]
        received = self._all_to_all(parts, shapes)
        summed = [
            x.new_zeros(x.shape[0], count, sizes[own], x.shape[-1]) for x, count in zip(tensors, heads, strict=True)
        ]
        for rank, blocks in enumerate(received):
            for total, each, block in zip(summed, ranges, blocks, strict=True):
                total[:, slice(*each[rank])] += block
        return summed

    def _all_to_all(self, parts: list[list[Tensor]], shapes: list[list[Any]]) -> list[list[Tensor]]:
        flat = torch.cat([part.reshape(-1) for blocks in parts for part in blocks])
        counts = [[torch.Size(shape).numel() for shape in blocks] for blocks in shapes]
        with purpose("attention: heads for positions"):
            received = all_to_all_v(
                flat, self.comm, [sum(part.numel() for part in blocks) for blocks in parts], [sum(c) for c in counts]
            )
        flat_blocks = iter(torch.split_with_sizes(received, [count for blocks in counts for count in blocks]))
        return [[next(flat_blocks).view(shape) for shape in blocks] for blocks in shapes]


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
        if torch.is_grad_enabled():
            raise SecondOrderError("attention of a sharded sequence has first derivatives only")
        return None, None, None, *ctx.transposed(list(grads))
