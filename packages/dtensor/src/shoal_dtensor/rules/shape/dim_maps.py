"""Which target dim is sharded after a reshape of a sharded source dim: integers only.

A reshape keeps the row-major order of elements.  Where the slowest dim is sharded (only size-1 dims are before it
within the group of dims that are merged and split together), so is the slowest target dim, at multiples of the least
common multiple of both dims' steps: (6, 4) -> (4, 6) has steps of 4 and 6 elements, so shards are multiples of 12,
which are 3 source rows or 2 target rows.  A faster dim stays sharded where the dims before it stay; merged with them,
its shards become equal runs (`StridedDimSharding`): (4, 6) -> (24,) with columns sharded has 4 runs of 6.  Splitting
the runs makes the sharding plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple


class DimMapping(NamedTuple):
    """Dim `source`, sharded at multiples of `unit`, becomes dim `target`, sharded at multiples of `steps`.

    With `runs` the source dim is so many equal runs, all sharded alike; with `target_runs` the target dim is.
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
    result: list[Group] = []
    i = j = 0
    while i < len(source) and j < len(target):
        first, second, have, want = i, j, source[i], target[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have, i = have * source[i], i + 1
            else:
                want, j = want * target[j], j + 1
        result.append((range(first, i), range(second, j)))
    if i < len(source) or j < len(target):
        result.append((range(i, len(source)), range(j, len(target))))
    return result


def reshape_mappings(source: Sequence[int], target: Sequence[int]) -> list[DimMapping]:
    """Every way in which a sharded source dim is a sharded target dim after the reshape, the preferred ones first.

    Example:
        >>> reshape_mappings((4, 6), (24,)), reshape_mappings((24,), (2, 12)), reshape_mappings((6, 4), (4, 6))
        ([DimMapping(source=0, unit=1, target=0, steps=6, runs=1, target_runs=1), \
DimMapping(source=1, unit=1, target=0, steps=1, runs=1, target_runs=4)], \
[DimMapping(source=0, unit=12, target=0, steps=1, runs=1, target_runs=1), \
DimMapping(source=0, unit=1, target=1, steps=1, runs=2, target_runs=1)], \
[DimMapping(source=0, unit=3, target=0, steps=2, runs=1, target_runs=1)])
    """
    if 0 in source:
        return _equal_ends(source, target)
    mappings: list[DimMapping] = []
    for dims, results in groups(source, target):
        for in_runs in (False, True):
            mappings += _group_mappings(dims, results, source, target, in_runs=in_runs)
    # A source dim of size 1 is held by one coordinate, which then holds everything: any target dim can say so.
    reached = {mapping.source for mapping in mappings}
    lost = [i for i, size in enumerate(source) if size == 1 and i not in reached]
    return mappings + [DimMapping(i, 1, j, size) for i in lost for j, size in enumerate(target)]


def _group_mappings(
    dims: range, results: range, source: Sequence[int], target: Sequence[int], *, in_runs: bool
) -> Iterator[DimMapping]:
    """Shardings of the slowest dims of a group or, `in_runs`, of one of several equal runs.

    Runs are those of a dim that has slower ones in the source, the target or both.
    """
    total = prod(source[i] for i in dims)
    for i in dims:
        for j in results:
            before = prod(source[k] for k in dims if k < i), prod(target[k] for k in results if k < j)
            runs = max(before)
            if (
                (runs == 1 if in_runs else runs != 1)
                or runs % before[0]
                or runs % before[1]
                or (in_runs and source[i] == 1)
            ):
                continue
            own, other = runs // before[0], runs // before[1]
            inside, steps = prod(source[k] for k in dims if k > i), prod(target[k] for k in results if k > j)
            both = _lcm(inside, steps)
            if source[i] % own == 0 and target[j] % other == 0 and (both < total // runs or source[i] == 1):
                yield DimMapping(i, both // inside, j, both // steps, own, other)


def _lcm(one: int, other: int) -> int:
    """The least common multiple; of symbols only where one is a multiple of the other, else they become constants."""
    if type(one) is int and type(other) is int:
        return lcm(one, other)
    for multiple, divisor in ((one, other), (other, one)):
        if multiple % divisor == 0:
            return multiple
    return lcm(int(one), int(other))


def _equal_ends(source: Sequence[int], target: Sequence[int]) -> list[DimMapping]:
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
    return [DimMapping(i, 1, j, 1) for i, j in pairs]
