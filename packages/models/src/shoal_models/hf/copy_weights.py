"""From model to model: the shards of one are sent into another, which is parallel in any other way."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor.errors import PlanError
from shoal_dtensor.internal import Blocks, Box, Shards, exchange_blocks, in_groups, move_blocks
from shoal_mesh import comm_over
from shoal_mesh.internal import agree
from shoal_tp_styles.internal import progress

from ..errors import CheckpointError
from ..weights.saving import describe, merged


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
    read, written = dict[str, list[tuple[Box, Tensor]]](), dict[str, list[tuple[Box, Tensor]]]()  # this rank's shards
    both = agree(
        lambda: (describe(source, read) if source else {}, describe(target, written) if target else {}),
        error_type=CheckpointError,
        what="copy_weights: cannot describe the models",
    )
    of_sources, of_targets = [each for each, _ in both], [each for _, each in both]
    sources, targets = merged(of_sources), merged(of_targets)
    for name, tensor in targets.items():
        stored = sources.get(name)
        if stored is None or (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype):
            has = "nothing" if stored is None else f"{tuple(stored.shape)} {stored.dtype}"
            raise PlanError(f"copy_weights: {name!r} is {tuple(tensor.shape)} {tensor.dtype}, the source has {has}")
    rank, comm = (dist.get_rank(), comm_over(range(dist.get_world_size()))) if dist.is_initialized() else (0, None)

    def move(name: str) -> tuple[Blocks, Shards, Shards]:
        boxes = ([entries[name][2] if name in entries else [] for entries in each] for each in (of_sources, of_targets))
        blocks = exchange_blocks(rank, *boxes)
        return blocks, read.get(name, []), written.get(name, [])

    # Names that move together have one dtype.
    of_dtypes = dict[torch.dtype, list[str]]()
    for name, tensor in targets.items():
        of_dtypes.setdefault(tensor.dtype, []).append(name)
    grouped = (in_groups(names, lambda name: targets[name].nbytes, max_bytes) for names in of_dtypes.values())
    batches = [batch for groups in grouped for batch in groups]
    for names in progress(batches, "copying weights"):
        with torch.no_grad():
            move_blocks(map(move, names), comm)
