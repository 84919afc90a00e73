"""The layouts that one hop of the search may lead to.

Of few axes all of them: every order of every subset of the axes on every tensor dim.  Where those are too many, an axis
is replicated or on one of a few dims: where it is, where it goes, and where it may wait meanwhile, being neither in the
way nor idle; and on a dim axes are in the order of the source or of the destination.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import permutations, product
from math import comb, factorial
from typing import TYPE_CHECKING

from ..step_cost import axes_of

if TYPE_CHECKING:
    from .space import Dims, Space, State, Tokens

MOST_LAYOUTS = 300  # that are all looked at: 3 axes on 3 dims have 106, 4 axes on 2 dims 261


class Candidates:
    """Layouts of a space, on ways from one start.

    Attributes:
        complete: whether all of them are looked at.
    """

    def __init__(self, space: Space, start: State) -> None:
        self.space = space
        self.ends = list(zip(start.dims, space.goal.dims, strict=True))
        self.complete = _count(space.moving(start).bit_count(), len(self.ends)) <= MOST_LAYOUTS
        self._orders: dict[tuple[int, Tokens, tuple[int, ...]], list[Tokens]] = {}

    def inside(self, outer: Dims, axes: int) -> list[Dims]:
        """The layouts that shard `outer` further by some of these axes, first that by none of them.

        Inside of nothing, by axis 0 on two dims: ((), ()), ((0,), ()), ((), (0,)).
        """
        chosen = axes_of(axes)
        everywhere = tuple(range(len(outer)))
        places = tuple([everywhere if self.complete else self._places(axis) for axis in chosen])
        found: list[Dims] = []
        for on_dims in _placings(chosen, places, len(outer)):
            found += product(*[self._ordered(dim, outer[dim], inner) for dim, inner in enumerate(on_dims)])
        return found

    def scattered(self, here: State) -> Dims:
        """The layout with pending axes where the goal has them, inside of the others."""
        pending = [[t // 3 for t in goal if here.pending >> t // 3 & 1] for _, goal in self.ends]
        return tuple([self._extended(dim, old, pending[dim])[-1] for dim, old in enumerate(here.dims)])

    def settled(self, here: State, axes: int, *, nested: bool) -> Dims:
        """The layout with these axes as in the goal and the others as they are, inside of those or ascending."""
        dims = []
        for dim, (_, goal) in enumerate(self.ends):
            order = [t // 3 for t in goal if axes >> t // 3 & 1]
            order += [t // 3 for t in here.dims[dim] if not axes >> t // 3 & 1]
            dims.append(self._extended(dim, (), order if nested else sorted(order))[-1])
        return tuple(dims)

    def _ordered(self, dim: int, outer: Tokens, axes: tuple[int, ...]) -> list[Tokens]:
        """The ways to shard a dim further by all of these axes."""
        if not axes:
            return [outer]
        key = dim, outer, axes
        known = self._orders.get(key)
        if known is None:
            start, goal = self.ends[dim]
            few = _in_order(axes, goal + start), _in_order(axes, start + goal)
            orders = permutations(axes) if self.complete else few
            ways = [tokens for order in orders for tokens in self._extended(dim, outer, order)]
            known = self._orders[key] = list(dict.fromkeys(ways))
        return known

    def _extended(self, dim: int, outer: Tokens, order: Iterable[int]) -> list[Tokens]:
        """The dim sharded further by these axes in this order: like torch.chunk, and last with explicit sizes.

        Those of either end, inside of just what they are inside of there.
        """
        if not any(t % 3 for end in self.ends[dim] for t in end):
            return [outer + tuple([3 * axis for axis in order])]
        found = [outer]
        for axis in order:
            longer: list[Tokens] = []
            for tokens in found:
                depth = len(tokens)
                inner = [end[depth] for end in self.ends[dim] if end[:depth] == tokens and end[depth:]]
                same = [token for token in inner if token // 3 == axis]
                longer += [(*tokens, token) for token in dict.fromkeys([3 * axis, *same])]
            found = longer
        return found

    def _places(self, axis: int) -> tuple[int, ...]:
        """Tensor dims that an axis may shard: where it does, where it shall, and one to wait on."""
        own = [d for d, (start, goal) in enumerate(self.ends) if any(t // 3 == axis for t in start + goal)]
        even = [d for d, (start, _) in enumerate(self.ends) if self.space.shards(d, (*start, 3 * axis)).even]
        waiting = [d for d in even if d not in own]
        quiet = [d for d in waiting if not any(self.ends[d])]
        return tuple(sorted([*own, *(quiet or waiting)[:1]]))


def _count(axes: int, dims: int) -> int:
    """Number of layouts of `dims` dims by subsets of `axes` axes in every order.

    2 axes on 2 dims: 1 by none, 2 * 2 by one; by both 2 orders * 3, as 2 + 0, 1 + 1 or 0 + 2 on the dims; so 11.
    """
    ways = (comb(axes, k) * factorial(k) * comb(k + dims - 1, k) for k in range(axes + 1))
    return sum(ways) if dims else 1


@lru_cache(maxsize=1024)
def _placings(
    axes: tuple[int, ...], places: tuple[tuple[int, ...], ...], ndim: int
) -> list[tuple[tuple[int, ...], ...]]:
    """Every axis on none or on one of its places: the axes on every dim, ascending.

    Axes 0 and 2, both on dim 0 of 1: [((),), ((2,),), ((0,),), ((0, 2),)].
    """
    return [
        tuple([tuple([a for a, at in zip(axes, chosen, strict=True) if at == dim]) for dim in range(ndim)])
        for chosen in product(*[(None, *dims) for dims in places])
    ]


def _in_order(axes: tuple[int, ...], tokens: Tokens) -> tuple[int, ...]:
    """The axes in the order of some tokens, those that are not among them last."""
    known = [t // 3 for t in tokens]
    return tuple(sorted(axes, key=lambda axis: known.index(axis) if axis in known else len(known)))
