"""Fused and head-sharded column-wise products: several parameter blocks, one local matrix.

x: R | S(d) -> y: S(-1) block by block.  The blocks' local shards are read as one matrix where they are adjacent in
memory, and concatenated by a copy where something (a dtype change, a fresh load) has moved them apart.  Where ranks
hold the same head, the gradient of its block is summed over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor.internal import is_compiling, shard_sizes
from shoal_mesh import Comm

from .._torch import apply, split_sizes
from ..lowering.lowered import Lowered
from ..lowering.ports import declare_replicated_input, replicated_input
from ..sharding.dim_shards import HeadShard
from ..sharding.module_sharding import Collective, FusedBlocks, ModuleCall


class _Concatenate(Function):
    """Local shards -> one matrix along dim 0: a view of their common buffer if they are adjacent, else a copy.

    Backward: the rows of each.
    """

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> Tensor:
        ctx.rows = [shard.shape[0] for shard in shards]
        first = shards[0]
        end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
        for shard in shards:
            if shard.data_ptr() != end or not shard.is_contiguous() or shard.untyped_storage().data_ptr() != storage:
                return torch.cat(shards)
            end += shard.numel() * shard.element_size()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(split_sizes(grad, ctx.rows))


class FusedLowering(Lowered):
    """Base of the lowerings of fused modules: their parameters, concatenated."""

    __slots__ = ("blocks", "columns")

    def resolve(self) -> None:
        fused = self.sharding.options_of(FusedBlocks)
        # Name of each block that is a parameter of its own -> the ranks that hold the same heads as this one.
        self.blocks: dict[str, Comm | None] = {"": None}  # all blocks in one parameter
        if fused.splits(self.comm.size):
            meshes = {name: heads.mesh(self.mesh) for name, heads in fused.blocks.items()}
            self.blocks = {name: mesh.comm(1) if mesh.ndim > 1 else None for name, mesh in meshes.items()}
        self.columns: str = fused.names[0] if fused.transposed and not fused.splits(self.comm.size) else ""

    def concatenate(self, kind: str) -> Tensor | None:
        """The local matrix (or bias) of all blocks, as rows."""
        comms = {f"{kind}_{block}" if block else kind: comm for block, comm in self.blocks.items()}
        local = self.local(*(name for name, comm in comms.items() if comm is None))
        for name, comm in comms.items():
            if comm is not None:
                local |= self.local(name, comm=comm)
        shards = [shard for name in comms if (shard := local[name]) is not None]
        if not shards:
            return None
        matrix = shards[0]
        if len(shards) > 1:
            matrix = torch.cat(shards) if is_compiling() else apply(_Concatenate, *shards)
        return matrix.t() if kind == self.columns else matrix

    @staticmethod
    def replicated_heads(call: ModuleCall) -> Iterator[Collective]:
        """The all-reduces of gradients of heads that several ranks hold: one per block and parameter."""
        fused = call.sharding.options_of(FusedBlocks)
        for param in call.trained(f"{fused.prefix}weight", f"{fused.prefix}bias"):
            for heads in fused.blocks.values():
                if heads.replicated(call.ranks):
                    nbytes = param.numel() * param.element_size() // fused.features * heads.size
                    yield Collective("all_reduce", nbytes, backward=True, ranks=call.ranks // heads.count)


class FusedColumn(FusedLowering):
    """A fused Linear, or one whose heads are held by several ranks."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_replicated_input(call)
        yield from cls.replicated_heads(call)

    def output_blocks(self) -> Sequence[Sequence[int]]:
        fused, ranks = self.sharding.options_of(FusedBlocks), self.comm.size
        if any(heads.replicated(ranks) for heads in fused.blocks.values()):
            return ()
        return [shard_sizes(h.features, HeadShard(0, h).on(ranks), ranks) for h in fused.blocks.values()]

    def __call__(self, input: Tensor) -> Tensor:
        input = replicated_input(self, input)
        weight = self.concatenate("weight")
        assert weight is not None, "a Linear has a weight"
        return linear(input, weight, self.concatenate("bias"))
