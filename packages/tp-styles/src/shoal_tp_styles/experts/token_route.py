"""Token routing: (token, expert) pairs sorted by expert, and `ExpertExchange`, the all-to-alls.

`ExpertExchange` sends rows to the ranks of their experts and back.

The all-to-alls have exact sizes. With 4 experts on 2 ranks, rows of experts (0, 1 | 2, 3), named by
rank and expert:

    rank 0 holds   a0 a0 a1 | a3           rank 0 gets   a0 a0 a1, b1      as received, by rank and expert
    rank 1 holds   b1 | b2 b2              rank 1 gets   a3, b2 b2

If a computation overlaps the exchange, the exchange has two nodes in the graph. The computation
between the nodes is between them in backward too, in the opposite order: `ArrivedRows` starts to send
gradients back, `StartedExchange` waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor.internal import apply, first_order_only
from shoal_mesh import Comm, all_to_all_v, differentiable
from shoal_mesh.internal import Pending


def sorted_choices(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return indices into the flattened choices, sorted by expert, and each expert's bounds.

    Choices have the shape (tokens, choices).

    The bounds have the shape (experts + 1,).

    The host waits for neither result. Indices that belong to no expert count as before the first
    expert or after the last.

    Example:
        >>> sorted_choices(torch.tensor([[1, 0], [2, 1]]), 3)  # sorted: 0 1 1 2
        (tensor([1, 0, 3, 2]), tensor([0, 1, 3, 4]))
    """
    flat = chosen.reshape(-1)
    ordered, pairs = torch.sort(flat, stable=True)
    firsts = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
    return pairs, torch.searchsorted(ordered, firsts)


def counts_of(bounds: list[int]) -> list[int]:
    """Return the number of pairs of each expert."""
    return [end - start for start, end in pairwise(bounds)]


def first_pairs(pairs: Tensor, bounds: list[int], kept: list[int]) -> Tensor:
    """Return the first `kept` pairs of each expert, sorted by expert.

    Choices that belong to no expert are left out.

    Example:
        >>> first_pairs(torch.tensor([1, 0, 3, 2]), [0, 1, 3, 4], [1, 1, 1])  # of experts 0 1 1 2
        tensor([1, 0, 2])
    """
    if kept == counts_of(bounds):
        return pairs[bounds[0] : bounds[-1]]
    starts = bounds[:-1]
    kept_pairs = [pairs[start : start + count] for start, count in zip(starts, kept, strict=True)]
    return torch.cat(kept_pairs)


def within_capacity(counts: list[list[int]], factor: float, pairs: int) -> list[list[int]]:
    """Limit (ranks, experts) rows to the capacity of each expert; the first rows are kept.

    The capacity is `factor` times the rows of an expert if all got equally many of `pairs`.

    Example:
        >>> within_capacity([[3, 0], [2, 1]], 1.25, 6)
        [[3, 0], [1, 1]]
    """
    experts = len(counts[0])
    capacity = math.ceil(factor * pairs / experts)
    room = [capacity] * experts
    kept = []
    for row in counts:
        kept_of_rank = [min(count, left) for count, left in zip(row, room, strict=True)]
        kept.append(kept_of_rank)
        room = [left - taken for left, taken in zip(room, kept_of_rank, strict=True)]
    return kept


class ExpertExchange(NamedTuple):
    """The sizes of one exchange of rows.

    Attributes:
        comm: the ranks that hold the experts.
        sends: rows to each rank.
        receives: rows from each rank.
        own: rows of each of this rank's experts from each rank, (ranks, own experts).
    """

    comm: Comm
    sends: list[int]
    receives: list[int]
    own: list[list[int]]

    @classmethod
    def of(cls, counts: list[list[int]], per_rank: list[int], comm: Comm) -> ExpertExchange:
        """Return the exchange of (ranks, experts) rows that are sorted by expert.

        Each rank holds `per_rank` experts.
        """
        starts = [0, *accumulate(per_rank)]
        experts_of_ranks = [slice(start, end) for start, end in pairwise(starts)]
        rows_of_this_rank = counts[comm.rank]
        sends = [sum(rows_of_this_rank[experts]) for experts in experts_of_ranks]
        own = [row[experts_of_ranks[comm.rank]] for row in counts]
        receives = [sum(row) for row in own]
        return cls(comm, sends, receives, own)

    def to_experts(self, rows: Tensor, beside: Callable[[], None] | None = None) -> Tensor:
        """Send rows sorted by expert (`S -> S`); run `beside` while they are in flight.

        The rows arrive ordered by rank, then by expert.
        """
        if beside is None:
            return self._send(rows, back=False)
        in_flight: list[Pending] = []
        token = apply(StartedExchange, rows, self, in_flight)
        beside()
        arrived: Tensor = apply(ArrivedRows, token, self, in_flight)
        return arrived

    def back(self, rows: Tensor) -> Tensor:
        """Send the experts' outputs back (`S -> S`), in the order in which the rows were sent."""
        return self._send(rows, back=True)

    def _send(self, rows: Tensor, *, back: bool) -> Tensor:
        width = rows.shape[-1]
        sent, received = self._elements(width, back=back)
        flat = differentiable.all_to_all_v(rows.reshape(-1), self.comm, sent, received)
        arriving = sum(self.sends if back else self.receives)
        return flat.view(arriving, width)

    def start(self, rows: Tensor, *, back: bool) -> Pending:
        """Start to send rows to their experts, or back; return the rows in flight."""
        width = rows.shape[-1]
        sent, received = self._elements(width, back=back)
        pending = all_to_all_v(rows.reshape(-1), self.comm, sent, received, async_op=True)
        return pending.then(lambda flat: flat.view(-1, width))

    def _elements(self, width: int, *, back: bool) -> tuple[list[int], list[int]]:
        """Return the elements to each rank and from each rank, for rows of `width`."""
        to_experts = [rows * width for rows in self.sends]
        from_tokens = [rows * width for rows in self.receives]
        return (from_tokens, to_experts) if back else (to_experts, from_tokens)


class StartedExchange(Function):
    """Function from rows to a tensor without elements that stands for the rows in flight."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: ExpertExchange, in_flight: list[Pending]
    ) -> Tensor:
        ctx.in_flight = in_flight
        in_flight.append(exchange.start(rows, back=False))
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.in_flight.pop().wait(), None, None


class ArrivedRows(Function):
    """Function from the tensor that stands for rows in flight to the rows that this rank gets."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, exchange: ExpertExchange, in_flight: list[Pending]
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.in_flight = in_flight
        return in_flight.pop().wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        ctx.in_flight.append(ctx.exchange.start(grad, back=True))
        return grad.new_empty(0), None, None
