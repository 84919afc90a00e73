"""`input_reshard`: between forward and backward, keep only the own part of a module's replicated inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard
from shoal_mesh import Comm, DeviceMesh, all_gather_v

__all__ = ["input_reshard"]


def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """The module, saving the own part of its replicated inputs for backward and gathering them there.

    Trades an all-gather in the backward for memory.  Only tensors that are known to be replicated are cut: the plain
    tensors that the module is called with (and aliases of them), and replicated DTensors.

    Args:
        module: changed in place (two hooks).
        tp_device_mesh: one-axis mesh over which the inputs are replicated.
        input_reshard_dim: dim along which they are cut; None leaves the module as it is.
    """
    if input_reshard_dim is None:
        return module
    hooks: list[_Resharding] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook = _Resharding(tp_device_mesh.comm(0), input_reshard_dim, list(_tensors([*args, *kwargs.values()])))
        hook.start()
        hooks.append(hook)

    def leave(*_: Any) -> None:
        hooks.pop().stop()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    return module


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(value))


class _Part:
    """The own part of a saved tensor."""

    __slots__ = ("comm", "dim", "part", "sizes")

    def __init__(self, tensor: Tensor, comm: Comm, dim: int) -> None:
        step = -(-tensor.shape[dim] // comm.size)
        self.sizes = tuple(max(0, min(step, tensor.shape[dim] - rank * step)) for rank in range(comm.size))
        start = sum(self.sizes[: comm.rank])
        self.part = tensor.narrow(dim, start, self.sizes[comm.rank]).clone(memory_format=torch.contiguous_format)
        self.comm, self.dim = comm, dim

    def whole(self) -> Tensor:
        """The saved tensor again."""
        return all_gather_v(self.part, self.comm, self.sizes, self.dim)


class _Resharding:
    """Saved-tensor hooks for the time of one forward."""

    def __init__(self, comm: Comm, dim: int, inputs: list[Tensor]) -> None:
        self.comm, self.dim = comm, dim
        self.known = {(x.data_ptr(), x.shape, x.stride()) for x in inputs if not isinstance(x, DTensor) and x.numel()}
        self.parts: dict[int, _Part] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def start(self) -> None:
        """Pack what is saved from now on."""
        self.hooks.__enter__()

    def stop(self) -> None:
        """End the hooks; what was packed stays packed until its backward."""
        self.hooks.__exit__(None, None, None)
        self.known.clear()
        self.parts.clear()

    def pack(self, tensor: Tensor) -> Any:
        """What is kept of a saved tensor."""
        if isinstance(tensor, DTensor):
            replicated = tensor._spec.is_replicated and tensor.device_mesh.ndim == 1 and tensor.ndim > self.dim
            return tensor.redistribute(placements=(Shard(self.dim),)) if replicated and not tensor.is_leaf else tensor
        if tensor.ndim <= self.dim or (tensor.data_ptr(), tensor.shape, tensor.stride()) not in self.known:
            return tensor
        # Several readers of one input keep one part.
        part = self.parts.get(tensor.data_ptr())
        if part is None:
            part = self.parts[tensor.data_ptr()] = _Part(tensor.detach(), self.comm, self.dim)
        return part


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _Part):
        return kept.whole()
    tensor: Tensor = kept
    return tensor
