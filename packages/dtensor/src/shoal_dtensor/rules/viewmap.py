"""Where the pieces of a cut dim lie after a reshape: integers only.

A reshape keeps the row-major order of elements.  A cut of the slowest dim (only size-1 dims stand before it within the
group of dims that are merged and split together) is a plain cut of the slowest target dim, at multiples of the least
common multiple of both dims' steps.  A cut of a faster dim stays a plain cut where the dims before it stay, and is one
of several equal runs where they are merged with it; splitting the runs again makes it plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

__all__ = ["Move", "groups", "reshape_moves"]


class Move(NamedTuple):
    """Source dim `source`, cut at multiples of `unit`, becomes target dim `target`, cut at multiples of `steps`.

    With `runs` the source dim is so many equal runs, all cut alike; with `target_runs` the target dim is.
    """

    source: int
    unit: int
    target: int
    steps: int
    runs: int = 1
    target_runs: int = 1


Group = tuple[range, range]


def groups(source: Sequence[int], target: Sequence[int]) -> list[Group]:
    """The shortest runs of source dims and target dims that have equally many elements.

    Dims of size 1 go with the run that follows them; trailing ones form a run of their own.

    Example:
        >>> groups((2, 3, 4), (6, 1, 4, 1))
        [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3)), (range(3, 3), range(3, 4))]
    """
    found: list[Group] = []
    i = j = 0
    while i < len(source) and j < len(target):
        first, second, have, want = i, j, source[i], target[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have, i = have * source[i], i + 1
            else:
                want, j = want * target[j], j + 1
        found.append((range(first, i), range(second, j)))
    if i < len(source) or j < len(target):
        found.append((range(i, len(source)), range(j, len(target))))
    return found


def reshape_moves(source: Sequence[int], target: Sequence[int]) -> list[Move]:
    """Every way in which a cut source dim is a cut target dim after the reshape, the preferred ones first.

    Example:
        >>> reshape_moves((4, 6), (24,)), reshape_moves((24,), (2, 12)), reshape_moves((6, 4), (4, 6))
        ([Move(source=0, unit=1, target=0, steps=6, runs=1, target_runs=1), \
Move(source=1, unit=1, target=0, steps=1, runs=1, target_runs=4)], \
[Move(source=0, unit=12, target=0, steps=1, runs=1, target_runs=1), \
Move(source=0, unit=1, target=1, steps=1, runs=2, target_runs=1)], \
[Move(source=0, unit=3, target=0, steps=2, runs=1, target_runs=1)])
    """
    if 0 in source:
        return _equal_ends(source, target)
    moves: list[Move] = []
    for dims, results in groups(source, target):
        moves += _group_moves(dims, results, source, target)
        moves += _run_moves(dims, results, source, target)
    # A source dim of size 1 is held by one coordinate, which then holds everything: any target dim can say so.
    reached = {move.source for move in moves}
    lost = [i for i, size in enumerate(source) if size == 1 and i not in reached]
    return moves + [Move(i, 1, j, size) for i in lost for j, size in enumerate(target)]


def _group_moves(dims: range, results: range, source: Sequence[int], target: Sequence[int]) -> Iterator[Move]:
    total = prod(source[i] for i in dims)
    for i in _leading(dims, source):
        for j in _leading(results, target):
            inside = prod(source[k] for k in dims if k > i)
            steps = prod(target[k] for k in results if k > j)
            both = lcm(inside, steps)
            if both < total or source[i] == 1:
                yield Move(i, both // inside, j, both // steps)


def _run_moves(dims: range, results: range, source: Sequence[int], target: Sequence[int]) -> Iterator[Move]:
    """Cuts of one of several equal runs: of a dim that has slower ones, in the source, in the target or in both."""
    total = prod(source[i] for i in dims)
    for i in dims:
        for j in results:
            before = prod(source[k] for k in dims if k < i), prod(target[k] for k in results if k < j)
            runs = max(before)
            if source[i] == 1 or runs == 1 or runs % before[0] or runs % before[1]:
                continue
            own, other = runs // before[0], runs // before[1]
            inside, steps = prod(source[k] for k in dims if k > i), prod(target[k] for k in results if k > j)
            both = lcm(inside, steps)
            if source[i] % own == 0 and target[j] % other == 0 and both < total // runs:
                yield Move(i, both // inside, j, both // steps, own, other)


def _leading(dims: range, shape: Sequence[int]) -> Iterator[int]:
    """The dims before which only size-1 dims stand."""
    for i in dims:
        yield i
        if shape[i] != 1:
            return


def _equal_ends(source: Sequence[int], target: Sequence[int]) -> list[Move]:
    """Without elements nothing but the sizes counts: dims that are equal from the left or from the right stay."""
    pairs: list[tuple[int, int]] = []
    for i, (n, m) in enumerate(zip(source, target, strict=False)):
        if n != m:
            break
        pairs.append((i, i))
    shift = len(target) - len(source)
    for i in reversed(range(len(source))):
        if i + shift < 0 or source[i] != target[i + shift]:
            break
        if all(i != a and i + shift != b for a, b in pairs):
            pairs.append((i, i + shift))
    return [Move(i, 1, j, 1) for i, j in pairs]
