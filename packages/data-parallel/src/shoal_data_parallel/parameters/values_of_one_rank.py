"""Values that all data-parallel ranks get from one of them, so that their replicas are equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal_dtensor.internal import local_of
from shoal_mesh import broadcast
from shoal_mesh.internal import parts_like, positions_by_dtype

from .data_axes import DataAxes


def send_values(tensors: Iterable[Tensor], axes: DataAxes, src_data_rank: int | None) -> None:
    """Send the parameters and buffers of one data-parallel rank to all; None leaves them."""
    for tensor in tensors:
        local = local_of(tensor).detach()
        if src_data_rank is not None and not local.is_meta:
            local.copy_(broadcast(local.contiguous(), axes.comm, src_data_rank))


@torch.no_grad()
def send_buffers(module: nn.Module, axes: DataAxes) -> None:
    """Copy the buffers of the first data-parallel rank to the others, one message per dtype."""
    buffers = [local_of(buffer) for buffer in module.buffers()]
    for positions in positions_by_dtype([buffer.dtype for buffer in buffers]):
        same_dtype = [buffers[i] for i in positions]
        packed = torch.cat([buffer.flatten() for buffer in same_dtype])
        received = broadcast(packed, axes.comm)
        for buffer, values in zip(same_dtype, parts_like(received, same_dtype), strict=True):
            buffer.copy_(values)
