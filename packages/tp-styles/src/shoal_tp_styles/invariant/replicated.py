"""Modules with replicated parameters: gradients are sums over samples and over blocks of a dim that may be sharded.

A norm reads x: (B, S, D) or, under sequence parallelism, (B, S / ranks, D). Either way it runs once for each sample and
each of the blocks of S, and its gradient is the tree over blocks, then over ranks, then over samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import DTensor
from shoal_mesh import Comm, all_reduce, tree_sum

from .._torch import apply
from ..lowering.boundary import from_local, local_input
from ..lowering.lowered import Lowered
from ..lowering.parameters import first_order_only
from ..modules.norm import Tokenwise
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall
from .block_sums import entered

__all__ = ["InvariantTokenwise", "InvariantTokenwiseWhole", "add_bias"]

SEQUENCE_DIM = 1
"""The dim that is divided into blocks where nothing is sharded: the default of SequenceParallel."""


class _Cells(Function):
    """A parameter, for each of `samples` x `blocks` cells; the gradients of the cells are summed, over ranks too."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, comm: Comm | None, samples: int, blocks: int) -> tuple[Tensor, ...]:
        ctx.comm, ctx.blocks = comm, blocks
        return tuple(parameter.detach() for _ in range(samples * blocks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_order_only()
        return _sum_of_cells(grads, ctx.comm, ctx.blocks), None, None, None


class _PlusBias(Function):
    """x + bias, whose gradient is summed as those of `_Cells`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, comm: Comm | None, dim: int, blocks: int) -> Tensor:
        ctx.sums = comm, dim, blocks, bias.dtype
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        comm, dim, blocks, dtype = ctx.sums
        cells = [
            part.reshape(-1, part.shape[-1]).contiguous().sum(0) for s in grad for part in s.chunk(blocks, dim - 1)
        ]
        return grad, _sum_of_cells(cells, comm, blocks).to(dtype), None, None, None


def _sum_of_cells(cells: Sequence[Tensor], comm: Comm | None, blocks: int) -> Tensor:
    """The tree over the blocks of each sample, then over ranks, then over samples; cells of a sample come together."""
    of_samples = tree_sum(torch.stack([*cells]).view(-1, blocks, *cells[0].shape).transpose(0, 1))
    return tree_sum(of_samples if comm is None else all_reduce(of_samples, comm))


def add_bias(lowered: Lowered, out: Tensor) -> Tensor:
    """The output of a row-wise layer plus its replicated bias."""
    bias = lowered.local("bias")["bias"]
    if bias is None:
        return out
    local = out.to_local(grad_placements=out.placements) if isinstance(out, DTensor) else out
    dim, comm, blocks = _cut(lowered, local)
    plus: Tensor = apply(_PlusBias, local, bias.to(local.dtype), comm, dim, blocks)
    return from_local(plus, out.placements[0], lowered.mesh, out.shape) if isinstance(out, DTensor) else plus


def _cut(lowered: Lowered, local: Tensor) -> tuple[int, Comm | None, int]:
    """Which dim of an activation is divided, over which ranks it is sharded, and how many of the blocks are here."""
    arithmetic, layout = entered(), lowered.port_out.desired
    dim = getattr(layout, "dim", SEQUENCE_DIM)
    dim = dim + local.ndim if dim < 0 else dim
    if not layout.is_replicate():
        what = f"{lowered.sharding.style}: dim {dim} of the activation"
        return dim, lowered.comm, arithmetic.own_blocks(lowered.comm.size, local.shape[dim] * lowered.comm.size, what)
    if local.ndim < 3 or local.shape[dim] % arithmetic.blocks:  # nothing that could be sharded
        return dim, None, 1
    return dim, None, arithmetic.blocks


def _in_cells(lowered: Tokenwise, x: Tensor) -> Tensor:
    """The module's forward, cell by cell."""
    dim, comm, blocks = _cut(lowered, x)
    names = [name for name, param in lowered.params.items() if param is not None]
    local: Any = lowered.local(*names) if names else {}
    cells = [
        cell for sample in x.chunk(x.shape[0]) for cell in (sample.chunk(blocks, dim) if blocks > 1 else (sample,))
    ]
    copies = {name: apply(_Cells, local[name], comm, x.shape[0], blocks) for name in names}
    absent = dict.fromkeys(lowered.params.keys() - names)
    outs = [
        lowered.compute(lowered.module, cell.contiguous(), {name: copies[name][i] for name in names} | absent)
        for i, cell in enumerate(cells)
    ]
    rows = [torch.cat(outs[i : i + blocks], dim) for i in range(0, len(outs), blocks)] if blocks > 1 else outs
    return torch.cat(rows)


class InvariantTokenwise(Tokenwise):
    """A norm on this rank's shard of the sequence, in cells."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        shape = tuple(input.shape) if isinstance(input, DTensor) else None
        x = local_input(input, self.port_in, self.mesh, grad=self.port_in.desired) if shape else input
        self.check_dim(x)
        out = _in_cells(self, x) if x.numel() else self.compute(self.module, x, self.local(*self.params))
        return out if self.sharding.local_outputs else from_local(out, self.port_in.desired, self.mesh, shape)


class InvariantTokenwiseWhole(Tokenwise):
    """A norm that no style shards, in cells."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from ()

    def __call__(self, input: Tensor) -> Tensor:
        return _in_cells(self, input)
