"""Embedding tables cut along the vocabulary (rows) or along the features (columns).

columns   tokens: R -> y: S(-1)          no communication in either direction
rows      tokens: R -> y: R | S(d)       every rank looks up its own tokens, zeros elsewhere; then the sum
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate

from .._torch import apply, is_compiling
from ..errors import UnsupportedModuleError
from ..sharding import ModuleSharding
from .boundary import arrive_local
from .enter import enter
from .forward import Lowered, spec_of
from .gradients import SKIP, course, first_order_only, settle
from .ports import leave_cut, leave_partial
from .regions import axis_dim, gather_blocks

__all__ = ["ColumnEmbedding", "RowEmbedding", "check_table"]


def check_table(module: nn.Module, sharding: ModuleSharding) -> None:
    """Refuse what a table in pieces cannot do."""
    if getattr(module, "max_norm", None) is not None:
        raise UnsupportedModuleError(
            f"{sharding.kind}: {module} renormalises rows in place (max_norm); that is not sharded"
        )
    if getattr(module, "sparse", False):
        raise UnsupportedModuleError(f"{sharding.kind}: {module} has sparse gradients, which DTensors do not hold")


class ColumnEmbedding(Lowered):
    """Stand-in for an embedding whose features are cut."""

    __slots__ = ()

    def resolve(self) -> None:
        check_table(self.module, self.sharding)

    def __call__(self, input: Tensor) -> Tensor:
        port = self.port_in
        if isinstance(input, DTensor):
            input = arrive_local(input, port, self.mesh, grad=Replicate())
        elif port.layout != port.desired:
            input = _tokens(input, port, self)
        return self.finish(self.look_up(input))

    def look_up(self, tokens: Tensor) -> Tensor:
        """The local features of some tokens."""
        module: Any = self.module
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        return functional.embedding(tokens, weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq)

    def finish(self, out: Tensor) -> Tensor:
        """The output in the layout and form that leave the module."""
        spec = spec_of(self.params["weight"], "weight")
        return leave_cut(self, out, out.ndim - 1, spec.shape[1], spec.sizes(1))


def _tokens(tokens: Tensor, port: Any, lowered: Lowered) -> Tensor:
    where = axis_dim(port.layout, lowered.comm)
    if where is None:
        return arrive_local(tokens, port, lowered.mesh, grad=Replicate())
    gathered: Tensor = gather_blocks(tokens.contiguous(), *where)
    return gathered


class _OwnRows(Function):
    """tokens: R, W: S(0) -> y: P.  Rows of other ranks are zero."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: DTensor, first: int, padding: int | None, scale: bool) -> Tensor:
        local = weight._local_tensor
        rows = local.shape[0]
        own = tokens - first
        # Tokens of other ranks point to the row behind the last one, which exists in the gradient only.
        own = torch.where((own >= 0) & (own < rows), own, rows)
        ctx.save_for_backward(own)
        ctx.weight = weight
        ctx.facts = weight._spec, rows, -1 if padding is None else padding - first, scale
        outside = (own == rows).unsqueeze(-1)
        if rows == 0:
            return local.new_zeros((*tokens.shape, local.shape[1]))
        return functional.embedding(own.clamp(max=rows - 1), local).masked_fill_(outside, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (own,) = ctx.saved_tensors
        spec, rows, padding, scale = ctx.facts
        how = course(ctx.next_functions[1][0], ctx.weight)
        if how == SKIP:
            return None, None, None, None, None
        if not 0 <= padding < rows:
            padding = -1
        dense = torch.ops.aten.embedding_dense_backward(grad.contiguous(), own, rows + 1, padding, scale)[:rows]
        return None, settle(how, ctx.weight, spec, dense), None, None, None


class RowEmbedding(Lowered):
    """Stand-in for an embedding whose vocabulary is cut."""

    __slots__ = ()

    def resolve(self) -> None:
        check_table(self.module, self.sharding)

    def __call__(self, input: Tensor) -> Tensor:
        port = self.port_in
        module: Any = self.module
        if isinstance(input, DTensor):
            input = arrive_local(input, port, self.mesh, grad=Replicate())
        elif port.layout != port.desired:
            input = _tokens(input, port, self)
        weight = self.params["weight"]
        first = spec_of(weight, "weight").offset(0)
        if is_compiling():
            return leave_partial(self, self.traced(input, first), None)
        partial: Tensor = apply(_OwnRows, input, weight, first, module.padding_idx, module.scale_grad_by_freq)
        return leave_partial(self, partial, None)

    def traced(self, tokens: Tensor, first: int) -> Tensor:
        """The rank's summand in terms that torch.compile follows: a row of zeros stands for the other ranks' tokens."""
        module: Any = self.module
        weight: Any = enter({"weight": self.params["weight"]})["weight"]
        rows = weight.shape[0]
        own = tokens - first
        own = torch.where((own >= 0) & (own < rows), own, rows)
        padding = None if module.padding_idx is None else module.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        return functional.embedding(own, table, padding, None, 2.0, module.scale_grad_by_freq)
