"""Which token goes to which expert: pairs of token and expert, sorted by expert; no communication."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from shoal_mesh.internal import dataclass


def sorted_choices(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Indices into the flattened choices, those of expert 0 first, and (experts + 1,) bounds: where each one's begin.

    The host waits for neither.

    Args:
        chosen: (tokens, choices) indices of experts; others count as before the first or behind the last.
        experts: number of experts.

    Example:
        >>> sorted_choices(torch.tensor([[1, 0], [2, 1]]), 3)  # sorted: 0 1 1 2
        (tensor([1, 0, 3, 2]), tensor([0, 1, 3, 4]))
    """
    flat = chosen.reshape(-1)
    ordered, pairs = torch.sort(flat, stable=True)
    return pairs, torch.searchsorted(ordered, torch.arange(experts + 1, device=flat.device, dtype=flat.dtype))


def counts_of(bounds: list[int]) -> list[int]:
    """The pairs of each expert."""
    return [end - start for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Route:
    """The pairs of token and chosen expert that are computed, those of expert 0 first, each expert's in token order.

    Attributes:
        pairs: (rows,) indices into the flattened choices.
        tokens: (rows,) the token of each pair.
        counts: (experts,) pairs of each expert.
    """

    pairs: Tensor
    tokens: Tensor
    counts: list[int]

    @classmethod
    def of(cls, pairs: Tensor, bounds: list[int], choices: int) -> Route:
        """The route of all tokens.  Choices that are no expert's index are left out.

        Args:
            pairs: what `sorted_choices` gives.
            bounds: likewise, read by the host.
            choices: of each token.

        Example:
            >>> pairs, bounds = sorted_choices(torch.tensor([[1, 0], [2, 1]]), 3)
            >>> route = Route.of(pairs, bounds.tolist(), 2)
            >>> route.tokens.tolist(), route.counts
            ([0, 0, 1, 1], [1, 2, 1])
        """
        pairs = pairs[bounds[0] : bounds[-1]]
        return cls(pairs, pairs // max(choices, 1), counts_of(bounds))

    def keeping(self, kept: list[int]) -> Route:
        """The route of the first so many pairs of each expert.

        Example:
            >>> Route.of(torch.arange(3), [0, 2, 3], 1).keeping([1, 1]).tokens.tolist()
            [0, 2]
        """
        if kept == self.counts:
            return self
        pairs, tokens = (_first(each, self.counts, kept) for each in (self.pairs, self.tokens))
        return Route(pairs, tokens, kept)

    def only(self, experts: range) -> Route:
        """The route to some neighbouring experts.

        Example:
            >>> Route.of(torch.tensor([0, 2, 1]), [0, 1, 2, 3], 1).only(range(1, 3)).tokens.tolist()
            [2, 1]
        """
        rows = slice(sum(self.counts[: experts.start]), sum(self.counts[: experts.stop]))
        return Route(self.pairs[rows], self.tokens[rows], self.counts[experts.start : experts.stop])


def _first(sorted_pairs: Tensor, counts: list[int], kept: list[int]) -> Tensor:
    groups = torch.split_with_sizes(sorted_pairs, counts)
    return torch.cat([group[:keep] for group, keep in zip(groups, kept, strict=True)])


def within_capacity(counts: list[list[int]], factor: float, pairs: int) -> list[list[int]]:
    """Of the rows that each rank has for each expert, those that fit: the last tokens of all ranks do not.

    Args:
        counts: (ranks, experts).
        factor: an expert takes this times the rows that each would get if all got equally many.
        pairs: rows of all ranks and experts.

    Example:
        >>> within_capacity([[3, 0], [2, 1]], 1.25, 6)
        [[3, 0], [1, 1]]
    """
    room = [math.ceil(factor * pairs / len(counts[0]))] * len(counts[0])
    kept = []
    for row in counts:
        kept.append([min(count, left) for count, left in zip(row, room, strict=True)])
        room = [left - taken for left, taken in zip(room, kept[-1], strict=True)]
    return kept
