"""The accelerator of this machine, whatever it is: torch is asked, no names of devices are known here.

May import: nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def accelerator() -> str | None:
    """The type of the devices beside the CPU whose tensors ranks can exchange by a backend of their own, if any.

    Example:
        >>> accelerator() in (None, "cuda", "xpu", "sim")
        True
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    backends = dist.Backend.default_device_backend_map
    if device is None or backends.get(device.type) in (None, backends["cpu"]):
        return None
    return device.type


def device_count() -> int:
    """How many devices `accelerator` has here."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def default_backend(ranks: int) -> str:
    """The backend of the default group of so many local ranks: with that of the accelerator, if each has a device.

    Example:
        >>> default_backend(1 << 20)
        'gloo'
    """
    kind = accelerator()
    if kind is None or device_count() < ranks:
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"


def module_of(device_type: str) -> Any:
    """The module of torch for a type of device, such as `torch.cuda`; None where it has none.

    Example:
        >>> module_of("cpu").__name__, module_of("meta")
        ('torch.cpu', None)
    """
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:
        return None


def set_own_device(rank: int, backend: str) -> None:
    """Give a local rank a device of its own, where the accelerator's backend is among those of the default group."""
    kind = accelerator()
    if kind is not None and dist.Backend.default_device_backend_map[kind] in backend:
        module_of(kind).set_device(rank % device_count())


def own_device(device_type: str) -> torch.device:
    """This rank's device of a type; meshes of meta tensors exchange on the CPU.

    Example:
        >>> own_device("cpu"), own_device("meta")
        (device(type='cpu'), device(type='cpu'))
    """
    if device_type in {"cpu", "meta"}:
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
