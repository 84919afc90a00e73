"""Detours from sharding to sharding: half-way states that may be worth a second collective.

Where some axes are faster than others, it may be better to settle the slow ones while the pieces
are small and the fast ones afterwards, or the other way round.  And a large tensor is copied less
if axes that end up replicated are gathered last.
"""

from __future__ import annotations

from collections.abc import Iterator

from .moves import transition
from .space import Dims, Move, Space, shared, valid_tokens

__all__ = ["gathers", "relays"]


def relays(space: Space, dims: Dims) -> Iterator[tuple[Move, ...]]:
    """Half-way states between a sharding and the goal, each with the moves that lead there."""
    seen = {dims, space.goal}
    for settled in _first(space, _changing(space, dims)):
        for inner in (True, False):
            after = _halfway(space, dims, settled, inner=inner)
            if after not in seen:
                seen.add(after)
                yield tuple(transition(space, dims, after))


def _first(space: Space, changing: frozenset[int]) -> Iterator[frozenset[int]]:
    """Sets of axes to settle first."""
    bandwidth = space.links.bandwidth
    for speed in sorted({bandwidth[a] for a in changing})[:-1]:
        slow = frozenset(a for a in changing if bandwidth[a] <= speed)
        yield slow
        yield changing - slow
    cut = changing & {t // 3 for tokens in space.goal for t in tokens}
    if space.bulky and cut and cut != changing:
        yield cut


def gathers(space: Space, dims: Dims) -> Iterator[tuple[Move, ...]]:
    """What one would do without an exchange: gather whatever changes, then slice.  Never cheaper; for `explain`."""
    common = tuple(old[: shared(old, new)] for old, new in zip(dims, space.goal, strict=True))
    if common not in (dims, space.goal):
        yield tuple(transition(space, dims, common))


def _changing(space: Space, dims: Dims) -> frozenset[int]:
    """Axes that cut some dim now or in the goal, but not the same way."""
    axes: set[int] = set()
    for old, new in zip(dims, space.goal, strict=True):
        same = shared(old, new)
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
