"""`torch.sim`: the functions that torch and programs call in an accelerator's module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_C = sys.modules[f"{__package__}.simulated_device"]
_set_by_program = [False]

device_count = _C.device_count
current_device = _C.current_device
default_generators = tuple(_C.default_generator(index) for index in range(device_count()))


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    """Whether the program has chosen a device."""
    return _set_by_program[0]


def init() -> None:
    """Nothing: it is there."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def set_device(device: int | str | torch.device) -> None:
    _set_by_program[0] = True
    _C.set_device(_index(device))


def _index(device: int | str | torch.device | None) -> int:
    index = (
        device
        if isinstance(device, int)
        else None
        if device is None
        else torch.device(device).index
    )
    return current_device() if index is None else index


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return int(default_generators[current_device()].initial_seed())


def get_rng_state(device: int | str | torch.device | None = None) -> torch.Tensor:
    state: torch.Tensor = default_generators[_index(device)].get_state()
    return state


def set_rng_state(state: torch.Tensor, device: int | str | torch.device | None = None) -> None:
    default_generators[_index(device)].set_state(state)


def synchronize(device: int | str | torch.device | None = None) -> None:
    torch.accelerator.synchronize(device)


class Stream(torch.Stream):
    """A stream of the current device."""

    def __new__(cls, device: torch.device | None = None, priority: int = 0) -> Stream:
        return super().__new__(
            cls, device or torch.device("sim", current_device()), priority=priority
        )


class Event(torch.Event):
    """An event of the current device."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, "sim", enable_timing=enable_timing)


def current_stream(device: int | str | torch.device | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """What is done in the block is done on a stream; None changes nothing."""
    before = current_stream()
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def memory_allocated(device: int | str | torch.device | None = None) -> int:
    """Bytes of device memory that tensors of this process hold."""
    return int(_C.memory()[0])


def max_memory_allocated(device: int | str | torch.device | None = None) -> int:
    """The most bytes that they held since the peak was last forgotten."""
    return int(_C.memory()[1])


def reset_peak_memory_stats(device: int | str | torch.device | None = None) -> None:
    _C.forget_peak()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
