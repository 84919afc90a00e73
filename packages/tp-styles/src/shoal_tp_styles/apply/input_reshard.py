"""`input_reshard`: between forward and backward, keep only this rank's shard of a module's replicated inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.internal import takes
from shoal_mesh import Comm, DeviceMesh, all_gather_v


@takes(module=nn.Module)
def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """The module, saving this rank's shard of its replicated inputs for backward and gathering them there.

    Trades an all-gather in the backward for memory.  Only tensors known to be replicated are sharded: the plain
    tensors that the module is called with (and aliases of them), and replicated DTensors.

    Args:
        module: changed in place (two hooks).
        tp_device_mesh: one-axis mesh over which the inputs are replicated.
        input_reshard_dim: dim along which they are sharded; None leaves the module as it is.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     linear = input_reshard(nn.Linear(4, 8), init_device_mesh("cpu", (4,)), 0)
        ...     linear(torch.zeros(8, 4)).shape  # (2, 4) of the input are saved for backward
        torch.Size([8, 8])
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


class _SavedShard:
    """This rank's shard of a saved tensor."""

    __slots__ = ("comm", "dim", "shard", "sizes")

    def __init__(self, tensor: Tensor, comm: Comm, dim: int) -> None:
        step = -(-tensor.shape[dim] // comm.size)  # 5 rows on 4 ranks: 2, sizes 2 2 1 0
        self.sizes = tuple(max(0, min(step, tensor.shape[dim] - rank * step)) for rank in range(comm.size))
        start = sum(self.sizes[: comm.rank])
        self.shard = tensor.narrow(dim, start, self.sizes[comm.rank]).clone(memory_format=torch.contiguous_format)
        self.comm, self.dim = comm, dim

    def full(self) -> Tensor:
        """The saved tensor again."""
        return all_gather_v(self.shard, self.comm, self.sizes, self.dim)


class _Resharding:
    """Saved-tensor hooks during one forward."""

    def __init__(self, comm: Comm, dim: int, inputs: list[Tensor]) -> None:
        self.comm, self.dim = comm, dim
        self.known = {(x.data_ptr(), x.shape, x.stride()) for x in inputs if not isinstance(x, DTensor) and x.numel()}
        self.shards: dict[int, _SavedShard] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def start(self) -> None:
        """Pack what is saved from now on."""
        self.hooks.__enter__()

    def stop(self) -> None:
        """End the hooks; what was packed stays packed until its backward."""
        self.hooks.__exit__(None, None, None)
        self.known.clear()
        self.shards.clear()

    def pack(self, tensor: Tensor) -> Any:
        """What is saved instead of a tensor."""
        if isinstance(tensor, DTensor):
            replicated = tensor.spec.replicated and tensor.device_mesh.ndim == 1 and tensor.ndim > self.dim
            return tensor.redistribute(placements=(Shard(self.dim),)) if replicated and not tensor.is_leaf else tensor
        if tensor.ndim <= self.dim or (tensor.data_ptr(), tensor.shape, tensor.stride()) not in self.known:
            return tensor
        # Several readers of one input save one shard.
        shard = self.shards.get(tensor.data_ptr())
        if shard is None:
            shard = self.shards[tensor.data_ptr()] = _SavedShard(tensor.detach(), self.comm, self.dim)
        return shard


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _SavedShard):
        return saved.full()
    tensor: Tensor = saved
    return tensor
