"""Blocks of a tensor that ranks exchange, and the exchange itself.

`exchange_blocks` computes the blocks that one rank sends, receives and keeps; `move_blocks` copies
them. A rank receives each block that it needs and does not have from a rank that has it. If several
ranks have the block, they send in turn.

Example: S(0) -> S(1) of a 4 x 4 tensor on 2 ranks. Rank 0 has rows 0 and 1, rank 1 has rows 2
and 3. Rank 0 wants columns 0 and 1. It has two of their rows, and rank 1 sends it the other two:
4 elements instead of the 8 elements of both columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from shoal_mesh import Comm, all_to_all_blocks
from shoal_mesh.internal import all_to_all_blocks_compared

from ..layout.boxes import Box, intersect, slices_of, volume

if TYPE_CHECKING:
    from ..layout.spec import Spec


Block = tuple[int, Box]
"""(member, box): the other member of an exchange, and the global box that it sends or receives."""
Holdings = Sequence[Sequence[Box]]
"""The boxes of each member. Any two boxes, also of different members, are equal or disjoint."""
Shards = Sequence[tuple[Box, Tensor]]
"""This rank's boxes of a global tensor, each with the local tensor or view that holds it."""


class Flow(NamedTuple):
    """One block of an exchange, with the members that send and receive it."""

    sender: int
    receiver: int
    box: Box


class Blocks(NamedTuple):
    """The blocks that one member of an exchange sends, receives and keeps."""

    # (member, global box) in member order, blocks of one member in the order of the boxes
    sends: tuple[Block, ...]
    receives: tuple[Block, ...]  # (member, global box) likewise
    # the parts of its own boxes that it keeps
    kept: tuple[Box, ...]


class BlockMove(NamedTuple):
    """The part of one rank in the exchange of one tensor."""

    blocks: Blocks
    # the shards that the rank has
    held: Shards
    # the shards that it wants, which are written in place
    wanted: Shards


def exchange_blocks(me: int, before: Holdings, after: Holdings) -> Blocks:
    """Return the blocks that member `me` sends, receives and keeps.

    `before` and `after` are the boxes of the members before and after the exchange.

    Example:
        >>> rows = [[((0, 1), (0, 2))], [((1, 2), (0, 2))]]
        >>> columns = [[((0, 2), (0, 1))], [((0, 2), (1, 2))]]
        >>> blocks = exchange_blocks(0, rows, columns)
        >>> blocks.sends
        ((1, ((0, 1), (1, 2))),)
        >>> blocks.receives
        ((1, ((1, 2), (0, 1))),)
        >>> blocks.kept
        (((0, 1), (0, 1)),)
    """
    sends: list[Block] = []
    receives: list[Block] = []
    kept: list[Box] = []
    for box, holders in _holders(before).items():
        # In the example above, rank 0 needs columns 0:2 of the box of rows 2:4.
        needed = _parts(box, after[me])
        if me in holders:
            kept += needed
            turns = _turns(box, holders, after)
            sends += [(flow.receiver, flow.box) for flow in turns if flow.sender == me]
        elif len(holders) == 1:
            # In the example above: ((2, 4), (0, 2)) from rank 1.
            receives += [(holders[0], part) for part in needed]
        elif needed:
            turns = _turns(box, holders, after)
            receives += [(flow.sender, flow.box) for flow in turns if flow.receiver == me]
    return Blocks(tuple(sorted(sends)), tuple(sorted(receives)), tuple(kept))


def flows(before: Holdings, after: Holdings) -> Iterator[Flow]:
    """Yield every block that one member sends to another."""
    for box, holders in _holders(before).items():
        yield from _turns(box, holders, after)


def _holders(before: Holdings) -> dict[Box, list[int]]:
    """Return the members that hold each box; empty boxes are left out."""
    holders: dict[Box, list[int]] = {}
    for member, boxes in enumerate(before):
        for box in boxes:
            if volume(box):
                # Example: 4 rows with [S(0), R] on a mesh of (2, 2). [0, 1] hold rows 0:2.
                holders.setdefault(box, []).append(member)
    return holders


def _turns(box: Box, holders: Sequence[int], after: Holdings) -> Iterator[Flow]:
    """Yield the flows of one box to the members that want parts of it; its holders send in turn."""
    turn = 0
    for taker, wanted in enumerate(after):
        if taker in holders:
            continue
        for part in _parts(box, wanted):
            # For holders [0, 1] the senders are 0, 1, 0, ...
            yield Flow(sender=holders[turn % len(holders)], receiver=taker, box=part)
            turn += 1


def _parts(box: Box, wanted: Sequence[Box]) -> list[Box]:
    """Return the parts of a box that are in the wanted boxes."""
    parts = [intersect(box, other) for other in wanted]
    return [part for part in parts if part is not None]


def boxes_of_rank(spec: Spec, rank: int) -> list[Box]:
    """Return the one box that a global rank holds; no box if the rank is not in the mesh."""
    coordinate = spec.mesh.coordinate_of(rank)
    return [] if coordinate is None else [spec.box(coordinate)]


def move_blocks(moves: Iterable[BlockMove], comm: Comm | None) -> None:
    """Copy from the shards that ranks hold to the shards that they want, by one all-to-all.

    The shards may belong to any number of tensors.

    All ranks call it with the same tensors.

    Args:
        moves: this rank's part for every tensor; all tensors have one dtype.
        comm: the ranks, as members of the blocks; None is one process without a group.

    Example:
        >>> import torch
        >>> before, after = [[((0, 1),), ((1, 3),)]], [[((0, 3),)]]
        >>> held = zip(before[0], torch.arange(3).split([1, 2]))
        >>> wanted = torch.zeros(3, dtype=torch.long)
        >>> blocks = exchange_blocks(0, before, after)
        >>> move_blocks([BlockMove(blocks, [*held], [(after[0][0], wanted)])], None)
        >>> wanted
        tensor([0, 1, 2])
    """
    me, size = (0, 1) if comm is None else (comm.rank, comm.size)
    sends, receives = _blocks_by_member(moves, me, size)
    if comm is not None:
        all_to_all_blocks(sends, comm, receives)
        return
    for source, target in zip(sends[me], receives[me], strict=True):
        target.copy_(source)


def move_blocks_compared(
    moves: Iterable[BlockMove], comm: Comm, statements: Sequence[str], *, like: Tensor
) -> str:
    """Run `move_blocks`, unless ranks make different statements.

    Args:
        moves: as for `move_blocks`.
        comm: the ranks, as members of the blocks.
        statements: lines that must be equal on all ranks; they ride in the message.
        like: a tensor of the dtype of the shards, on their device.

    Returns:
        The first line that differs, with the ranks, on all ranks; "" if all are equal.
    """
    sends, receives = _blocks_by_member(moves, comm.rank, comm.size)
    return all_to_all_blocks_compared(sends, comm, receives, statements, like=like)


def _blocks_by_member(
    moves: Iterable[BlockMove], me: int, size: int
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return the blocks to each member, and the places for the blocks from each member."""
    sends: list[list[Tensor]] = [[] for _ in range(size)]
    receives: list[list[Tensor]] = [[] for _ in range(size)]
    for blocks, held, wanted in moves:
        kept = [(me, box) for box in blocks.kept]
        for member, box in (*blocks.sends, *kept):
            sends[member].append(_part(held, box))
        for member, box in (*blocks.receives, *kept):
            receives[member].append(_part(wanted, box))
    return sends, receives


def _part(shards: Shards, box: Box) -> Tensor:
    """Return a view of the box in the shard that contains it."""
    containing = [(outer, local) for outer, local in shards if intersect(outer, box) == box]
    outer, local = containing[0]
    # Example: rows 5:7 of the shard of rows 4:8 are local[1:3].
    return local[slices_of(box, outer)]
