"""Blocks of any number of tensors, moved between ranks by one all-to-all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from shoal_mesh import Comm, all_to_all_blocks

from ..layout.boxes import Box, intersect, slices_of
from .blocks import Blocks

Shards = Sequence[tuple[Box, Tensor]]
"""This rank's boxes of a global tensor, each with the local tensor (or view) that holds its elements."""


def move_blocks(moves: Iterable[tuple[Blocks, Shards, Shards]], comm: Comm | None) -> None:
    """Copy from the shards that the ranks hold to those that they want; all ranks call it with the same tensors.

    Args:
        moves: for every tensor what this rank sends, receives and keeps, the shards it holds, and those it wants, which
            are written in place. All of one dtype.
        comm: the ranks, as members of the blocks; None is one process without a group.

    Example:
        >>> import torch
        >>> from shoal_dtensor.redistribute.blocks import exchange_blocks
        >>> before, after = [[((0, 1),), ((1, 3),)]], [[((0, 3),)]]
        >>> held, wanted = zip(before[0], torch.arange(3).split([1, 2])), torch.zeros(3, dtype=torch.long)
        >>> move_blocks([(exchange_blocks(0, before, after), [*held], [(after[0][0], wanted)])], None)
        >>> wanted
        tensor([0, 1, 2])
    """
    me, size = (0, 1) if comm is None else (comm.rank, comm.size)
    sends: list[list[Tensor]] = [[] for _ in range(size)]
    receives: list[list[Tensor]] = [[] for _ in range(size)]
    for blocks, held, wanted in moves:
        kept = [(me, box) for box in blocks.kept]
        for member, box in (*blocks.sends, *kept):
            sends[member].append(_part(held, box))
        for member, box in (*blocks.receives, *kept):
            receives[member].append(_part(wanted, box))
    if comm is not None:
        all_to_all_blocks(sends, comm, receives)
        return
    for source, target in zip(sends[me], receives[me], strict=True):
        target.copy_(source)


def _part(shards: Shards, box: Box) -> Tensor:
    """The view of the shard that has a box."""
    outer, local = next((outer, local) for outer, local in shards if intersect(outer, box) == box)
    return local[slices_of(box, outer)]
