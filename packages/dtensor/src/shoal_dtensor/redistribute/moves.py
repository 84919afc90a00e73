"""The moves of the search: which states follow from a state, and what it takes to get there.

Between shardings: `Slice`, `AllGather`, `AllToAll` or one `Exchange`, over all axes that change at
once.  Out of a reduction: `ReduceScatter` or `AllReduce` over several axes at once.  Into one:
`Pad` and `Share`, which are local.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from .space import Dims, Move, Space, Tokens, shared, valid_tokens

__all__ = ["finishes", "presliced", "reductions", "transition"]


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
    fused = _gather(space, dims, goal, pending)
    if len(changed) > 1 and changed[0] == 0 and space.bulky:  # the inner dims are cheaper to copy while the rest is cut
        halfway = (dims[0], *goal[1:])
        split = [_gather(space, dims, halfway, pending), _gather(space, halfway, goal, pending)]
        if sum(move.seconds for move in split) < fused.seconds:
            return split
    return [fused]


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
        sent = _sent_among(space, goal, near, before, received)
        if links.seconds(near, sent) <= links.seconds(axes, received):
            axes, moved = near, sent
    copied = 0 if changed == (0,) else min(moved, before) + after  # whole rows lie in memory as they travel
    seconds = links.seconds(axes, moved) + links.copy(copied)
    return Move("Exchange", axes, changed, goal, pending, seconds, moved, peak)


def _sent_among(space: Space, goal: Dims, near: tuple[int, ...], before: int, received: int) -> int:
    """Bytes of the busiest rank if an exchange stays among ranks that differ only along the axes that cut now.

    Each replica along the other axes then serves itself, so a rank may have to send all it has to all who want it.
    """
    cut = {t // 3 for tokens in goal for t in tokens}
    copies = space.links.group(tuple(a for a in near if a not in cut))
    return max(received, min(before * copies, (space.links.group(near) - 1) * received))


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
    becoming = set(space.becoming)
    goals = [space.goal]
    if becoming:
        kept = tuple(
            valid_tokens(new + tuple(t for t in old if t // 3 in becoming), old, new)
            for old, new in zip(dims, space.goal, strict=True)
        )
        if kept != space.goal:
            goals.insert(0, kept)
    for goal in goals:
        moves = transition(space, dims, goal)
        if goal != space.goal:
            axes = tuple(t // 3 for old, new in zip(goal, space.goal, strict=True) for t in old[len(new) :])
            moves.append(_local(space, "Pad", axes, goal, space.goal))
            becoming -= set(axes)
        if becoming:
            moves.append(_local(space, "Share", tuple(sorted(becoming)), space.goal, space.goal))
        if space.scaled:
            moves.append(_local(space, "Scale", space.scaled, space.goal, space.goal))
        yield tuple(moves)
        becoming = set(space.becoming)


def _local(space: Space, kind: str, axes: tuple[int, ...], dims: Dims, after: Dims) -> Move:
    box = space.box(after)
    changed = tuple(d for d, (a, b) in enumerate(zip(dims, after, strict=True)) if a != b)
    return Move(kind, axes, changed, after, (), space.links.copy(box), 0, space.box(dims) + box)


def reductions(space: Space, dims: Dims, pending: tuple[int, ...]) -> Iterator[Move]:
    """Reduce-scatters over some of the pending axes, and the all-reduce over all of them.

    An all-reduce is the last reduction of a plan and takes all axes that are left: two in a row could leave
    replicas that differ in the last bit, as each group may add in its own order.
    """
    links = space.links
    before, wide = space.box(dims), space.widening
    received = 2 * wide * before * (links.group(pending) - 1) // links.group(pending)
    yield Move("AllReduce", pending, (), dims, (), links.seconds(pending, received), received, (1 + wide) * before)
    for axes in _subsets(space, pending):
        left = tuple(a for a in pending if a not in axes)
        ways = links.group(axes)
        for after in _scattered(space, dims, axes):
            changed = tuple(d for d, (a, b) in enumerate(zip(dims, after, strict=True)) if a != b)
            order = tuple(t // 3 for d in changed for t in after[d][len(dims[d]) :])
            box = space.box(after)
            received = wide * (before * (ways - 1) // ways if space.even(after, changed) else box * (ways - 1))
            packed = wide * before if changed != (0,) else 0
            seconds = links.seconds(axes, received) + links.copy(packed)
            yield Move("ReduceScatter", order, changed, after, left, seconds, received, before + packed + box)


def _subsets(space: Space, pending: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sets of axes worth scattering over: all, and those that `dst` cuts; any, where axes differ in speed."""
    if not space.links.uniform:
        return [axes for n in range(len(pending), 0, -1) for axes in combinations(pending, n)]
    cut = {t // 3 for tokens in space.goal for t in tokens}
    found = [pending, tuple(a for a in pending if a in cut)]
    if space.bulky:  # one dim after the other copies less than all at once
        found += [tuple(a for a in pending if 3 * a in tokens) for tokens in space.goal]
    return list(dict.fromkeys(axes for axes in found if axes))


def presliced(space: Space, dims: Dims) -> Iterator[tuple[Dims, tuple[Move, ...]]]:
    """States to start a reduction from: replicated axes may share its work by each taking a part, for free."""
    start = _slice_towards(dims, space.goal, space.pending)
    base = () if start == dims else (_slice(space, dims, start, space.pending),)
    yield start, base
    used = {t // 3 for tokens in start for t in tokens}
    partial = {axis for axis, placement in enumerate(space.placements[0]) if placement.is_partial()}
    idle = [a for a, n in enumerate(space.links.sizes) if n > 1 and a not in used and a not in partial]
    for count in range(1, len(idle) + 1):
        for axes in combinations(idle, count):
            for after in _scattered(space, start, axes):
                yield after, (_slice(space, dims, after, space.pending),)


def _scattered(space: Space, dims: Dims, axes: tuple[int, ...]) -> list[Dims]:
    """Ways to cut a box further by `axes`: each axis where `dst` wants it if it fits, the rest on one dim."""
    result = list(dims)
    rest = set(axes)
    for dim, new in enumerate(space.goal):
        old = result[dim]
        if new[: len(old)] != old:
            continue
        end = len(old)
        while end < len(new) and new[end] // 3 in rest:
            rest.discard(new[end] // 3)
            end += 1
        result[dim] = new[:end]
    if not rest:
        return [tuple(result)]
    tail = tuple(3 * a for a in sorted(rest))
    dims_to_cut = _scratch_dims(space, result, tail)
    return [(*result[:dim], result[dim] + tail, *result[dim + 1 :]) for dim in dims_to_cut]


def _scratch_dims(space: Space, dims: list[Tokens], tail: Tokens) -> list[int]:
    """Tensor dims on which axes without a place in `dst` are worth cutting.

    The first that divides evenly, the first such that no pending reduction has to cut too, and their own.
    """
    even = [d for d, tokens in enumerate(dims) if space.width(d, tokens + tail)[1] and space.shape[d]]
    quiet = [d for d in even if not any(t // 3 in space.pending for t in space.goal[d])]
    wanted = [d for d, tokens in enumerate(space.goal) if any(t // 3 * 3 in tail for t in tokens)]
    found = even[:1] + quiet[:1] + wanted
    if not even and dims:
        found.insert(0, max(range(len(dims)), key=lambda d: space.width(d, dims[d])[0]))
    return list(dict.fromkeys(found))
