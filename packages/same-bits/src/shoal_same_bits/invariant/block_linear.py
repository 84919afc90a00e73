"""Linear layers in blocks: each product sees one sample and one block of features, whatever rank it runs on.

With 8 blocks, samples b and blocks j:

    columns   y[b, :, j] = x[b] W[j]^T            dx[b] = tree over j of dy[b, :, j] W[j]
    rows      y[b] = tree over j of x[b, :, j] W[:, j]^T        dx[b, :, j] = dy[b] W[:, j]
    both      dW[j] = tree over b of the sample's product

The upper part of the trees over j are the collectives of `ports`, those of the trees over b the
reduction over data axes. Readers of one activation (q, k and v) add their products in each block j,
and reduce the sum once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import apply, backward_number, first_order_only, local_of
from shoal_mesh import Comm
from shoal_mesh.internal import all_reduce_
from shoal_tp_styles import Lowered
from shoal_tp_styles.internal import (
    ColumnLinear,
    RowLinear,
    autocast_dtype,
    find_token,
    keep_token,
    partial_output,
    replicated_input,
    sharded_input,
)

from .blocks import bias_gradient, own_blocks, spread, summed, weight_gradient
from .norms_and_embeddings import add_bias


class _Readers:
    """The layers that read one activation: what each adds to its gradient in a backward pass, by its place."""

    __slots__ = ("_terms", "comm", "count")

    def __init__(self, comm: Comm | None) -> None:
        # over which the gradient is summed; None where the input's port does it
        self.comm = comm
        self.count = 0  # of readers so far
        self._terms: dict[int, tuple[int, tuple[Tensor, Tensor]]] = {}

    def add(self, place: int, grad: Tensor, weight: Tensor) -> None:
        self._terms[place] = backward_number(), (grad, weight)

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """The factors of this pass, in order of the forward; earlier ones may have left theirs."""
        terms = self._terms
        self._terms = {}
        return [
            factors for _, (number, factors) in sorted(terms.items()) if number == backward_number()
        ]


class _OutputColumns(Function):
    """x: (B, ..., K), W: (N, K), b: (N,) -> (B, ..., N), N in `blocks` blocks; and x again, for other readers."""

    # Their products are part of the first reader's gradient, which runs after them.

    @staticmethod
    def forward(  # noqa: PLR0913  # torch's interface
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        blocks: int,
        readers: _Readers,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        ctx.readers = readers
        ctx.place = place
        ctx.set_materialize_grads(False)
        return spread(x, weight, 0, blocks, bias=bias), x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
        first_order_only()
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_rest = ctx.needs_input_grad
        dx = None
        dw = None
        db = None
        if grad is not None:
            ctx.readers.add(ctx.place, grad, weight)
            dw = weight_gradient(grad, x, 0, ctx.blocks) if needs_weight else None
            db = bias_gradient(grad, ctx.blocks) if needs_bias else None
        factors = ctx.readers.take() if ctx.place == 0 else []
        if needs_x and factors:
            # (B, ..., N) of q, k and v, times (N, K) of each: (B, ..., K)
            dx = summed(factors, 0, ctx.blocks)
            if ctx.readers.comm is not None:
                all_reduce_(dx, ctx.readers.comm)
        return dx, dw, db, None, None, None


class _Rows(Function):
    """x: (B, ..., K), W: (N, K) -> (B, ..., N), the sum over `blocks` blocks of K, and over a communicator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, blocks: int, comm: Comm | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        # 8 blocks on 4 ranks: K / 4 features in 2 blocks each
        out = summed([(x, weight)], 1, blocks)
        if comm is not None:
            all_reduce_(out, comm)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_rest = ctx.needs_input_grad
        # (B, ..., N) x (N, K): K in blocks
        dx = spread(grad, weight, 1, ctx.blocks) if needs_x else None
        dw = weight_gradient(grad, x, 1, ctx.blocks) if needs_weight else None
        return dx, dw, None, None


def _of_samples(call: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Decorator of a Linear's call: one token is a sample of its own, and autocast is refused."""

    @wraps(call)
    def checked(lowered: Any, input: Tensor) -> Tensor:
        if autocast_dtype(input) is not None:
            raise StyleError(
                "invariant_arithmetic: under autocast a rank adds gradients of its samples in the "
                "lower precision, and "
                "ranks and passes add theirs in that of the parameters. Leave autocast, and "
                "convert the model "
                "(model.to(torch.bfloat16)), or compute in "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16) of "
                "fully_shard"
            )
        return (
            call(lowered, input.unsqueeze(0)).squeeze(0)
            if input.ndim == 1
            else call(lowered, input)
        )

    return checked


class InvariantColumn(ColumnLinear):
    """A column-wise Linear in blocks."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        super().resolve()
        self.blocks: int = own_blocks(self, "weight", 0)  # 8 blocks on 4 ranks: 2, of N

    @_of_samples
    def __call__(self, input: Tensor) -> Tensor:
        local: Any = self.local("weight", "bias")
        x, readers = self.read(input)
        out, again = apply(
            _OutputColumns, x, local["weight"], local["bias"], self.blocks, readers, readers.count
        )
        # a leaf outlives the graph
        if readers.count == 0 and again.requires_grad and not input.is_leaf:
            again.readers = readers
            keep_token(local_of(input), self.reading(), again)
        readers.count += 1
        return self.finish(out)

    def read(self, input: Tensor) -> tuple[Tensor, _Readers]:
        """The replicated input and its readers: of the first of them, where one has read it before."""
        found = find_token(local_of(input), self.reading(), grad=True, in_tree=True)
        if found is not None and torch.is_grad_enabled():
            readers: _Readers = found.readers  # type: ignore[attr-defined]  # below
            return found, readers
        if self.port_in.layout.is_replicate() and not isinstance(input, DTensor):
            return input, _Readers(self.comm)
        return replicated_input(self, input), _Readers(None)

    def reading(self) -> Hashable:
        """What readers that share a gradient have in common."""
        return self.comm, self.port_in.layout, self.blocks


class InvariantRow(RowLinear):
    """A row-wise Linear in blocks."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        super().resolve()
        self.blocks: int = own_blocks(self, "weight", 1)  # 8 blocks on 4 ranks: 2, of K

    @_of_samples
    def __call__(self, input: Tensor) -> Tensor:
        reduced = self.port_out.desired.is_replicate() and self.sharding.local_outputs
        x = sharded_input(self, input)
        out: Tensor = apply(
            _Rows, x, self.local("weight")["weight"], self.blocks, self.comm if reduced else None
        )
        return add_bias(self, out if reduced else partial_output(self, out, None))


class InvariantWhole(Lowered):
    """A Linear that no style shards, sample by sample."""

    __slots__ = ()

    @_of_samples
    def __call__(self, input: Tensor) -> Tensor:
        local: Any = self.local("weight", "bias")
        out: Tensor
        out, _ = apply(_OutputColumns, input, local["weight"], local["bias"], 1, _Readers(None), 0)
        return out
