"""`input_reshard`: between forward and backward, keep only this rank's shard of a module's replicated inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_dtensor.internal import pytree, takes
from shoal_mesh import DeviceMesh


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
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        hooks.append(_Resharding(tp_device_mesh, input_reshard_dim, tensors))
        hooks[-1].__enter__()

    def leave(*_: Any) -> None:
        hooks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    return module


class _Resharding(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks during one forward; what was packed stays packed until its backward."""

    def __init__(self, mesh: DeviceMesh, dim: int, inputs: list[Tensor]) -> None:
        super().__init__(self.pack, lambda saved: saved[0].full_tensor() if isinstance(saved, tuple) else saved)
        self.mesh, self.dim = mesh, dim
        plain = (x for x in inputs if not isinstance(x, DTensor) and x.numel())
        self.replicated = {(x.data_ptr(), x.shape, x.stride()) for x in plain}
        self.shards: dict[int, tuple[DTensor]] = {}

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.replicated.clear()
        self.shards.clear()

    def pack(self, tensor: Tensor) -> Any:
        """What is saved instead of a tensor; of a plain one that is sharded a tuple."""
        if isinstance(tensor, DTensor):
            replicated = tensor.spec.replicated and tensor.device_mesh.ndim == 1 and tensor.ndim > self.dim
            return tensor.redistribute(placements=(Shard(self.dim),)) if replicated and not tensor.is_leaf else tensor
        pointer = tensor.data_ptr()
        if tensor.ndim <= self.dim or (pointer, tensor.shape, tensor.stride()) not in self.replicated:
            return tensor
        if pointer not in self.shards:  # several readers of one input save one shard
            whole = DTensor.from_local(tensor.detach(), self.mesh, (Replicate(),), run_check=False)
            self.shards[pointer] = (whole.redistribute(placements=(Shard(self.dim),)),)
        return self.shards[pointer]
