"""Fused parameters whose blocks differ, as one DTensor per block, and fused again.

`weight` becomes `weight_<block>` (and `bias` likewise); the local shards are adjacent in one buffer.  Blocks are rows:
a fused weight of shape (in, out) is transposed when it is split, and back when it is fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, distribute_tensor
from shoal_dtensor.errors import LayoutError, TiedWeightError
from shoal_dtensor.internal import carry_gradient, carry_over, has_hooks
from shoal_mesh import DeviceMesh

from ..sharding.module_sharding import FusedBlocks


def _rows_first(tensor: Tensor, fused: FusedBlocks) -> Tensor:
    return tensor.t() if fused.transposed and tensor.ndim == 2 else tensor


def _shards(tensor: Tensor, fused: FusedBlocks, mesh: DeviceMesh) -> list[DTensor]:
    """Each block of a fused tensor."""
    rows = torch.split_with_sizes(_rows_first(tensor, fused), [heads.features for heads in fused.blocks.values()])
    return [
        distribute_tensor(of_block.contiguous(), heads.mesh(mesh), heads.placements(mesh), src_data_rank=None)
        for heads, of_block in zip(fused.blocks.values(), rows, strict=True)
    ]


def block_rows(fused: FusedBlocks) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Parameter of each block -> (fused name, its first row in the fused parameter, rows of the fused parameter)."""
    for kind in fused.names:
        start = 0
        for name, heads in fused.parts(kind).items():
            yield name, (kind, start, fused.features)
            start += heads.features


def make_adjacent(module: nn.Module, fused: FusedBlocks) -> None:
    """Put the local shards of a module's blocks into one buffer again, where they have been replaced."""
    for kind in fused.names:
        params: list[Any] = [module._parameters[name] for name in fused.parts(kind)]
        if len(params) > 1 and all(isinstance(param, DTensor) for param in params):
            for param, shard in zip(params, _adjacent([param.detach() for param in params]), strict=True):
                param.data = shard


def split_blocks(
    module: nn.Module, style: str, fused: FusedBlocks, mesh: DeviceMesh, src_data_rank: int | None
) -> set[str]:
    """Replace the fused parameters of a module by one DTensor parameter per block; the names of these.

    Before anything is changed, it refuses a parameter that is a DTensor already, or has gradient hooks.
    """
    for kind in fused.names:
        param = module._parameters.get(kind)
        if isinstance(param, DTensor):
            raise TiedWeightError(f"{style}: the fused parameter {kind!r} is a DTensor already; it cannot be split")
        if param is not None and "" not in fused.blocks and has_hooks(param):
            raise LayoutError(  # they would have to see all blocks at once
                f"{style}: the fused parameter {kind!r} has gradient hooks, and becomes one parameter for each of "
                f"{list(fused.blocks)}; remove the hooks, and register them on those afterwards"
            )
    for kind in fused.names:
        param = module._parameters.get(kind)
        if param is None:
            for name in fused.parts(kind):
                module.register_parameter(name, None)
            continue
        full = param.detach()
        if src_data_rank is not None:
            # One broadcast of the fused parameter; then every rank takes its shards, also of heads that ranks share.
            full = distribute_tensor(full, mesh, (Replicate(),), src_data_rank=src_data_rank).to_local()
        shards = _adjacent(_shards(full, fused, mesh))
        module._parameters[kind] = None
        for name, shard in zip(fused.parts(kind), shards, strict=True):
            module.register_parameter(name, successor_of(param, shard, None))
    return {name for name, _ in block_rows(fused)}


def as_blocks(
    fused: FusedBlocks, mesh: DeviceMesh, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Before loading: a fused entry of the state dict becomes what the module has in its place."""
    for kind in fused.names:
        full, param = state_dict.get(prefix + kind), vars(module)["_parameters"].get(kind)
        if isinstance(param, DTensor) and isinstance(full, Tensor) and full.shape == param.shape:
            spec, order, full = param.spec, param.spec.shard_order, full.detach()
            if isinstance(full, DTensor):  # as a checkpoint of another plan has it
                full = full.redistribute(spec.mesh, spec.placements, shard_order=order)
            else:
                full = distribute_tensor(full, spec.mesh, spec.placements, src_data_rank=None, shard_order=order)
            state_dict[prefix + kind] = full
        elif param is None and full is not None and fused.splits(mesh.size()):
            with torch.no_grad():
                plain = full_of(state_dict.pop(prefix + kind))  # also a DTensor, as a checkpoint of another plan has it
            for name, shard in zip(fused.parts(kind), _shards(plain, fused, mesh), strict=True):
                state_dict[prefix + name] = shard


def _adjacent(tensors: list[DTensor]) -> list[DTensor]:
    """The same DTensors, their local shards adjacent in one buffer."""
    local = [tensor.to_local() for tensor in tensors]
    shards = torch.split_with_sizes(torch.cat(local), [shard.shape[0] for shard in local])
    return [DTensor(shard, tensor.spec) for shard, tensor in zip(shards, tensors, strict=True)]


def fuse_blocks(module: nn.Module, fused: FusedBlocks) -> None:
    """The fused plain parameters again, in place of those of the blocks."""
    if "" in fused.blocks:
        return

    def together(blocks: list[Tensor]) -> Tensor:
        return _rows_first(torch.cat([full_of(block) for block in blocks]), fused).contiguous()

    for kind in fused.names:
        params = [module._parameters.pop(name) for name in fused.parts(kind)]
        present = [param for param in params if param is not None]
        grads = [param.grad for param in present if param.grad is not None]
        if present:
            whole, complete = together([*present]), len(grads) == len(present)
            module._parameters[kind] = successor_of(present[0], whole, together(grads) if complete else None)


def successor_of(param: Tensor, tensor: Tensor, grad: Tensor | None) -> nn.Parameter:
    """The parameter that replaces one, with its attributes, gradient hooks, and dtype of gradients."""
    successor = nn.Parameter(tensor, requires_grad=param.requires_grad)
    carry_gradient(param, successor, grad)
    carry_over(param, successor)
    return successor


def full_of(tensor: Tensor) -> Tensor:
    """The global tensor of a DTensor; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
