"""`copy_weights`: from a model on one mesh into a model on another; ranks send blocks of their shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor.errors import PlanError
from shoal_dtensor.internal import Box, intersect, slices_of
from shoal_mesh import all_to_all_blocks, comm_over
from shoal_mesh.internal import progress

from ..weights.saving import StoredTensor, agree, describe, merged

_Exchange = tuple[list[list[Tensor]], list[list[Tensor]]]


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
    held: dict[str, list[tuple[Box, Tensor]]] = {}
    wanted: dict[str, list[tuple[Box, Tensor]]] = {}
    both = agree(
        "copy_weights: cannot describe the models",
        lambda: (describe(source, held) if source else {}, describe(target, wanted) if target else {}),
    )
    sources, targets = merged([each for each, _ in both]), merged([each for _, each in both])
    for name, tensor in targets.items():
        found = sources.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            has = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise PlanError(f"copy_weights: {name!r} is {tuple(tensor.shape)} {tensor.dtype}, the source has {has}")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for names in progress(list(_batches(targets, max_bytes)), "copying weights"):
        exchange: _Exchange = ([[] for _ in range(ranks)], [[] for _ in range(ranks)])
        for name in names:
            _add(exchange, sources[name], targets[name], (held.get(name, []), wanted.get(name, [])), rank)
        _run(exchange, ranks)


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


def _add(exchange: _Exchange, source: StoredTensor, target: StoredTensor, local: Any, rank: int) -> None:
    """What this rank sends and receives of one tensor, in an order that all ranks know."""
    mine, into = dict(local[0]), dict(local[1])
    for wanted, receivers in target.holders.items():
        for held, senders in source.holders.items():
            common = intersect(wanted, held)
            if common is None:
                continue
            for receiver in receivers:
                sender = receiver if receiver in senders else senders[receiver % len(senders)]
                if sender == rank:
                    exchange[0][receiver].append(mine[held][slices_of(common, held)])
                if receiver == rank:
                    exchange[1][sender].append(into[wanted][slices_of(common, wanted)])


def _run(exchange: _Exchange, ranks: int) -> None:
    with torch.no_grad():
        if ranks > 1:
            all_to_all_blocks(exchange[0], comm_over(range(ranks)), exchange[1])
        else:
            for value, into in zip(exchange[0][0], exchange[1][0], strict=True):
                into.copy_(value)
