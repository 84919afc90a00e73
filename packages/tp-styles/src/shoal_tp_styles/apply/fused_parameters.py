"""Fused parameters as one DTensor per block, and fused again.

`weight` becomes `weight_<block>` (and `bias` likewise); the local shards are adjacent in one buffer.  Blocks are
rows: a fused weight of shape (in, out) is transposed when it is split, and back when it is fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, distribute_tensor
from shoal_mesh import DeviceMesh

from .._torch import split_sizes
from ..errors import LayoutError, TiedWeightError
from ..sharding.heads import Heads
from ..sharding.module_sharding import FusedBlocks
from .parameter_state import carry_over, has_hooks

__all__ = ["block_rows", "check_blocks", "fuse_blocks", "make_adjacent", "split_blocks"]


def _fused_names(fused: FusedBlocks) -> tuple[str, str]:
    """Names of the fused weight and bias."""
    return f"{fused.prefix}weight", f"{fused.prefix}bias"


def _block_name(kind: str, block: str) -> str:
    return f"{kind}_{block}" if block else kind


def _rows_first(tensor: Tensor, fused: FusedBlocks) -> Tensor:
    return tensor.t() if fused.transposed and tensor.ndim == 2 else tensor


def _rows(tensor: Tensor, fused: FusedBlocks) -> Iterator[tuple[str, Heads, Tensor]]:
    """Name, heads and rows of each block of a fused tensor."""
    start, rows = 0, _rows_first(tensor, fused)
    for name, heads in fused.blocks.items():
        yield name, heads, rows.narrow(0, start, heads.features)
        start += heads.features


def block_rows(fused: FusedBlocks) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Parameter of each block -> (fused name, its first row in the fused parameter, rows of the fused parameter)."""
    for kind in _fused_names(fused):
        start = 0
        for name, heads in fused.blocks.items():
            yield _block_name(kind, name), (kind, start, fused.features)
            start += heads.features


def make_adjacent(module: nn.Module, fused: FusedBlocks) -> None:
    """Put the local shards of a module's blocks into one buffer again, where they have been replaced."""
    for kind in _fused_names(fused):
        params: list[Any] = [module._parameters[_block_name(kind, name)] for name in fused.blocks]
        if len(params) > 1 and all(isinstance(param, DTensor) for param in params):
            for param, shard in zip(params, _adjacent([param.detach() for param in params]), strict=True):
                param.data = shard


def check_blocks(module: nn.Module, style: str, fused: FusedBlocks) -> None:
    """Refuse what cannot be split into blocks, before anything is changed.

    Raises:
        TiedWeightError: if a fused parameter is a DTensor already.
        LayoutError: if it has gradient hooks, which would have to see all blocks at once.
    """
    for kind in _fused_names(fused):
        param: Tensor | None = module._parameters.get(kind)
        if isinstance(param, DTensor):
            raise TiedWeightError(f"{style}: the fused parameter {kind!r} is a DTensor already; it cannot be split")
        if param is not None and "" not in fused.blocks and has_hooks(param):
            raise LayoutError(
                f"{style}: the fused parameter {kind!r} has gradient hooks, and becomes one parameter for each of "
                f"{list(fused.blocks)}; remove the hooks, and register them on those afterwards"
            )


def split_blocks(module: nn.Module, fused: FusedBlocks, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replace the fused parameters of a module by one DTensor parameter per block."""
    for kind in _fused_names(fused):
        param = module._parameters.get(kind)
        if param is None:
            for block in fused.blocks:
                module.register_parameter(_block_name(kind, block), None)
            continue
        full = param.detach()
        if src_data_rank is not None:
            # One broadcast of the fused parameter; then every rank takes its shards, also of heads that ranks share.
            full = distribute_tensor(full, mesh, (Replicate(),), src_data_rank=src_data_rank).to_local()
        shards = [_shard(rows, heads, mesh) for _, heads, rows in _rows(full, fused)]
        module._parameters[kind] = None
        for block, shard in zip(fused.blocks, _adjacent(shards), strict=True):
            replacement = nn.Parameter(shard, requires_grad=param.requires_grad)
            carry_over(param, replacement)
            module.register_parameter(_block_name(kind, block), replacement)
    if "" not in fused.blocks:
        module.register_load_state_dict_pre_hook(_SplitOnLoad(fused, mesh))  # type: ignore[no-untyped-call]  # torch


def _shard(rows: Tensor, heads: Heads, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(rows.contiguous(), heads.mesh(mesh), heads.placements(mesh), src_data_rank=None)


def _adjacent(tensors: list[DTensor]) -> list[DTensor]:
    """The same DTensors, their local shards adjacent in one buffer."""
    local = [tensor.to_local() for tensor in tensors]
    shards = split_sizes(torch.cat(local), [shard.shape[0] for shard in local])
    return [DTensor(shard, tensor.spec) for shard, tensor in zip(shards, tensors, strict=True)]


@dataclass(frozen=True, slots=True)
class _SplitOnLoad:
    """Before loading: a fused entry of the state dict becomes the entries of the blocks."""

    fused: FusedBlocks
    mesh: DeviceMesh

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for kind in _fused_names(self.fused):
            full = state_dict.get(prefix + kind)
            if full is None or module._parameters.get(kind) is not None:
                continue
            del state_dict[prefix + kind]
            with torch.no_grad():
                plain = _full(full)  # also a DTensor, as a checkpoint of another plan has it
            for block, heads, rows in _rows(plain, self.fused):
                state_dict[prefix + _block_name(kind, block)] = _shard(rows, heads, self.mesh)


def fuse_blocks(module: nn.Module, fused: FusedBlocks) -> None:
    """The fused plain parameters again, in place of those of the blocks."""
    if "" in fused.blocks:
        return
    for kind in _fused_names(fused):
        params = [module._parameters.pop(_block_name(kind, block)) for block in fused.blocks]
        present = [param for param in params if param is not None]
        if not present:
            continue
        with torch.no_grad():
            rows = torch.cat([_full(param) for param in present])
            plain = nn.Parameter(_rows_first(rows, fused).contiguous(), requires_grad=present[0].requires_grad)
            grads = [param.grad for param in present if param.grad is not None]
            if len(grads) == len(present):
                plain.grad = _rows_first(torch.cat([_full(grad) for grad in grads]), fused).contiguous()
        carry_over(present[0], plain)
        module._parameters[kind] = plain


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
