"""`copy_weights`: from a model on one mesh into a model on another; ranks send blocks of their shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor.errors import PlanError
from shoal_dtensor.internal import Blocks, Box, Shards, exchange_blocks, move_blocks
from shoal_mesh import comm_over
from shoal_mesh.internal import agree
from shoal_tp_styles.internal import progress

from ..errors import CheckpointError
from ..weights.saving import StoredTensor, describe, merged


def copy_weights(source: nn.Module | None, target: nn.Module | None, *, max_bytes: int = 64 * 2**20) -> None:
    """Write the parameters and persistent buffers of one model into another one, parallel in any other way.

    For a mesh that serves beside one that trains: other degrees, other plans, the same ranks of the world or others.
    All ranks of the world call it. No rank has more of a parameter than its shards of both, and what is in flight.

    Args:
        source: a parallel or plain model; None on ranks that have no part of it.
        target: a model with the same names, written in place; None on ranks that have no part of it.
        max_bytes: of tensors that one collective moves.

    Raises:
        PlanError: on all ranks, if the target has entries that the source lacks, or has in another shape or dtype.

    Example:
        >>> source, target = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> copy_weights(source, target)
        >>> torch.equal(source.weight, target.weight)
        True
    """
    given: dict[str, list[tuple[Box, Tensor]]] = {}
    wanted: dict[str, list[tuple[Box, Tensor]]] = {}
    both = agree(
        lambda: (describe(source, given) if source else {}, describe(target, wanted) if target else {}),
        error_type=CheckpointError,
        what="copy_weights: cannot describe the models",
    )
    of_sources, of_targets = [each for each, _ in both], [each for _, each in both]
    sources, targets = merged(of_sources), merged(of_targets)
    for name, tensor in targets.items():
        found = sources.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            has = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise PlanError(f"copy_weights: {name!r} is {tuple(tensor.shape)} {tensor.dtype}, the source has {has}")
    rank, comm = (dist.get_rank(), comm_over(range(dist.get_world_size()))) if dist.is_initialized() else (0, None)

    def move(name: str) -> tuple[Blocks, Shards, Shards]:
        blocks = exchange_blocks(rank, _boxes(of_sources, name), _boxes(of_targets, name))
        return blocks, given.get(name, []), wanted.get(name, [])

    for names in progress(list(_batches(targets, max_bytes)), "copying weights"):
        with torch.no_grad():
            move_blocks(map(move, names), comm)


def _boxes(described: list[dict[str, Any]], name: str) -> list[list[Box]]:
    """The boxes of an entry that each rank has."""
    return [entries[name][2] if name in entries else [] for entries in described]


def _batches(targets: dict[str, StoredTensor], limit: int) -> Iterator[list[str]]:
    """Names that move together: of one dtype, together up to the limit."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in targets.values()):
        names, size = list[str](), 0
        for name, tensor in targets.items():
            if tensor.dtype == dtype:
                if names and size + tensor.nbytes > limit:
                    yield names
                    names, size = [], 0
                names, size = [*names, name], size + tensor.nbytes
        yield names
