"""Asynchronous copies between a device and the memory of the host.

The host does not wait for them. The copies go through pinned memory, which torch reuses after the
copies from it are done. On the CPU they are plain copies.

May import: _torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import Comm
from shoal_mesh.internal import copy_each, parts_like, positions_by_dtype

from ._torch.compiling import is_tracing


def pins(device: torch.device) -> bool:
    """Tell whether copies between pinned memory and a device run asynchronously to the host."""
    if device.type == "cpu" or is_tracing():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def upload(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers of the host, as `torch.tensor` accepts them, to a tensor on a device."""
    staged = torch.tensor(numbers, dtype=dtype, pin_memory=pins(device), device="cpu")
    return staged.to(device, non_blocking=True)


def upload_packed(
    tensors: Sequence[Tensor], device: torch.device, dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Copy tensors of the host to a device in other dtypes, with one copy for each dtype.

    The host tensors may be written to at once.
    """
    sent = [*tensors]
    # Example: tensors of (2,) and (3, 4) of one dtype are 14 elements in one copy.
    for positions in positions_by_dtype(dtypes):
        same_dtype = [tensors[i] for i in positions]
        count = sum([tensor.numel() for tensor in same_dtype])
        dtype = dtypes[positions[0]]
        staged = torch.empty(count, dtype=dtype, pin_memory=pins(device), device="cpu")
        copy_each(parts_like(staged, same_dtype), same_dtype)
        arriving = staged.to(device, non_blocking=True)
        for i, part in zip(positions, parts_like(arriving, same_dtype), strict=True):
            sent[i] = part
    return sent


def start_copy(tensor: Tensor) -> Tensor:
    """Start a copy of a tensor to memory of the host.

    The copy is complete when the work that is queued on the device so far is done.
    """
    copied = torch.empty_like(tensor, device="cpu", pin_memory=pins(tensor.device))
    return copied.copy_(tensor, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start copies of device tensors to memory of the host, one for each dtype.

    The returned function waits for the copies and returns them.
    """
    arriving = [*tensors]
    for positions in positions_by_dtype([tensor.dtype for tensor in tensors]):
        same_dtype = [tensors[i] for i in positions]
        packed = start_copy(torch.cat([tensor.reshape(-1) for tensor in same_dtype]))
        for i, part in zip(positions, parts_like(packed, same_dtype), strict=True):
            arriving[i] = part
    event = arrival_on(tensors[0].device)

    def wait_for_copies() -> list[Tensor]:
        if event is not None:
            event.synchronize()
        return arriving

    return wait_for_copies


def arrival_on(device: torch.device) -> torch.Event | None:
    """Record an event after all work queued on a device so far; None on the CPU."""
    if not pins(device):
        return None
    event = torch.Event(device)
    event.record()
    return event


def device_of_numbers(comm: Comm, device: torch.device | str) -> torch.device:
    """Return the device for exchanging a few host numbers: the CPU if the backend sends from it."""
    return torch.device("cpu" if "cpu:" in comm.backend else device)
