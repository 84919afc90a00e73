"""Which block of the tensor goes from which rank to which: integers only.

Given every member's box before and after, an exchange is fixed: what a rank needs and does not
have comes from a rank that has it.  Where several do, the receivers take turns, so that no
replica sends more than its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..spec import Box

__all__ = ["Block", "Blocks", "exchange_blocks", "flows", "intersect", "volume"]

Block = tuple[int, Box]
Flow = tuple[int, int, Box]


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one member of an exchange does.

    Attributes:
        sends: (member, global box) in member order.
        receives: (member, global box) in member order.
        kept: the part of its own box that it keeps; None if there is none.
    """

    sends: tuple[Block, ...]
    receives: tuple[Block, ...]
    kept: Box | None


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; None if it is empty.

    Example:
        >>> intersect(((0, 4), (0, 2)), ((2, 6), (1, 5)))
        ((2, 4), (1, 2))
    """
    common = tuple([(max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True)])
    return common if all(i < j for i, j in common) else None


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return prod([stop - start for start, stop in box])


def exchange_blocks(me: int, before: Sequence[Box | None], after: Sequence[Box | None]) -> Blocks:
    """What member `me` sends, receives and keeps.

    Args:
        me: index of the member.
        before: for each member the box it has; None if it has nothing.
        after: for each member the box it shall have; None if it shall have nothing.

    Example:
        >>> rows, columns = [((0, 1), (0, 2)), ((1, 2), (0, 2))], [((0, 2), (0, 1)), ((0, 2), (1, 2))]
        >>> exchange_blocks(0, rows, columns)
        Blocks(sends=((1, ((0, 1), (1, 2))),), receives=((1, ((1, 2), (0, 1))),), kept=((0, 1), (0, 1)))
    """
    mine, wanted = before[me], after[me]
    sends: list[Block] = []
    receives: list[Block] = []
    for box, holders in _holders(before).items():
        if me in holders:
            sends += [(taker, part) for giver, taker, part in _turns(box, holders, after) if giver == me]
            continue
        needed = None if wanted is None else intersect(box, wanted)
        if needed is not None:
            alone = len(holders) == 1
            giver = holders[0] if alone else next(g for g, t, _ in _turns(box, holders, after) if t == me)
            receives.append((giver, needed))
    kept = None if mine is None or wanted is None else intersect(mine, wanted)
    return Blocks(tuple(sorted(sends)), tuple(sorted(receives)), kept)


def flows(before: Sequence[Box | None], after: Sequence[Box | None]) -> Iterator[Flow]:
    """Every (sender, receiver, block) of an exchange; arguments as for `exchange_blocks`."""
    for box, holders in _holders(before).items():
        yield from _turns(box, holders, after)


def _holders(before: Sequence[Box | None]) -> dict[Box, list[int]]:
    """Members that hold each box; empty boxes left out."""
    found: dict[Box, list[int]] = {}
    for member, box in enumerate(before):
        if box is not None and volume(box):
            found.setdefault(box, []).append(member)
    return found


def _turns(box: Box, holders: Sequence[int], after: Sequence[Box | None]) -> Iterator[Flow]:
    """Who gives which part of a box to whom: the holders take turns."""
    turn = 0
    for taker, wanted in enumerate(after):
        if wanted is None or taker in holders:
            continue
        needed = intersect(box, wanted)
        if needed is not None:
            yield holders[turn % len(holders)], taker, needed
            turn += 1
