"""Fused and head-cut column-wise products: several parameter blocks, one local matrix.

x: R | S(d) -> y: S(-1) block by block.  The blocks' local parts are read as one matrix where they lie side by
side in memory, and joined by a copy where something (a dtype change, a fresh load) has moved them apart.
Where ranks share heads, the gradient of the shared block is summed over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor
from shoal_mesh import Comm

from .._torch import is_compiling, pieces
from ..sharding import Heads
from .enter import enter
from .forward import Lowered
from .gradients import SKIP, course, first_order_only, settle
from .ports import arrive_whole
from .regions import add_up

__all__ = ["Blocks", "PackedColumn", "joined"]


def joined(parts: list[Tensor]) -> Tensor:
    """The parts along dim 0 as one tensor: a view of their common buffer if they lie side by side, else a copy."""
    if len(parts) == 1:
        return parts[0]
    end = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.untyped_storage().data_ptr() != storage:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    rows = sum(part.shape[0] for part in parts)
    first = parts[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class _Join(Function):
    """Parameters: DTensors -> one local matrix.  Backward: its rows as DTensor gradients, summed over sharing ranks."""

    @staticmethod
    def forward(ctx: Any, comms: tuple[Comm | None, ...], *params: DTensor) -> Tensor:
        ctx.comms, ctx.params = comms, params
        ctx.specs = tuple(param._spec for param in params)
        parts = [param._local_tensor for param in params]
        ctx.rows = [part.shape[0] for part in parts]
        whole = joined(parts)
        return whole.detach() if len(parts) == 1 else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        parts = pieces(grad, ctx.rows)
        grads: list[DTensor | None] = []
        for part, param, spec, comm, (node, _) in zip(
            parts, ctx.params, ctx.specs, ctx.comms, ctx.next_functions, strict=True
        ):
            how = SKIP if node is None else course(node, param)
            own: Any = None
            if how != SKIP:
                (own,) = add_up([part.contiguous()], comm)
            grads.append(None if own is None else settle(how, param, spec, own))
        return (None, *grads)


@dataclass(frozen=True, slots=True)
class _Block:
    name: str
    comm: Comm | None


class Blocks(Lowered):
    """Base of the stand-ins for fused modules: their parameters, joined."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        named: Any = self.sharding.options["blocks"]
        self.blocks = [_Block(name, self._sharing(heads)) for name, heads in named.items()]

    def _sharing(self, heads: Heads) -> Comm | None:
        """The ranks that hold the same heads as this one."""
        shared = heads.mesh(self.mesh)
        return None if shared.ndim == 1 else shared.comm(1)

    def join(self, kind: str) -> Tensor | None:
        """The local matrix (or bias) of all blocks."""
        params = [self.params[f"{kind}_{block.name}" if block.name else kind] for block in self.blocks]
        if params[0] is None:
            return None
        if is_compiling():
            parts = [enter({kind: p}, b.comm)[kind] for b, p in zip(self.blocks, params, strict=True)]
            return torch.cat([part for part in parts if part is not None])
        if not torch.is_grad_enabled():
            return joined([param._local_tensor for param in params])
        out: Tensor = _Join.apply(tuple(block.comm for block in self.blocks), *params)  # type: ignore[no-untyped-call] # torch
        return out


class PackedColumn(Blocks):
    """Stand-in for a fused Linear, or one whose heads are shared by ranks."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        input = arrive_whole(self, input)
        weight = self.join("weight")
        assert weight is not None, "a Linear has a weight"
        return linear(input, weight, self.join("bias"))
