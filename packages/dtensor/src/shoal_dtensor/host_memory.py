"""Copies between a device and the memory of the host, for which the host does not wait.

They go through pinned memory, which torch hands out again after the copies out of it. On the CPU
they are plain.

May import: _torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import Comm

from ._torch.compiling import is_tracing


def pins(device: torch.device) -> bool:
    """Whether copies between pinned memory and a device run beside the host."""
    if device.type == "cpu" or is_tracing():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def upload(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host, as `torch.tensor` takes them, as a tensor on a device."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=pins(device), device="cpu").to(
        device, non_blocking=True
    )


def upload_packed(
    tensors: Sequence[Tensor], device: torch.device, dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Tensors of the host on a device, in other dtypes: one copy for each dtype. They may be written to at once."""
    sent = [*tensors]
    # (2,) and (3, 4) of one dtype: 14 elements in one copy
    for members in _alike(dtypes):
        sizes = [tensors[i].numel() for i in members]
        staged = torch.empty(
            sum(sizes), dtype=dtypes[members[0]], pin_memory=pins(device), device="cpu"
        )
        torch._foreach_copy_(
            list(torch.split(staged, sizes)), [tensors[i].reshape(-1) for i in members]
        )
        for i, flat in zip(
            members, torch.split(staged.to(device, non_blocking=True), sizes), strict=True
        ):
            sent[i] = flat.view(tensors[i].shape)
    return sent


def start_copy(tensor: Tensor) -> Tensor:
    """A copy in memory of the host, which is there when what the device has been given so far is done."""
    copied = torch.empty_like(tensor, device="cpu", pin_memory=pins(tensor.device))
    return copied.copy_(tensor, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start copies of a device's tensors in memory of the host, one for each dtype; what is returned waits for them."""
    arriving = [*tensors]
    for members in _alike([tensor.dtype for tensor in tensors]):
        packed = start_copy(torch.cat([tensors[i].reshape(-1) for i in members]))
        for i, flat in zip(
            members, torch.split(packed, [tensors[i].numel() for i in members]), strict=True
        ):
            arriving[i] = flat.view(tensors[i].shape)
    event = arrival_on(tensors[0].device)

    def arrived() -> list[Tensor]:
        if event is not None:
            event.synchronize()
        return arriving

    return arrived


def arrival_on(device: torch.device) -> torch.Event | None:
    """The event that what a device has been given so far is done; None on the CPU, where it is."""
    if not pins(device):
        return None
    event = torch.Event(device)
    event.record()
    return event


def device_of_numbers(comm: Comm, device: torch.device | str) -> torch.device:
    """Where ranks exchange a few numbers of their hosts: in memory of the hosts, where the backend can send that."""
    return torch.device("cpu" if "cpu:" in comm.backend else device)


def _alike(dtypes: Sequence[torch.dtype]) -> list[list[int]]:
    """Positions of each dtype."""
    return [
        [i for i, each in enumerate(dtypes) if each == dtype] for dtype in dict.fromkeys(dtypes)
    ]
