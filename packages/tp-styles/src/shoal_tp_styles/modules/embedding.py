"""Embedding tables and bags sharded along the vocabulary (rows) or along the features (columns).

columns   tokens: R -> y: S(-1)          no communication in either direction; any bag mode
rows      tokens: R -> y: R | S(d)       every rank looks up its own tokens, zeros elsewhere; then their sum
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import first_order_only, grad_route, is_compiling, local_shard, selectively_checkpointed

from .._torch import apply
from ..lowering.boundary import local_input, port_moves
from ..lowering.collective_functions import gather_dim, sharded_dim
from ..lowering.lowered import Lowered
from ..lowering.parameters import deliver_grad
from ..lowering.ports import declare_partial_output, declare_sharded_output, partial_output, sharded_output
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall, ModuleSharding, Port


def _check_table(module: nn.Module, sharding: ModuleSharding) -> None:
    """Refuse what a sharded table cannot do."""
    if getattr(module, "max_norm", None) is not None:
        raise UnsupportedModuleError(
            f"{sharding.style}: {module} renormalises rows in place (max_norm); that is not sharded"
        )
    if getattr(module, "sparse", False):
        raise UnsupportedModuleError(f"{sharding.style}: {module} has sparse gradients, which DTensors do not hold")


def replicated_tokens(lowered: Lowered, tokens: Tensor, port: Port | None = None) -> Tensor:
    """`R | S(d) -> R`: token indices, which have no gradient."""
    port = port or lowered.port_in
    if not isinstance(tokens, DTensor):
        if port.layout == port.desired:
            return tokens
        where = sharded_dim(port.layout, lowered.comm)
        if where is not None:
            gathered: Tensor = gather_dim(tokens.contiguous(), *where)
            return gathered
    return local_input(tokens, port, lowered.mesh, grad=Replicate())


class ColumnEmbedding(Lowered):
    """An embedding whose features are sharded."""

    __slots__ = ()

    def resolve(self) -> None:
        _check_table(self.module, self.sharding)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from port_moves(call.sharding.input_port(), call.input())
        yield from declare_sharded_output(call)

    def __call__(self, input: Tensor) -> Tensor:
        tokens = replicated_tokens(self, input)
        module: Any = self.module
        weight: Any = self.local("weight")["weight"]
        out = functional.embedding(tokens, weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq)
        return self.finish(out)

    def finish(self, out: Tensor) -> Tensor:
        """The output in the layout that leaves the module."""
        spec = self.spec("weight")
        return sharded_output(self, out, out.ndim - 1, spec.shape[1], spec.sizes(1))


class _OwnRows(Function):
    """tokens: R, W: S(0) -> y: P.  Rows of other ranks are zero."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: DTensor, first: int, padding: int | None, scale: bool) -> Tensor:
        table = local_shard(weight)
        rows = table.shape[0]
        own = tokens - first
        # Tokens of other ranks point to the row behind the last one, which exists in the gradient only.
        own = torch.where((own >= 0) & (own < rows), own, rows)
        ctx.save_for_backward(own)
        ctx.weight = weight
        ctx.table = weight.spec, rows, -1 if padding is None else padding - first, scale
        outside = (own == rows).unsqueeze(-1)
        if rows == 0:
            return table.new_zeros((*tokens.shape, table.shape[1]))
        looked_up = functional.embedding(own.clamp(max=rows - 1), table)
        # Selective checkpointing may have saved the rows: then they are not written to.
        return looked_up.masked_fill(outside, 0) if selectively_checkpointed() else looked_up.masked_fill_(outside, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (own,) = ctx.saved_tensors
        spec, rows, padding, scale = ctx.table
        route = grad_route(ctx.next_functions[1][0], ctx.weight)
        if route == "unused":
            return None, None, None, None, None
        if not 0 <= padding < rows:
            padding = -1
        dense = torch.ops.aten.embedding_dense_backward(grad.contiguous(), own, rows + 1, padding, scale)[:rows]
        return None, deliver_grad(route, ctx.weight, spec, dense), None, None, None


class RowEmbedding(Lowered):
    """An embedding whose vocabulary is sharded."""

    __slots__ = ()

    def resolve(self) -> None:
        _check_table(self.module, self.sharding)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from port_moves(call.sharding.input_port(), call.input())
        yield from declare_partial_output(call)

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        tokens = replicated_tokens(self, input)
        weight = self.parameter("weight")
        first = self.spec("weight").offset(0)
        if is_compiling():
            return partial_output(self, self.traced(tokens, first), None)
        partial: Tensor = apply(_OwnRows, tokens, weight, first, module.padding_idx, module.scale_grad_by_freq)
        return partial_output(self, partial, None)

    def traced(self, tokens: Tensor, first: int) -> Tensor:
        """The rank's summand in terms that torch.compile follows: a row of zeros stands for the other ranks' tokens."""
        module: Any = self.module
        weight: Any = self.local("weight")["weight"]
        rows = weight.shape[0]
        own = tokens - first
        own = torch.where((own >= 0) & (own < rows), own, rows)
        padding = None if module.padding_idx is None else module.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        return functional.embedding(own, table, padding, None, 2.0, module.scale_grad_by_freq)


def _bag_inputs(lowered: Lowered, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens and offsets, replicated."""
    tokens = replicated_tokens(lowered, input)
    replicated = Port(Replicate(), Replicate())
    return tokens, None if offsets is None else replicated_tokens(lowered, offsets, replicated)


class ColumnEmbeddingBag(ColumnEmbedding):
    """An embedding bag whose features are sharded; every mode works, since bags are local."""

    __slots__ = ()

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        module: Any = self.module
        tokens, starts = _bag_inputs(self, input, offsets)
        weight: Any = self.local("weight")["weight"]
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise UnsupportedModuleError(
                "ColwiseParallel: an EmbeddingBag returns no gradient of per_sample_weights; detach them"
            )
        out = functional.embedding_bag(
            tokens,
            weight,
            starts,
            scale_grad_by_freq=module.scale_grad_by_freq,
            mode=module.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )
        return self.finish(out)


class RowEmbeddingBag(Lowered):
    """An embedding bag whose vocabulary is sharded; sums and means, which are sums over the ranks."""

    __slots__ = ()

    def resolve(self) -> None:
        module: Any = self.module
        _check_table(module, self.sharding)
        if module.mode == "max" or module.scale_grad_by_freq:
            raise UnsupportedModuleError(
                f"RowwiseParallel: {module} is not a sum over the ranks (mode='max', scale_grad_by_freq); "
                "use ColwiseParallel"
            )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from port_moves(call.sharding.input_port(), call.input())
        yield from declare_partial_output(call)

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        module: Any = self.module
        tokens, starts = _bag_inputs(self, input, offsets)
        weight: Any = self.local("weight")["weight"]
        rows, first = weight.shape[0], self.spec("weight").offset(0)
        counted = torch.ones_like(tokens, dtype=weight.dtype)
        if module.padding_idx is not None:
            counted = counted * (tokens != module.padding_idx)
        own = tokens - first
        factor = counted * ((own >= 0) & (own < rows))
        if per_sample_weights is not None:
            factor = factor * per_sample_weights
        # A row of zeros stands for the tokens of other ranks, so a rank may also hold no rows at all.
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        own = torch.where(factor != 0, own, rows)
        bags = {"mode": "sum", "include_last_offset": module.include_last_offset}
        out = functional.embedding_bag(own, table, starts, per_sample_weights=factor, **bags)
        if module.mode == "mean":
            ones = counted.new_ones(1, 1)
            zeros = torch.zeros_like(tokens)
            counts = functional.embedding_bag(zeros, ones, starts, per_sample_weights=counted, **bags)
            out = out / counts.clamp(min=1)
        return partial_output(self, out, None)
