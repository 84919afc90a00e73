"""Results whose number depends on data: those of all ranks, put together on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_mesh import all_gather, all_gather_v

from ...layout.spec import Spec
from ..language.rule import OpCall, Traffic


def gathered(spec: Spec, axes: tuple[int, ...], *results: Tensor) -> list[Tensor]:
    """The results of all ranks along mesh axes, one after the other; their number differs from rank to rank."""
    comm = spec.mesh.comm(axes)
    counts = all_gather(torch.tensor([len(results[0])], device=results[0].device), comm).tolist()
    return [all_gather_v(tensor.contiguous(), comm, counts) for tensor in results]


def in_global_order(spec: Spec, axes: tuple[int, ...], positions: Tensor, *results: Tensor) -> list[Tensor]:
    """The results of all ranks in the row-major order of their global `positions`, `(count, ndim)`."""
    positions, *results_of_all = gathered(spec, axes, positions, *results)
    flat = torch.zeros_like(positions[:, 0])
    for d, size in enumerate(spec.shape):
        flat = flat * size + positions[:, d]
    order = flat.argsort()
    return [positions[order], *(tensor[order] for tensor in results_of_all)]


def global_positions(spec: Spec, positions: Tensor) -> Tensor:
    """Global positions, `(count, ndim)`, from those in the shard."""
    return positions + torch.tensor(spec.local_offset, dtype=positions.dtype, device=positions.device)


def assumed_result_bytes(call: OpCall) -> Traffic:
    """The traffic of gathering results, whose number nobody knows yet: fewer than the input's elements."""
    size = max(call["self"].shape[0], 1) if call["self"].ndim else 1
    return lambda ranks: size
