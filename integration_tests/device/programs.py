"""The main programs of each package, in parts that are measured.

Each compares itself with one CPU process.

A program is a generator: it yields the name of a part and what to run, and gets back what that
returned. A part that it yields again is warm; the last time counts. Programs of `training.py`,
`operators.py` and `layers.py` are the rows of docs/device_stalls.md.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .libraries import Library, library
from .simulated import Event, watched

Part = tuple[str, Callable[[], Any]]
Program = Callable[[Library], Generator[Part, Any, None]]


@dataclass(frozen=True)
class Measure:
    """A part of a program, as it ran the last time.

    Attributes:
        events: what the device was made to do.
        live, peak: bytes of device memory after it, and the most during it, above those before the
            program.
        error: what the part of torch's own raised, if it did.
    """

    events: tuple[Event, ...] = ()
    live: int = 0
    peak: int = 0
    error: str = ""

    def count(self, kind: str) -> int:
        """How many events of a kind."""
        return sum(event.kind == kind for event in self.events)


def device() -> torch.device:
    """This rank's device."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "programs of the tier run where there is an accelerator"
    return torch.device(kind.type, torch.accelerator.current_device_index())


def measured(program: Program, name: str) -> dict[str, Measure]:
    """Each part of a program by a library, by name."""
    gc.collect()
    torch.manual_seed(0)
    module = torch.get_device_module(device().type)
    before = module.memory_allocated()
    found: dict[str, Measure] = {}
    steps = program(library(name))
    part = next(steps, None)
    while part is not None:
        named, run = part
        result, error = None, ""
        module.reset_peak_memory_stats()
        with watched() as events:
            try:
                result = run()
            except Exception as raised:
                if name == "shoal":
                    raise
                error = type(raised).__name__
        found[named] = Measure(
            tuple(events),
            module.memory_allocated() - before,
            module.max_memory_allocated() - before,
            error,
        )
        # what it holds is not the program's any longer
        del run
        try:
            part = steps.send(result)
        except StopIteration:
            part = None
    dist.barrier()
    return found


def on_host(value: Any) -> Tensor:
    """The whole tensor, on the CPU."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().cpu()


def assert_same(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Fail unless tensors, or numbers, are those of one CPU process."""
    if not isinstance(expected, Tensor):
        assert got == expected
        return
    torch.testing.assert_close(
        on_host(got), expected.detach(), rtol=tolerance, atol=tolerance, check_dtype=False
    )
