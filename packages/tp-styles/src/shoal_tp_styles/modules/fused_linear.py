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

from shoal_dtensor import DTensor
from shoal_dtensor.internal import first_order_only, grad_route, is_compiling, local_shard, shard_sizes
from shoal_mesh import Comm
from shoal_mesh.internal import dataclass

from .._torch import split_sizes
from ..lowering.collective_functions import sum_over_ranks
from ..lowering.lowered import Lowered
from ..lowering.parameters import deliver_grad
from ..lowering.ports import declare_replicated_input, replicated_input
from ..sharding.collective import Collective
from ..sharding.heads import Heads, HeadShard
from ..sharding.module_sharding import FusedBlocks, ModuleCall


def _concatenated(shards: list[Tensor]) -> Tensor:
    """The shards along dim 0 as one tensor: a view of their common buffer if they are adjacent, else a copy."""
    if len(shards) == 1:
        return shards[0]
    end = shards[0].data_ptr()
    storage = shards[0].untyped_storage().data_ptr()
    for shard in shards:
        if shard.data_ptr() != end or not shard.is_contiguous() or shard.untyped_storage().data_ptr() != storage:
            return torch.cat(shards)
        end += shard.numel() * shard.element_size()
    rows = sum(shard.shape[0] for shard in shards)
    first = shards[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class _Concatenate(Function):
    """Parameters: DTensors -> one local matrix.  Backward: its rows as DTensor gradients, summed over replicas."""

    @staticmethod
    def forward(ctx: Any, comms: tuple[Comm | None, ...], *params: DTensor) -> Tensor:
        ctx.comms, ctx.params = comms, params
        ctx.specs = tuple(param.spec for param in params)
        shards = [local_shard(param) for param in params]
        ctx.rows = [shard.shape[0] for shard in shards]
        matrix = _concatenated(shards)
        return matrix.detach() if len(shards) == 1 else matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        grads: list[DTensor | None] = []
        for rows, param, spec, comm, (node, _) in zip(
            split_sizes(grad, ctx.rows), ctx.params, ctx.specs, ctx.comms, ctx.next_functions, strict=True
        ):
            route = "unused" if node is None else grad_route(node, param)
            summed: Any = None
            if route != "unused":
                (summed,) = sum_over_ranks([rows.contiguous()], comm)
            grads.append(None if summed is None else deliver_grad(route, param, spec, summed))
        return (None, *grads)


@dataclass(frozen=True, slots=True)
class _Block:
    name: str
    comm: Comm | None


class FusedLowering(Lowered):
    """Base of the lowerings of fused modules: their parameters, concatenated."""

    __slots__ = ("blocks", "columns")

    def resolve(self) -> None:
        fused = self.sharding.options_of(FusedBlocks)
        self.blocks: list[_Block] = [_Block("", None)]  # all of them in one parameter
        if fused.splits(self.comm.size):
            self.blocks = [_Block(name, self._replicas(heads)) for name, heads in fused.blocks.items()]
        self.columns: str = fused.names[0] if fused.transposed and not fused.splits(self.comm.size) else ""

    def _replicas(self, heads: Heads) -> Comm | None:
        """The ranks that hold the same head as this one."""
        mesh = heads.mesh(self.mesh)
        return None if mesh.ndim == 1 else mesh.comm(1)

    def concatenate(self, kind: str) -> Tensor | None:
        """The local matrix (or bias) of all blocks, as rows."""
        matrix = self._concatenated(kind)
        return matrix.t() if matrix is not None and kind == self.columns else matrix

    def _concatenated(self, kind: str) -> Tensor | None:
        names = [f"{kind}_{block.name}" if block.name else kind for block in self.blocks]
        if is_compiling():
            locals_ = [self.local(name, comm=b.comm)[name] for b, name in zip(self.blocks, names, strict=True)]
            shards = [shard for shard in locals_ if shard is not None]
            return torch.cat(shards) if shards else None
        params = [self.parameter(name) for name in names]
        if params[0] is None:
            return None
        if not torch.is_grad_enabled():
            return _concatenated([local_shard(param) for param in params])
        out: Tensor = _Concatenate.apply(tuple(block.comm for block in self.blocks), *params)  # type: ignore[no-untyped-call] # torch
        return out

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
