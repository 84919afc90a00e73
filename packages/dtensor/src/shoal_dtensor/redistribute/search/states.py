"""Half-way states that a plan may go through.

On a small mesh all of them: every order of every subset of the axes on every tensor dim.  Where
those are too many, an axis is replicated or on one of a few dims: where it is, where it goes, and
where it may wait meanwhile, being neither in the way nor idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations, permutations, product
from math import comb, factorial
from typing import TYPE_CHECKING

from .tokens import Dims, Tokens, valid_tokens

if TYPE_CHECKING:
    from .space import Space


MOST_STATES = 300  # of a mesh whose states are all looked at: 3 axes and 3 dims have 106, 4 axes and 2 dims 261


class States:
    """The states of a space.

    Attributes:
        complete: whether all of them are looked at.
    """

    __slots__ = ("_inner", "_known", "_orders", "_places", "complete", "space")

    def __init__(self, space: Space) -> None:
        self.space: Space = space
        self.complete: bool = _count(len(space.moving), len(space.start)) <= MOST_STATES
        self._places = {} if self.complete else {a: _places(space, a) for a in space.moving}
        self._known: dict[tuple[int, ...], list[Dims]] = {}
        self._orders: dict[tuple[int, tuple[int, ...]], list[Tokens]] = {}
        self._inner: dict[tuple[int, tuple[int, ...], Tokens], list[Tokens]] = {}

    def without(self, busy: tuple[int, ...]) -> list[Dims]:
        """All shardings by axes that are not busy: neither pending nor partial for good."""
        shardings = self._known.get(busy)
        if shardings is None:
            axes = tuple(a for a in self.space.moving if a not in busy)
            ndim = len(self.space.start)
            plain = arrangements(axes, ndim) if self.complete else dict.fromkeys(self._selected(axes))
            shardings = self._known[busy] = list(_with_sizes(self.space, plain))
        return shardings

    def scattered(self, dims: Dims, pending: tuple[int, ...]) -> Iterator[tuple[Dims, tuple[int, ...]]]:
        """Shardings with some pending axes added innermost, and the axes that stay pending."""
        places = None if self.complete else tuple([self._places[a] for a in pending])
        inside, known = self._inside, self._inner
        for left, added in additions(pending, len(dims), places):
            ways = []
            for dim, axes in enumerate(added):
                key = dim, axes, dims[dim]
                way = known.get(key)
                if way is None:
                    way = known[key] = inside(*key)
                ways.append(way)
            for inner in product(*ways):
                yield inner, left

    def stepwise(self) -> Iterator[list[tuple[Dims, tuple[int, ...]]]]:
        """Plain ways: reduce, then settle one speed or one axis after the other."""
        space = self.space
        start, pending = space.start, space.pending
        stops: list[tuple[Dims, tuple[int, ...]]] = []
        if pending:
            dims = tuple(
                old + tuple(t // 3 * 3 for t in new if t // 3 in pending)
                for old, new in zip(start, space.goal, strict=True)
            )
            left = tuple(a for a in pending if not any(t // 3 == a for tokens in dims for t in tokens))
            stops = [(dims, left), (dims, ())]
            start = dims
        bandwidth = space.links.bandwidth
        speeds = [[a for a in self.space.moving if bandwidth[a] == speed] for speed in sorted(set(bandwidth))]
        one_by_one = [[a] for a in self.space.moving]
        for groups, nested in ((speeds, True), (speeds[::-1], True), (one_by_one, False), (one_by_one[::-1], False)):
            settled: set[int] = set()
            way = list(stops)
            for group in groups[:-1]:
                settled.update(group)
                way.append((halfway(space, start, settled, nested=nested), ()))
            yield way

    def _inside(self, dim: int, axes: tuple[int, ...], old: Tokens) -> list[Tokens]:
        """Ways to shard a dim by more axes inside `old`."""
        if not axes:
            return [old]
        orders: Iterable[tuple[int, ...]] = permutations(axes) if self.complete else [self._sorted(dim, axes)]
        inner: dict[Tokens, None] = {}
        for order in orders:
            tokens = (*old, *(3 * a for a in order))
            inner |= dict.fromkeys(t for t in _sized(self.space, dim, tokens) if t[: len(old)] == old)
        return list(inner)

    def _selected(self, axes: tuple[int, ...]) -> Iterator[Dims]:
        """Every axis on one of its places or replicated; on a dim in the order of the start or of the goal."""
        ndim = len(self.space.start)
        for places in product(*((None, *self._places[a]) for a in axes)):
            on: list[list[int]] = [[] for _ in range(ndim)]
            for axis, dim in zip(axes, places, strict=True):
                if dim is not None:
                    on[dim].append(axis)
            yield from product(*(self._in_order(dim, tuple(held)) for dim, held in enumerate(on)))

    def _in_order(self, dim: int, axes: tuple[int, ...]) -> list[Tokens]:
        orders = self._orders.get((dim, axes))
        if orders is None:
            goal = self._sorted(dim, axes)
            start = tuple(sorted(axes, key=_position(self.space.start[dim], self.space.goal[dim]).__getitem__))
            orders = self._orders[dim, axes] = [tuple(3 * a for a in o) for o in dict.fromkeys((start, goal))]
        return orders

    def _sorted(self, dim: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(axes, key=_position(self.space.goal[dim], self.space.start[dim]).__getitem__))


class _position(dict[int, int]):
    """Sorting key of axes: those of `first` in its order, then those of `then`, then the others."""

    def __init__(self, first: Tokens, then: Tokens) -> None:
        super().__init__((t // 3, i) for i, t in enumerate(dict.fromkeys((*then, *first))))
        self.update((t // 3, i - 99) for i, t in enumerate(first))

    def __missing__(self, axis: int) -> int:
        return 99 + axis


def halfway(space: Space, dims: Dims, settled: set[int], *, nested: bool) -> Dims:
    """Shardings with `settled` axes as in the goal and the others as they are, inside of those or ascending."""
    dims_between = []
    for old, new in zip(dims, space.goal, strict=True):
        tokens = tuple(t for t in new if t // 3 in settled) + tuple(t for t in old if t // 3 not in settled)
        dims_between.append(valid_tokens(tokens if nested else tuple(sorted(tokens)), old, new))
    return tuple(dims_between)


def _places(space: Space, axis: int) -> tuple[int, ...]:
    """Tensor dims that an axis may shard: where it does, where it shall, and one to wait on."""
    own = [d for d in range(len(space.start)) if any(t // 3 == axis for t in (*space.start[d], *space.goal[d]))]
    even = [d for d, old in enumerate(space.start) if space.width(d, (*old, 3 * axis))[1] and d not in own]
    quiet = [d for d in even if not space.start[d] and not space.goal[d]]
    return tuple(sorted({*own, *quiet[:1], *even[: 0 if quiet else 1]}))


def _count(axes: int, dims: int) -> int:
    """Number of shardings of `dims` dims by subsets of `axes` axes in every order."""
    ways = (comb(axes, k) * factorial(k) * comb(k + dims - 1, k) for k in range(axes + 1))
    return sum(ways) if dims else 1


@lru_cache(maxsize=1024)
def additions(
    axes: tuple[int, ...], ndim: int, places: tuple[tuple[int, ...], ...] | None
) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """Ways to put at least one of some axes on dims: the axes left over, and those on each dim.

    Args:
        axes: the axes.
        ndim: number of dims.
        places: the dims that each axis may go to; all if left out.

    Example:
        >>> additions((0, 2), 1, None)
        [((0,), [(2,)]), ((2,), [(0,)]), ((), [(0, 2)])]
    """
    ways, everywhere = [], tuple(range(ndim))
    for chosen in product(*((None, *dims) for dims in places or (everywhere,) * len(axes))):
        left = tuple(a for a, dim in zip(axes, chosen, strict=True) if dim is None)
        if len(left) < len(axes):
            ways.append((left, [tuple(a for a, at in zip(axes, chosen, strict=True) if at == d) for d in everywhere]))
    return ways


@lru_cache(maxsize=256)
def arrangements(axes: tuple[int, ...], ndim: int) -> tuple[Dims, ...]:
    """All shardings of `ndim` dims by subsets of the axes, in every order.

    Example:
        >>> arrangements((1,), 2)
        (((), ()), ((), (3,)), ((3,), ()))
    """
    arranged = []
    for count in range(len(axes) + 1):
        for chosen in permutations(axes, count):
            tokens = tuple(3 * a for a in chosen)
            for bars in combinations(range(count + ndim - 1), ndim - 1) if ndim else [()][count:]:
                ends = [bar - i for i, bar in enumerate(bars)]
                arranged.append(tuple(tokens[i:j] for i, j in zip((0, *ends), (*ends, count), strict=True)))
    return tuple(arranged if ndim != 1 else dict.fromkeys(arranged)) if ndim else ((),)


def _with_sizes(space: Space, plain: Iterable[Dims]) -> Iterable[Dims]:
    """The shardings, and the same with the explicit sizes of the start or the goal as far as those hold."""
    if not any(t % 3 for dims in (space.start, space.goal) for tokens in dims for t in tokens):
        return plain
    known: dict[tuple[int, Tokens], list[Tokens]] = {}
    with_sizes: dict[Dims, None] = {}
    for dims in plain:
        ways = []
        for key in enumerate(dims):
            if key not in known:
                known[key] = _sized(space, *key)
            ways.append(known[key])
        with_sizes |= dict.fromkeys(product(*ways))
    return with_sizes


def _sized(space: Space, dim: int, tokens: Tokens) -> list[Tokens]:
    """The same axes with explicit sizes on as many outer ones as a spec has them so."""
    sized = {tokens: None}
    for known in (space.start[dim], space.goal[dim]):
        for end in range(1, min(len(known), len(tokens)) + 1):
            if known[end - 1] // 3 != tokens[end - 1] // 3:
                break
            sized[known[:end] + tokens[end:]] = None
    return list(sized)
