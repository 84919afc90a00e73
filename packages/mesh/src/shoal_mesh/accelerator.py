"""The accelerator of this machine, found through torch; no names of devices are listed here.

May import: nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def accelerator() -> str | None:
    """Return the device type of the accelerator, or None.

    Ranks can exchange tensors on such devices by a backend of the device.

    Example:
        >>> accelerator() in (None, "cuda", "xpu", "sim")
        True
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    backends = dist.Backend.default_device_backend_map
    # without a backend of its own, or with the CPU's, ranks cannot exchange tensors of the device
    if device is None or backends.get(device.type) in (None, backends["cpu"]):
        return None
    return device.type


def device_count() -> int:
    """Return how many devices of type `accelerator` this machine has."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def default_backend(ranks: int) -> str:
    """Return the backend of the default group of some number of local ranks.

    It includes the backend of the accelerator if every rank has a device.

    Example:
        >>> default_backend(1 << 20)
        'gloo'
    """
    device_type = accelerator()
    if device_type is None or device_count() < ranks:
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.Backend.default_device_backend_map[device_type]}"


def module_of(device_type: str) -> Any:
    """Return torch's module for a device type, such as `torch.cuda`; None if there is none.

    Example:
        >>> module_of("cpu").__name__, module_of("meta")
        ('torch.cpu', None)
    """
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:
        return None


def set_own_device(rank: int, backend: str) -> None:
    """Give a local rank its own device if the default group has the accelerator's backend."""
    device_type = accelerator()
    if device_type is not None and dist.Backend.default_device_backend_map[device_type] in backend:
        module_of(device_type).set_device(rank % device_count())


def own_device(device_type: str) -> torch.device:
    """Return this rank's device of a type; meshes of meta tensors exchange on the CPU.

    Example:
        >>> own_device("cpu"), own_device("meta")
        (device(type='cpu'), device(type='cpu'))
    """
    # A simulated rank (`lab`) may map CUDA to the CPU; then `torch.device("cuda")` is a CPU device.
    if torch.device(device_type).type in {"cpu", "meta"}:
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
