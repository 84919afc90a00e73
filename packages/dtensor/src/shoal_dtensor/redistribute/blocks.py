"""Which block of the tensor goes from which rank to which: integers only.

Given every member's box before and after, an exchange is fixed: what a rank needs and does not
have comes from a rank that has it.  Where several do, the receivers take turns, so that no
replica sends more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..spec import Box

__all__ = ["Block", "Blocks", "exchange_blocks", "intersect", "volume"]

Block = tuple[int, Box]


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
    owners: dict[Box, list[int]] = {}
    for member, box in enumerate(before):
        if box is not None and volume(box):
            owners.setdefault(box, []).append(member)
    sends: list[Block] = []
    receives: list[Block] = []
    mine, wanted = before[me], after[me]
    for box, holders in owners.items():
        needed = None if wanted is None else intersect(box, wanted)
        if me in holders:
            sends += _sends(me, box, holders, after)
        elif needed is not None:
            receives.append((_provider(me, box, holders, after), needed))
    kept = None if mine is None or wanted is None else intersect(mine, wanted)
    return Blocks(tuple(sorted(sends)), tuple(sorted(receives)), kept)


def _sends(me: int, box: Box, holders: Sequence[int], after: Sequence[Box | None]) -> list[Block]:
    """Blocks of `box` that fall to holder `me` to send."""
    sends: list[Block] = []
    turn = 0
    for member, wanted in enumerate(after):
        if wanted is None or member in holders:
            continue
        needed = intersect(box, wanted)
        if needed is not None:
            if holders[turn % len(holders)] == me:
                sends.append((member, needed))
            turn += 1
    return sends


def _provider(me: int, box: Box, holders: Sequence[int], after: Sequence[Box | None]) -> int:
    """The holder of `box` whose turn it is when member `me` asks."""
    if len(holders) == 1:
        return holders[0]
    turn = 0
    for member in range(me):
        wanted = after[member]
        if wanted is not None and member not in holders and intersect(box, wanted) is not None:
            turn += 1
    return holders[turn % len(holders)]
