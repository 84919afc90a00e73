"""Runs a plan on the memories of all ranks in one process, copy by copy."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_transfer import Copy, Manifest, MemoryBlock, TransferPlan

Memories = dict[tuple[str, int, str], Tensor]


def memories_of_manifest(
    side: str, manifest: Manifest, values: dict[str, Tensor] | None
) -> Memories:
    """The memories of all ranks, with values where they hold them, -1 elsewhere."""
    memories: Memories = {}
    for name, record in manifest.tensors.items():
        for holding in record.holdings:
            key = (side, holding.rank, record.parts[holding.part])
            memory = memories.setdefault(key, torch.full((4000,), -1))
            if values is not None:
                sizes = [stop - start for start, stop in holding.box]
                box = tuple(slice(*bounds) for bounds in holding.box)
                view = memory.as_strided(sizes, holding.strides, holding.offset)
                view.copy_(values[name][box])
    return memories


def run_copies(plan: TransferPlan, memories: Memories) -> None:
    for stage in range(3):
        for copy in plan.regions():
            if copy.stage == stage:
                run_copy(copy, memories)


def run_copy(copy: Copy, memories: Memories) -> None:
    target = strided(memories, copy.receiver, copy.sizes)
    if copy.sender is None:
        if copy.fill is not None:
            target.fill_(int(copy.fill))
        return
    source = strided(memories, copy.sender, copy.sizes)
    assert bool((source >= 0).all()), f"{copy} reads elements that have not arrived"
    target.copy_(source)


def strided(memories: Memories, memory: MemoryBlock, sizes: tuple[int, ...]) -> Tensor:
    tensor = memories[memory.side, memory.rank, memory.part]
    return tensor.as_strided(sizes, memory.strides, memory.offset)
