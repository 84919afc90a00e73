"""Linear layers in blocks: each product sees one sample and one block of features, on any mesh.

For a sample b and a block j of the features, column-wise and row-wise layers compute:

    columns   y[b, :, j] = x[b] W[j]^T            dx[b] = tree over j of dy[b, :, j] W[j]
    rows      y[b] = tree over j of x[b, :, j] W[:, j]^T        dx[b, :, j] = dy[b] W[:, j]
    both      dW[j] = tree over b of the sample's product

The collectives over the tensor axis compute the upper part of the trees over j. The reduction over
data axes computes the upper part of the trees over b.

Several column-wise layers may read the same activation, as q, k and v do. They add their terms of
its gradient in each block j, and reduce the sum over ranks once, in the backward of the first:

    layer       q                         k                 v
    place       0                         1                 2
    backward    3. computes dx of all     2. adds a term    1. adds a term
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
    find_shared_input,
    keep_shared_input,
    partial_output,
    replicated_input,
    sharded_input,
)

from .blocks import bias_gradient, blocks_of_parameter, spread, sum_of_products, weight_gradient
from .norms_and_embeddings import add_bias


class _Readers:
    """The layers that read one activation, and their terms of its gradient in a backward pass.

    Attributes:
        comm: the ranks that the first reader sums the gradient over. None if the conversion of the
            layer's input sums it, or if no ranks share the layer.
        count: the number of readers so far. The place of a reader is the number of readers before
            it.
    """

    __slots__ = ("_terms", "comm", "count")

    def __init__(self, comm: Comm | None) -> None:
        self.comm = comm
        self.count = 0
        # place of a reader -> the number of the backward pass, and the factors of the term
        self._terms: dict[int, tuple[int, tuple[Tensor, Tensor]]] = {}

    def add(self, place: int, grad: Tensor, weight: Tensor) -> None:
        """Add the factors of a reader's term: the gradient at its output, and its weight."""
        self._terms[place] = backward_number(), (grad, weight)

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Remove all terms; return the factors of this backward pass, in the order of the places.

        Terms of an earlier backward pass are dropped. That pass did not reach the first reader.
        """
        terms = self._terms
        self._terms = {}
        factors = []
        for place in sorted(terms):
            number, pair = terms[place]
            if number == backward_number():
                factors.append(pair)
        return factors


class _OutputColumns(Function):
    """Linear whose output features are computed in blocks, (B, ..., K) -> (B, ..., N).

    The weight is (N, K), and the bias is (N,). The second output is x again. The other readers of x
    read this output, so their backwards run before that of the first reader, which then adds up
    the terms of all readers.
    """

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
            if needs_weight:
                dw = weight_gradient(grad, x, 0, ctx.blocks)
            if needs_bias:
                db = bias_gradient(grad, ctx.blocks)
        is_first_reader = ctx.place == 0
        factors = ctx.readers.take() if is_first_reader else []
        if needs_x and factors:
            # For each reader (B, ..., N) times (N, K); the sum is (B, ..., K).
            dx = sum_of_products(factors, 0, ctx.blocks)
            if ctx.readers.comm is not None:
                all_reduce_(dx, ctx.readers.comm)
        return dx, dw, db, None, None, None


class _SummedBlocks(Function):
    """Linear whose input features are summed in blocks and over ranks, (B, ..., K) -> (B, ..., N).

    The weight is (N, K).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, blocks: int, comm: Comm | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        # Example: with 8 blocks on 4 ranks, this rank has a quarter of K, in 2 blocks.
        out = sum_of_products([(x, weight)], 1, blocks)
        if comm is not None:
            all_reduce_(out, comm)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_rest = ctx.needs_input_grad
        # (B, ..., N) times (N, K), with K in blocks
        dx = spread(grad, weight, 1, ctx.blocks) if needs_x else None
        dw = weight_gradient(grad, x, 1, ctx.blocks) if needs_weight else None
        return dx, dw, None, None


def _sample_by_sample(call: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Decorate the call of a Linear: treat an input (K,) as one sample, and refuse autocast."""

    @wraps(call)
    def call_checked(lowered: Any, input: Tensor) -> Tensor:
        if autocast_dtype(input) is not None:
            raise StyleError(
                "invariant_arithmetic: under autocast a rank adds gradients of its samples in the "
                "lower precision, but ranks and passes add theirs in the precision of the "
                "parameters. Leave autocast, and convert the model (model.to(torch.bfloat16)), or "
                "use fully_shard with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )
        if input.ndim == 1:
            return call(lowered, input.unsqueeze(0)).squeeze(0)
        return call(lowered, input)

    return call_checked


class InvariantColumn(ColumnLinear):
    """A column-wise Linear in blocks."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        super().resolve()
        # This rank's number of blocks of N. Example: 2 with 8 blocks on 4 ranks.
        self.blocks: int = blocks_of_parameter(self, "weight", 0)

    @_sample_by_sample
    def __call__(self, input: Tensor) -> Tensor:
        local: Any = self.local("weight", "bias")
        weight = local["weight"]
        x, readers = self.read(input)
        place = readers.count
        out, shared_input = apply(
            _OutputColumns, x, weight, local["bias"], self.blocks, readers, place
        )
        # Nothing is kept on a leaf: it outlives the graph, and would keep the graph alive.
        if place == 0 and shared_input.requires_grad and not input.is_leaf:
            shared_input.readers = readers
            keep_shared_input(local_of(input), self.shared_input_key(), shared_input)
        readers.count += 1
        return self.finish(out)

    def read(self, input: Tensor) -> tuple[Tensor, _Readers]:
        """Return the replicated input and its readers.

        If an earlier layer has read the input, these are the second output and the readers of the
        first layer that did.
        """
        found = find_shared_input(local_of(input), self.shared_input_key(), grad=True, in_tree=True)
        if found is not None and torch.is_grad_enabled():
            readers: _Readers = found.readers  # type: ignore[attr-defined]  # set in `__call__`
            return found, readers
        if self.port_in.layout.is_replicate() and not isinstance(input, DTensor):
            return input, _Readers(self.comm)
        return replicated_input(self, input), _Readers(None)

    def shared_input_key(self) -> Hashable:
        """Return the key of this layer's input; readers with equal keys share its gradient."""
        return self.comm, self.port_in.layout, self.blocks


class InvariantRow(RowLinear):
    """A row-wise Linear in blocks."""

    __slots__ = ("blocks",)

    def resolve(self) -> None:
        super().resolve()
        # This rank's number of blocks of K. Example: 2 with 8 blocks on 4 ranks.
        self.blocks: int = blocks_of_parameter(self, "weight", 1)

    @_sample_by_sample
    def __call__(self, input: Tensor) -> Tensor:
        x = sharded_input(self, input)
        weight = self.local("weight")["weight"]
        is_replicated = self.port_out.desired.is_replicate()
        is_all_reduced = is_replicated and self.sharding.local_outputs
        comm = self.comm if is_all_reduced else None
        out: Tensor = apply(_SummedBlocks, x, weight, self.blocks, comm)
        if not is_all_reduced:
            out = partial_output(self, out, None)
        return add_bias(self, out)


class InvariantWhole(Lowered):
    """A Linear that no style shards; it is computed sample by sample."""

    __slots__ = ()

    @_sample_by_sample
    def __call__(self, input: Tensor) -> Tensor:
        local: Any = self.local("weight", "bias")
        weight = local["weight"]
        out: Tensor
        out, _ = apply(_OutputColumns, input, weight, local["bias"], 1, _Readers(None), 0)
        return out
