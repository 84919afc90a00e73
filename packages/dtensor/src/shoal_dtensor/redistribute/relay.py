"""Detours from sharding to sharding: half-way states that may be worth a second collective.

Where some axes are faster than others, it may be better to settle the slow ones while the pieces
are small and the fast ones afterwards, or the other way round.  And a large tensor is copied less
if axes that end up replicated are gathered last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from .moves import transition
from .space import Dims, Move, Space, shared, valid_tokens

__all__ = ["early", "gathers", "relays"]


def relays(space: Space, dims: Dims) -> Iterator[tuple[Move, ...]]:
    """Half-way states between a sharding and the goal, each with the moves that lead there."""
    seen = {dims, space.goal}
    for settled in _first(space, _changing(space, dims)):
        for inner in (True, False):
            after = _halfway(space, dims, settled, inner=inner)
            if after in seen:
                continue
            seen.add(after)
            moves = tuple(transition(space, dims, after))
            if not space.links.uniform or _moves_no_more(space, dims, moves):
                yield moves
    if _slow(space):
        for after in _parked(space, dims):
            if after not in seen:
                seen.add(after)
                yield tuple(transition(space, dims, after))


def early(space: Space, dims: Dims, pending: tuple[int, ...]) -> Iterator[tuple[Move, ...]]:
    """Before a reduction over a slow axis: bring what fast axes cut to where it belongs, or out of the way."""
    if space.links.uniform:
        return
    wanted = tuple(
        valid_tokens(tuple(t for t in new if t // 3 not in pending), old, new)
        for old, new in zip(dims, space.goal, strict=True)
    )
    parked = _parked(space, dims) if _slow(space) else ()
    for after in dict.fromkeys((wanted, *parked)):
        if after != dims:
            yield tuple(transition(space, dims, after, pending))


def _moves_no_more(space: Space, dims: Dims, moves: tuple[Move, ...]) -> bool:
    """Whether a detour costs no bytes: copying less must not mean sending more."""
    stops = [dims, *(move.dims for move in moves), space.goal]
    total = sum(space.average_missing(a, b) for a, b in pairwise(stops))
    return total <= space.average_missing(dims, space.goal) * (1 + 1e-9)


def _slow(space: Space) -> bool:
    """Whether the slowest axis is slower than others and the tensor so large that it matters."""
    bandwidth, latency = space.links.bandwidth, space.links.latency
    return not space.links.uniform and space.largest / min(bandwidth) > min(latency)


def _parked(space: Space, dims: Dims) -> Iterator[Dims]:
    """Cuts with all fast axes moved to the inside of some tensor dim.

    From there they do not stand in the way of a slow one; those that are replicated take a part for free.
    """
    bandwidth = space.links.bandwidth
    busy = {a for a, p in enumerate(space.placements[0]) if p.is_partial()}
    free = [a for a, n in enumerate(space.links.sizes) if n > 1 and a not in busy]
    for speed in sorted(set(bandwidth))[:-1]:
        axes = tuple(a for a in free if bandwidth[a] > speed)
        tail = tuple(3 * a for a in axes)
        rest = [valid_tokens(tuple(t for t in old if t // 3 not in axes), old, old) for old in dims]
        for dim in range(len(dims)):
            if space.width(dim, rest[dim] + tail)[1]:
                yield (*rest[:dim], rest[dim] + tail, *rest[dim + 1 :])


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
