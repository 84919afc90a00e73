"""The moves of the search: which states follow from a state, and what it takes to get there.

Between shardings: `Slice`, `AllGather`, `AllToAll` or one `Exchange`, over all axes that change at
once.  Out of a reduction: `ReduceScatter` or `AllReduce` over several axes at once.  Into one:
`Pad` and `Share`, which are local.
"""

from __future__ import annotations

from collections.abc import Iterator

from .pricing import sent_among
from .space import Dims, Move, Space, shared, valid_tokens

__all__ = ["all_reduce", "finishes", "last_shardings", "reduce_scatter", "transition"]


def transition(space: Space, dims: Dims, goal: Dims, pending: tuple[int, ...] = ()) -> list[Move]:
    """The direct way from one sharding to another: what can be cut is cut first, then mostly one collective."""
    moves: list[Move] = []
    if dims == goal:
        return moves
    sliced = _slice_towards(dims, goal, pending)
    if sliced != dims:
        moves.append(_slice(space, dims, sliced, pending))
    if sliced != goal:
        moves += _collectives(space, sliced, goal, pending)
    return moves


def _slice_towards(dims: Dims, goal: Dims, pending: tuple[int, ...]) -> Dims:
    """Cut dims that are already cut as in the goal by the goal's next axes, as long as those are replicated."""
    used = {token // 3 for tokens in dims for token in tokens} | set(pending)
    result = list(dims)
    for dim, (old, new) in enumerate(zip(dims, goal, strict=True)):
        if old == new or new[: len(old)] != old:
            continue
        end = len(old)
        while end < len(new) and new[end] // 3 not in used:
            end += 1
        result[dim] = new[:end]
    return tuple(result)


def _slice(space: Space, dims: Dims, after: Dims, pending: tuple[int, ...]) -> Move:
    changed = tuple(d for d, (a, b) in enumerate(zip(dims, after, strict=True)) if a != b)
    axes = tuple(t // 3 for d in changed for t in after[d][len(dims[d]) :])
    box = space.box(after)
    return Move("Slice", axes, changed, after, pending, space.links.copy(box), 0, space.box(dims) + box)


def _collectives(space: Space, dims: Dims, goal: Dims, pending: tuple[int, ...]) -> list[Move]:
    """From a sharding to another by all-gather, all-to-all or exchange."""
    changed = tuple(d for d, (a, b) in enumerate(zip(dims, goal, strict=True)) if a != b)
    if any(dims[d][: len(goal[d])] != goal[d] for d in changed):
        return [_exchange(space, dims, goal, pending, changed)]
    return [_gather(space, dims, goal, pending)]


def _gather(space: Space, dims: Dims, goal: Dims, pending: tuple[int, ...]) -> Move:
    changed = tuple(d for d, (a, b) in enumerate(zip(dims, goal, strict=True)) if a != b)
    before, after = space.box(dims), space.box(goal)
    axes = tuple(t // 3 for d in changed for t in dims[d][len(goal[d]) :])
    received = space.missing(dims, goal)
    packed = after if changed != (0,) else 0
    seconds = space.links.seconds(axes, received) + space.links.copy(packed)
    return Move("AllGather", axes, changed, goal, pending, seconds, received, before + after + packed)


def _exchange(space: Space, dims: Dims, goal: Dims, pending: tuple[int, ...], changed: tuple[int, ...]) -> Move:
    links = space.links
    before, after = space.box(dims), space.box(goal)
    received = space.missing(dims, goal)
    peak = 2 * (before + after)
    pair = _all_to_all(space, dims, goal, changed)
    if pair is not None:
        axes = tuple(t // 3 for t in dims[pair[0]][len(goal[pair[0]]) :])
        seconds = links.seconds(axes, received) + links.copy(before + after)
        return Move("AllToAll", axes, pair, goal, pending, seconds, received, peak)
    axes = _involved(dims, goal, changed)
    moved = received
    near = tuple(a for a in axes if any(t // 3 == a for tokens in dims for t in tokens))
    if near != axes:
        cut = {t // 3 for tokens in goal for t in tokens}
        copies = links.group(tuple(a for a in near if a not in cut))
        sent = sent_among(links.group(near), copies, before, received)
        if links.seconds(near, sent) <= links.seconds(axes, received):
            axes, moved = near, sent
    copied = 0 if changed == (0,) else min(moved, before) + after  # whole rows lie in memory as they travel
    seconds = links.seconds(axes, moved) + links.copy(copied)
    return Move("Exchange", axes, changed, goal, pending, seconds, moved, peak)


def _all_to_all(space: Space, dims: Dims, goal: Dims, changed: tuple[int, ...]) -> tuple[int, int] | None:
    """(from, to) if the innermost axes of one tensor dim become the innermost of another, all pieces equal."""
    if len(changed) != 2:
        return None
    for src, dst in (changed, changed[::-1]):
        moved = dims[src][len(goal[src]) :]
        if moved and dims[src] == goal[src] + moved and goal[dst] == dims[dst] + moved:
            even = space.even(dims, changed) and space.even(goal, changed)
            return (src, dst) if even else None
    return None


def _involved(dims: Dims, goal: Dims, changed: tuple[int, ...]) -> tuple[int, ...]:
    """Axes across which data flow: those behind the common outer cuts of every dim that changes."""
    axes: set[int] = set()
    for dim in changed:
        old, new = dims[dim], goal[dim]
        same = shared(old, new)
        axes.update(t // 3 for t in old[same:])
        axes.update(t // 3 for t in new[same:])
    return tuple(sorted(axes))


def finishes(space: Space, dims: Dims) -> Iterator[tuple[Move, ...]]:
    """Ways to `dst` once nothing is left to reduce: reshard, then `Pad` and `Share` axes that become partial."""
    for goal, _ in last_shardings(space, dims):
        moves = transition(space, dims, goal)
        becoming = set(space.becoming)
        if goal != space.goal:
            axes = tuple(t // 3 for old, new in zip(goal, space.goal, strict=True) for t in old[len(new) :])
            moves.append(_local(space, "Pad", axes, goal, space.goal))
            becoming -= set(axes)
        if becoming:
            moves.append(_local(space, "Share", tuple(sorted(becoming)), space.goal, space.goal))
        if space.scaled:
            moves.append(_local(space, "Scale", space.scaled, space.goal, space.goal))
        yield tuple(moves)


def last_shardings(space: Space, dims: Dims) -> list[tuple[Dims, int]]:
    """The goal, cut further by axes that become partial: by all, by those that cut now, by none.

    Each with the number of local steps from there to `dst`.
    """
    becoming = space.becoming
    scaled = bool(space.scaled)
    if not becoming:
        return [(space.goal, int(scaled))]
    kept = tuple(
        valid_tokens(new + tuple(t for t in old if t // 3 in becoming), old, new)
        for old, new in zip(dims, space.goal, strict=True)
    )
    used = {t // 3 for tokens in kept for t in tokens}
    tail = tuple(3 * a for a in becoming if a not in used)
    found = [kept, space.goal]
    if tail and dims:
        even = [d for d, tokens in enumerate(kept) if space.width(d, tokens + tail)[1] and space.shape[d]]
        places = even or [max(range(len(kept)), key=lambda d: space.width(d, kept[d])[0])]
        found[:0] = [(*kept[:d], kept[d] + tail, *kept[d + 1 :]) for d in places]
    local = {goal: scaled + (goal != space.goal) for goal in found}
    return [(goal, n + (_cutting(goal, becoming) < len(becoming))) for goal, n in local.items()]


def _cutting(dims: Dims, axes: tuple[int, ...]) -> int:
    """How many of the axes cut something."""
    return sum(t // 3 in axes for tokens in dims for t in tokens)


def _local(space: Space, kind: str, axes: tuple[int, ...], dims: Dims, after: Dims) -> Move:
    box = space.box(after)
    changed = tuple(d for d, (a, b) in enumerate(zip(dims, after, strict=True)) if a != b)
    return Move(kind, axes, changed, after, (), space.links.copy(box), 0, space.box(dims) + box)


def all_reduce(space: Space, dims: Dims, pending: tuple[int, ...]) -> Move:
    """The reduction over all axes that are left."""
    before, wide, ways = space.box(dims), space.widening, space.links.group(pending)
    received = 2 * wide * before * (ways - 1) // ways
    seconds = space.links.seconds(pending, received)
    return Move("AllReduce", pending, (), dims, (), seconds, received, (1 + wide) * before)


def reduce_scatter(space: Space, dims: Dims, after: Dims, pending: tuple[int, ...], left: tuple[int, ...]) -> Move:
    """The reduction over the pending axes that are not `left`, each rank keeping a part."""
    before, box = space.box(dims), space.box(after)
    changed = tuple(d for d, (a, b) in enumerate(zip(dims, after, strict=True)) if a != b)
    axes = tuple(t // 3 for d in changed for t in after[d][len(dims[d]) :])
    assert sorted(axes) == sorted(set(pending) - set(left)), "the axes that are reduced are those that cut"
    ways, wide = space.links.group(axes), space.widening
    received = wide * (before * (ways - 1) // ways if space.even(after, changed) else box * (ways - 1))
    packed = wide * before if changed != (0,) else 0
    seconds = space.links.seconds(axes, received) + space.links.copy(packed)
    return Move("ReduceScatter", axes, changed, after, left, seconds, received, before + packed + box)
