"""One rank of a program for GPUs, run on the CPU: its losses go to a file.

`integration_tests.migrated` starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def _on_cpu() -> None:
    """Have programs take the CPU for their accelerator, with a device for each rank."""
    found: Any = torch.accelerator
    found.is_available = lambda: True
    found.device_count = lambda: int(os.environ["WORLD_SIZE"]) + 2  # examples ask for two at least
    found.current_accelerator = lambda check_available=False: torch.device("cpu")
    found.device_index = lambda index: contextlib.nullcontext()
    start: Any = torch.distributed.init_process_group

    def without_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        start(*args, **kwargs)  # gloo takes none

    torch.distributed.init_process_group = without_device


def _record_losses() -> list[float]:
    """The list to which the value of every tensor is added that `backward` is called on."""
    losses: list[float] = []
    backward: Any = torch.Tensor.backward

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        value = self.detach()
        losses.append(float(value.full_tensor() if hasattr(value, "full_tensor") else value))
        backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]  # for this process
    return losses


if __name__ == "__main__":
    out, program, *arguments = sys.argv[1:]
    _on_cpu()
    losses = _record_losses()
    torch.manual_seed(0)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent.resolve()))
    runpy.run_path(program, run_name="__main__")
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(losses))
