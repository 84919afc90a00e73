"""Sharded data parallelism by hand for a stack of blocks: plain tensors and c10d.

Every block has one flat tensor, of which each rank keeps a shard. The next block's is gathered
while a block computes, and freed after the block's forward and its backward. Gradients are reduced
while the block before computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Flat:
    """The parameters of a block as a shard of one flat tensor."""

    def __init__(self, block: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.sites = [
            (m, key) for m in block.modules() for key, p in m._parameters.items() if p is not None
        ]
        params = [module._parameters[key] for module, key in self.sites]
        flat = torch.cat([param.detach().flatten() for param in params])
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % self.ranks)])
        self.shard = nn.Parameter(flat.chunk(self.ranks)[dist.get_rank(group)].clone())
        self.full = torch.empty_like(flat)
        ends = [0]
        for param in params:
            ends.append(ends[-1] + param.numel())
        self.views = [
            self.full[a:b].view(p.shape) for a, b, p in zip(ends, ends[1:], params, strict=False)
        ]
        self.work: Any = None
        self.here = True
        self.reduced: tuple[Any, Tensor] | None = None
        self.free()

    def free(self) -> None:
        """Give the gathered memory back."""
        self.full.untyped_storage().resize_(0)
        self.here = False

    def start(self) -> None:
        """Start to gather."""
        if self.here or self.work is not None:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        # `.data`: the forward used equal values, so autograd shall not count a write.
        self.work = dist.all_gather_single(
            self.full.data, self.shard.detach(), group=self.group, async_op=True
        )

    def gather(self) -> None:
        """Finish gathering."""
        self.start()
        if self.work is not None:
            self.work.wait()
            self.work, self.here = None, True

    def reduce(self, grads: tuple[Tensor, ...]) -> None:
        """Free, and start to reduce the gradients."""
        self.free()
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        flat = (
            torch.cat([flat, flat.new_zeros(len(self.shard) * self.ranks - len(flat))])
            if len(flat) % self.ranks
            else flat
        )
        out = torch.empty_like(self.shard)
        self.reduced = dist.reduce_scatter_single(out, flat, group=self.group, async_op=True), out

    def finish(self) -> None:
        """Put the mean where the optimizer looks for it."""
        if self.reduced is not None:
            (work, out), self.reduced = self.reduced, None
            work.wait()
            self.shard.grad = out.div_(self.ranks)


class _Use(torch.autograd.Function):
    """Shard -> the block's parameters; backward: their gradients are reduced."""

    @staticmethod
    def forward(ctx: Any, flat: Flat, shard: Tensor) -> tuple[Tensor, ...]:
        ctx.flat = flat
        return tuple(view.detach() for view in flat.views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.flat.model.reduce(ctx.flat, grads)
        return None, None


class HandSharded(nn.Module):
    """A stack of blocks, each gathered before its forward and its backward."""

    def __init__(self, blocks: nn.Sequential, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.flats = [Flat(block, group) for block in blocks]
        # not registered: their parameters are views
        self.blocks = list(blocks)
        self.shards = nn.ParameterList([flat.shard for flat in self.flats])
        self.reducing: Flat | None = None
        for flat in self.flats:
            flat.model = self  # type: ignore[attr-defined]  # where gradients are reported

    def forward(self, x: Tensor) -> Tensor:
        """The blocks, one after the other."""
        for i, (block, flat) in enumerate(zip(self.blocks, self.flats, strict=True)):
            flat.gather()
            if i + 1 < len(self.flats):
                self.flats[i + 1].start()
            for (module, key), view in zip(flat.sites, _Use.apply(flat, flat.shard), strict=True):
                module._parameters[key] = view
            x = block(x)
            node: Any = x.grad_fn
            node.register_prehook(lambda _, i=i: self.before_backward(i))
            flat.free()
        return x

    def before_backward(self, i: int) -> None:
        """Gather a block again, and start with the one whose backward is next."""
        self.flats[i].gather()
        if i:
            self.flats[i - 1].start()

    def reduce(self, flat: Flat, grads: tuple[Tensor, ...]) -> None:
        """Reduce the gradients of a block; the previous block's have arrived meanwhile."""
        if self.reducing is not None:
            self.reducing.finish()
        flat.reduce(grads)
        self.reducing = flat

    def finish(self) -> None:
        """After backward."""
        if self.reducing is not None:
            self.reducing.finish()
            self.reducing = None
