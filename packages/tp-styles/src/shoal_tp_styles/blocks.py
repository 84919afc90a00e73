"""Fused parameters as one DTensor per block, and fused again.

`weight` becomes `weight_<block>` (and `bias` likewise); the local parts lie side by side in one buffer.  Blocks are
rows: a fused weight that lies as (in, out) is turned when it is split, and back when it is fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, distribute_tensor
from shoal_mesh import DeviceMesh

from ._torch import pieces
from .errors import TiedWeightError
from .sharding import Heads, ModuleSharding

__all__ = ["block_rows", "fuse_blocks", "is_turned", "lay_side_by_side", "split_blocks"]


def _blocks(sharding: ModuleSharding) -> Mapping[str, Heads]:
    blocks: Any = sharding.options["blocks"]
    found: Mapping[str, Heads] = blocks
    return found


def fused_names(sharding: ModuleSharding) -> tuple[str, str]:
    """Names of the fused weight and bias."""
    prefix = str(sharding.options.get("fused", ""))
    return f"{prefix}weight", f"{prefix}bias"


def _name(kind: str, block: str) -> str:
    return f"{kind}_{block}" if block else kind


def is_turned(sharding: ModuleSharding) -> bool:
    """Whether the fused weight lies as (in, out), its blocks as (out, in)."""
    return bool(sharding.options.get("transposed"))


def _turned(tensor: Tensor, turn: bool) -> Tensor:
    return tensor.t() if turn and tensor.ndim == 2 else tensor


def _rows(whole: Tensor, blocks: Mapping[str, Heads]) -> Iterator[tuple[str, Heads, Tensor]]:
    start = 0
    for name, heads in blocks.items():
        yield name, heads, whole.narrow(0, start, heads.features)
        start += heads.features


def block_rows(sharding: ModuleSharding) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Parameter of each block -> (fused name, its first row in the fused whole, rows of the whole)."""
    blocks = _blocks(sharding)
    total = sum(heads.features for heads in blocks.values())
    for kind in fused_names(sharding):
        start = 0
        for name, heads in blocks.items():
            yield _name(kind, name), (kind, start, total)
            start += heads.features


def lay_side_by_side(module: nn.Module, sharding: ModuleSharding) -> None:
    """Put the local parts of a module's blocks into one buffer again, where they have been replaced."""
    names = list(_blocks(sharding))
    for kind in fused_names(sharding):
        params: list[Any] = [module._parameters[_name(kind, name)] for name in names]
        if len(params) > 1 and all(isinstance(param, DTensor) for param in params):
            for param, part in zip(params, _side_by_side([param.detach() for param in params]), strict=True):
                param.data = part


def split_blocks(module: nn.Module, sharding: ModuleSharding, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replace the fused parameters of a module by one DTensor parameter per block.

    Raises:
        TiedWeightError: if a parameter is a DTensor already.
    """
    blocks = _blocks(sharding)
    for kind in fused_names(sharding):
        param = module._parameters.get(kind)
        if isinstance(param, DTensor):
            raise TiedWeightError(
                f"{sharding.kind}: the fused parameter {kind!r} is a DTensor already; it cannot be split again"
            )
        if param is None:
            for block in blocks:
                module.register_parameter(_name(kind, block), None)
            continue
        whole = param.detach()
        if src_data_rank is not None:
            # One broadcast of the whole, then every rank cuts its pieces, also of heads that ranks share.
            whole = distribute_tensor(whole, mesh, (Replicate(),), src_data_rank=src_data_rank).to_local()
        parts = [_part(rows, heads, mesh) for _, heads, rows in _rows(_turned(whole, is_turned(sharding)), blocks)]
        module._parameters[kind] = None
        for block, part in zip(blocks, _side_by_side(parts), strict=True):
            module.register_parameter(_name(kind, block), nn.Parameter(part, requires_grad=param.requires_grad))
    if "" not in blocks:
        module.register_load_state_dict_pre_hook(_SplitOnLoad(blocks, mesh, fused_names(sharding), is_turned(sharding)))  # type: ignore[no-untyped-call]  # torch


def _part(rows: Tensor, heads: Heads, mesh: DeviceMesh) -> DTensor:
    its_mesh = heads.mesh(mesh)
    return distribute_tensor(rows.contiguous(), its_mesh, heads.placements(mesh), src_data_rank=None)


def _side_by_side(parts: list[DTensor]) -> list[DTensor]:
    """The same DTensors, their local parts pieces of one buffer."""
    local = [part.to_local() for part in parts]
    buffer = torch.cat(local)
    parted = pieces(buffer, [piece.shape[0] for piece in local])
    return [DTensor(piece, part._spec) for piece, part in zip(parted, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class _SplitOnLoad:
    """Before loading: a whole fused entry of the state dict becomes the entries of the blocks."""

    blocks: Mapping[str, Heads]
    mesh: DeviceMesh
    fused: tuple[str, str]
    turn: bool

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for kind in self.fused:
            whole = state_dict.get(prefix + kind)
            if whole is None or module._parameters.get(kind) is not None:
                continue
            del state_dict[prefix + kind]
            for block, heads, rows in _rows(_turned(whole, self.turn), self.blocks):
                state_dict[prefix + _name(kind, block)] = _part(rows, heads, self.mesh)


def fuse_blocks(module: nn.Module, sharding: ModuleSharding) -> None:
    """The fused plain parameters again, in place of those of the blocks."""
    blocks = _blocks(sharding)
    if "" in blocks:
        return
    for kind in fused_names(sharding):
        parts = [module._parameters.pop(_name(kind, block)) for block in blocks]
        present = [part for part in parts if part is not None]
        if not present:
            continue
        with torch.no_grad():
            whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in present]
            turn = is_turned(sharding)
            fused = nn.Parameter(_turned(torch.cat(whole), turn).contiguous(), requires_grad=present[0].requires_grad)
            grads = [part.grad for part in present if part.grad is not None]
            if len(grads) == len(present):
                rows = torch.cat([grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads])
                fused.grad = _turned(rows, turn).contiguous()
        module._parameters[kind] = fused
