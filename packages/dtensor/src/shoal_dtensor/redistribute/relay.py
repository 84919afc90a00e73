"""Detours that pay when some mesh axes are faster than others.

On a mesh whose axes are equally fast, one collective over all changing axes is the best way from
sharding to sharding.  Otherwise it may be better to settle the slow axes while the pieces are
small and the fast ones afterwards (or the other way round), so those half-way states are offered
to the search.
"""

from __future__ import annotations

from collections.abc import Iterator

from .moves import transition
from .space import Dims, Move, Space, valid_tokens

__all__ = ["relays"]


def relays(space: Space, dims: Dims) -> Iterator[tuple[Move, ...]]:
    """Half-way states between a sharding and the goal, each with the moves that lead there."""
    changing = _changing(space, dims)
    bandwidth = space.links.bandwidth
    seen = {dims, space.goal}
    for speed in sorted({bandwidth[a] for a in changing})[:-1]:
        slow = frozenset(a for a in changing if bandwidth[a] <= speed)
        for settled in (slow, changing - slow):
            for inner in (True, False):
                after = _halfway(space, dims, settled, inner=inner)
                if after not in seen:
                    seen.add(after)
                    yield tuple(transition(space, dims, after))


def _changing(space: Space, dims: Dims) -> frozenset[int]:
    """Axes that cut some dim now or in the goal, but not the same way."""
    axes: set[int] = set()
    for old, new in zip(dims, space.goal, strict=True):
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        axes.update(t // 3 for t in (*old[same:], *new[same:]))
    return frozenset(axes)


def _halfway(space: Space, dims: Dims, settled: frozenset[int], *, inner: bool) -> Dims:
    """The cuts where `settled` axes are as in the goal and the others as they are, one kind inside the other."""
    result = []
    for old, new in zip(dims, space.goal, strict=True):
        if old == new:
            result.append(old)
            continue
        kept = tuple(t for t in old if t // 3 not in settled)
        done = tuple(t for t in new if t // 3 in settled)
        tokens = kept + done if inner else done + kept
        result.append(valid_tokens(tokens, old, new))
    return tuple(result)
