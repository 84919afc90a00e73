"""Results whose number depends on data: what each rank found, put together on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_mesh import all_gather, all_gather_v

from ..spec import Spec
from .rule import OpCall

__all__ = ["few", "gathered", "ordered", "with_offset"]


def gathered(spec: Spec, axes: tuple[int, ...], *found: Tensor) -> list[Tensor]:
    """What all ranks along mesh axes found, one after the other; how much differs from rank to rank."""
    comm = spec.mesh.comm(axes)
    counts = all_gather(torch.tensor([len(found[0])], device=found[0].device), comm).tolist()
    return [all_gather_v(tensor.contiguous(), comm, counts) for tensor in found]


def ordered(spec: Spec, axes: tuple[int, ...], places: Tensor, *found: Tensor) -> list[Tensor]:
    """`found` of all ranks in the row-major order of their global coordinates `places`, `(count, ndim)`."""
    places, *all_found = gathered(spec, axes, places, *found)
    flat = torch.zeros_like(places[:, 0])
    for d, size in enumerate(spec.shape):
        flat = flat * size + places[:, d]
    order = flat.argsort()
    return [places[order], *(tensor[order] for tensor in all_found)]


def with_offset(spec: Spec, places: Tensor) -> Tensor:
    """Global coordinates, `(count, ndim)`, from local ones."""
    return places + torch.tensor(spec.local_offset, dtype=places.dtype, device=places.device)


def few(call: OpCall) -> int:
    """Bytes of the results, of which nothing is known; fewer than the input's, or gathering it would be as good."""
    return call.tensors[0].shape[0] if call.tensors[0].ndim else 0
