"""Routing of tokens: pairs (token, expert) sorted by expert, and the exchange of their rows.

`ExpertExchange` sends the rows of pairs to the ranks of their experts, and the experts' outputs
back, by all-to-alls of exact sizes. For example, rank 0 holds the experts 0 and 1, and rank 1 the
experts 2 and 3. `a3` is a row of rank 0 for expert 3, and `b1` a row of rank 1 for expert 1:

    rank 0 sends   a0 a0 a1 | a3           rank 0 gets   a0 a0 a1, b1      by sender, then by expert
    rank 1 sends   b1 | b2 b2              rank 1 gets   a3, b2 b2

If a computation overlaps the exchange, the exchange has two nodes in the graph, and the computation
is between them. In backward the order is reversed: `ArrivedRows` starts to send gradients back, the
backward of the computation runs, and `StartedExchange` waits for the gradients.
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
    """Return indices into the flattened choices, sorted by expert, and the bounds of each expert.

    The host does not wait for the results. A choice that is not the index of an expert is sorted
    before the first expert or after the last.

    Args:
        chosen: the experts that each token goes to, (tokens, choices).
        experts: number of experts.

    Returns:
        The indices, (tokens * choices,), and the bounds, (experts + 1,): the indices from
        `bounds[i]` up to `bounds[i + 1]` belong to expert i.

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
    """Limit numbers of rows, (ranks, experts), to the capacity of each expert.

    The capacity is `factor` times an equal share of all `pairs`. The rows of the first ranks are
    kept.

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
    """One exchange of rows between the ranks that hold tokens and the ranks that hold experts.

    Attributes:
        comm: the ranks that hold the experts.
        sends: number of rows that this rank sends to each rank.
        receives: number of rows that this rank gets from each rank.
        rows_per_own_expert: number of rows from each rank for each of this rank's experts,
            (ranks, own experts).
    """

    comm: Comm
    sends: list[int]
    receives: list[int]
    rows_per_own_expert: list[list[int]]

    @classmethod
    def of(cls, counts: list[list[int]], per_rank: list[int], comm: Comm) -> ExpertExchange:
        """Return the exchange of rows that are sorted by expert.

        Args:
            counts: number of rows of each rank for each expert, (ranks, experts).
            per_rank: number of experts of each rank.
            comm: the ranks.
        """
        starts = [0, *accumulate(per_rank)]
        experts_of_ranks = [slice(start, end) for start, end in pairwise(starts)]
        rows_of_this_rank = counts[comm.rank]
        sends = [sum(rows_of_this_rank[experts]) for experts in experts_of_ranks]
        rows_per_own_expert = [row[experts_of_ranks[comm.rank]] for row in counts]
        receives = [sum(row) for row in rows_per_own_expert]
        return cls(comm, sends, receives, rows_per_own_expert)

    def to_experts(self, rows: Tensor, beside: Callable[[], None] | None = None) -> Tensor:
        """Send rows sorted by expert (`S -> S`); call `beside` while they are in flight.

        The rows arrive ordered by sender, then by expert.
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
        """Return the numbers of elements to and from each rank, for rows of `width` elements."""
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
