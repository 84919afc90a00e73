"""Private and unstable names of torch that this package alone uses, all in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

# Inside the block, writes to these tensors do not count: autograd treats saved values of them as
# unchanged.
preserving_versions: Callable[..., Any] = torch.autograd.grad_mode._unsafe_preserve_version_counter
# The functions (pack, unpack) for tensors that autograd saves now; None without hooks.
outer_saved_tensors_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
)

# Divides each tensor of a list in place.
divide_each = torch._foreach_div_


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Open a block in which no transform and no recorder sees operators."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def run_when_ready(node: Any) -> None:
    """Have a backward run a node as soon as its gradient is complete, like the nodes of leaves."""
    node._set_sequence_nr(torch.iinfo(torch.int64).max)


def call_on_stream(stream: Any, function: Callable[[torch.Tensor], object], tensor: Any) -> None:
    """Call a function on another stream of a tensor's device, in order with the current one."""
    device = torch.get_device_module(tensor.device)
    current = device.current_stream()
    stream.wait_stream(current)
    with device.stream(stream):
        function(tensor)
    current.wait_stream(stream)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages that a pipeline schedule runs on this rank."""
    single = getattr(schedule, "_stage", None)
    return [single] if single is not None else list(getattr(schedule, "_stages", ()))


def pipeline_actions() -> tuple[Any, Any]:
    """Return the kinds of a schedule's actions that gather and free a stage."""
    # imported here, because importing takes long and only pipelines need it
    from torch.distributed.pipelining.schedules import _ComputationType

    return _ComputationType.UNSHARD, _ComputationType.RESHARD


def is_torch_fsdp(module: Any) -> bool:
    """Return whether torch's own `fully_shard` or `replicate` has changed the module's class."""
    home = "torch.distributed.fsdp._fully_shard"
    return any(base.__module__.startswith(home) for base in type(module).__mro__)


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()
