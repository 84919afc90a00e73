"""Embedding tables and bags sharded along the vocabulary (rows) or along the features (columns).

columns   tokens: R -> y: S(-1)          no communication in either direction; any bag mode
rows      tokens: R -> y: R | S(d)       every rank looks up its own tokens, zeros elsewhere; then their sum
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError
from shoal_dtensor.internal import (
    FakeTensor,
    apply,
    first_order_only,
    is_compiling,
    selectively_checkpointed,
    whole_when_compiled,
)
from shoal_mesh import all_gather, all_gather_v

from ..lowering import ports
from ..lowering.collective_functions import gather_partial
from ..lowering.lowered import (
    Lowered,
    collectives_of_move,
    input_collectives,
    nbytes,
    output_collectives,
)
from ..lowering.parameters import own_forward
from ..sharding.module_sharding import Collective, ModuleCall, Port


def check_ids(tokens: Tensor, rows: int) -> None:
    """Refuse ids for which no rank has a row, on all ranks.

    The result would be zeros. Accelerators report such ids later.
    """
    valid = (tokens >= 0) & (tokens < rows)
    if is_compiling() or not tokens.is_cpu or isinstance(tokens, FakeTensor):
        torch.ops.aten._assert_async.msg(
            valid.all(), f"an id is out of bounds for a table of {rows} rows"
        )
    elif not valid.all():
        raise IndexError(
            f"id {tokens[~valid][0].item()} is out of bounds for a table of {rows} rows"
        )


class _Table(Lowered):
    """Base class of modules that look up rows of a table.

    It refuses options that a sharded table does not support.
    """

    def resolve(self) -> None:
        style = self.sharding.style
        module = self.module
        if getattr(module, "max_norm", None) is not None:
            raise UnsupportedModuleError(
                f"{style}: {module} renormalises rows in place (max_norm); that is not sharded"
            )
        if getattr(module, "sparse", False):
            raise UnsupportedModuleError(
                f"{style}: {module} has sparse gradients, which DTensors do not hold"
            )


class ColumnEmbedding(_Table):
    """An embedding whose features are sharded."""

    def __call__(self, input: Tensor) -> Tensor:
        return ports.sharded_output(self, self.look_up(ports.replicated_input(self, input)))

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return this rank's features of the tokens."""
        module: Any = self.module
        weight: Any = self.local("weight")["weight"]
        return functional.embedding(
            tokens, weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq
        )


class OwnRows(Function):
    """Function from replicated tokens to this rank's rows, from `first` on (`R -> P`).

    Tokens of other ranks give zeros.

    Example: 8 rows on 2 ranks, the second rank (first = 4): tokens 1 5 7 -> own rows 4 1 3, where 4
    is after the last row.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, first: int, padding: int | None, scale: bool
    ) -> Tensor:
        rows = table.shape[0]
        local_rows = tokens - first
        # Tokens of other ranks point to the row behind the last one, which exists in the gradient
        # only.
        local_rows = torch.where((local_rows >= 0) & (local_rows < rows), local_rows, rows)
        ctx.save_for_backward(local_rows)
        padding = -1 if padding is None or not 0 <= padding - first < rows else padding - first
        ctx.table = rows, padding, scale
        outside = (local_rows == rows).unsqueeze(-1)
        if rows == 0:
            return table.new_zeros((*tokens.shape, table.shape[1]))
        looked_up = functional.embedding(local_rows.clamp(max=rows - 1), table)
        # which may have saved the rows: they are not written to
        if is_compiling() or selectively_checkpointed():
            return looked_up.masked_fill(outside, 0)
        return looked_up.masked_fill_(outside, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (local_rows,) = ctx.saved_tensors
        rows, padding, scale = ctx.table
        dense = torch.ops.aten.embedding_dense_backward(
            grad.contiguous(), local_rows, rows + 1, padding, scale
        )[:rows]
        return None, dense, None, None, None


@whole_when_compiled
def _own_rows(
    tokens: Tensor, table: Tensor, first: int, padding: int | None, scale: bool
) -> Tensor:
    out: Tensor = apply(OwnRows, tokens, table, first, padding, scale)
    return out


class RowEmbedding(_Table):
    """An embedding whose vocabulary is sharded."""

    def __call__(self, input: Tensor) -> Tensor:
        tokens = ports.replicated_input(self, input)
        check_ids(tokens, self.spec("weight").shape[0])
        return ports.partial_output(self, self.look_up(tokens), None)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the tokens' rows of the table; zeros for tokens of other ranks."""
        module: Any = self.module
        table: Any = self.local("weight")["weight"]
        first = self.spec("weight").offset(0)
        return _own_rows(tokens, table, first, module.padding_idx, scale=module.scale_grad_by_freq)


_Bags = tuple[Tensor, Tensor | None, Tensor | None, Port]
"""Tokens, starts and weights of the bags of all ranks, replicated, and the port by which their results leave."""


def _bags(lowered: Lowered, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> _Bags:
    """Return the bags of one call.

    Plain sharded tokens with offsets are this rank's own bags.
    """
    arriving = lowered.port_in
    if offsets is not None and isinstance(arriving.layout, Shard):
        if isinstance(input, DTensor) is not isinstance(offsets, DTensor):
            raise LayoutError(
                f"{lowered.sharding.style}: offsets count the tokens of this rank where both are "
                f"plain and input_layouts is {arriving.layout}, those of all ranks where both are "
                f"DTensors; got a {type(input).__name__} of tokens and a {type(offsets).__name__} "
                "of offsets"
            )
        if not isinstance(input, DTensor):
            return _bags_of_ranks(lowered, input, offsets, weights, dim=arriving.layout.dim)
    starts = (
        None
        if offsets is None
        else ports.replicated_input(lowered, offsets, Port(Replicate(), Replicate()))
    )
    whole = None if weights is None else ports.replicated_input(lowered, weights)
    return ports.replicated_input(lowered, input), starts, whole, lowered.port_out


def _bags_of_ranks(
    lowered: Lowered, input: Tensor, offsets: Tensor, weights: Tensor | None, dim: int
) -> _Bags:
    """Return the ranks' own bags, rank after rank; their numbers and lengths may differ."""
    comm = lowered.comm
    module = lowered.module
    leaving = lowered.port_out
    last = int(bool(module.include_last_offset))
    counts = [input.shape[dim], offsets.shape[0] - last]
    # Bags of 5 tokens that begin at 0 2 4: this rank says 5 tokens, 3 bags, first offset 0, last
    # offset 4.
    described = torch.stack([*offsets.new_tensor(counts), offsets[:1].sum(), offsets[-1:].sum()])
    rows: list[list[int]] = all_gather(described, comm).view(-1, 4).tolist()
    fits = [
        not first and (end == tokens if last or not bags else end <= tokens)
        for tokens, bags, first, end in rows
    ]
    outside = [rank for rank, fit in enumerate(fits) if not fit]
    if outside:
        raise LayoutError(
            f"{lowered.sharding.style}: offsets begin with 0 and end inside of the rank's own "
            "tokens (at their end with include_last_offset), got (tokens, bags, first, last) "
            f"{[(*rows[r],) for r in outside]} on ranks {outside} along {'x'.join(comm.axes)}"
        )
    tokens, bags = (tuple(row[column] for row in rows) for column in (0, 1))
    starts = all_gather_v(offsets[: counts[1]] + sum(tokens[: comm.rank]), comm, bags)
    if last:
        starts = torch.cat([starts, starts.new_tensor([sum(tokens)])])
    whole = None if weights is None else gather_partial(weights, comm, dim, tokens)
    if len(set(bags)) > 1 and leaving.desired in (Shard(0), Shard(-2)):
        leaving = Port(leaving.layout, Shard(0, sizes=bags))
    return all_gather_v(input.contiguous(), comm, tokens, dim), starts, whole, leaving


class EmbeddingBag(_Table):
    """An embedding bag whose features, or vocabulary, are sharded.

    Every mode works by columns, because bags are local; sums and means, which are sums over the
    ranks, also work by rows.
    """

    __slots__ = ("rows",)

    def resolve(self) -> None:
        super().resolve()
        module: Any = self.module
        self.rows: bool = isinstance(self.port_out.layout, Partial)
        if self.rows and (module.mode == "max" or module.scale_grad_by_freq):
            raise UnsupportedModuleError(
                f"RowwiseParallel: {module} is not a sum over the ranks (mode='max', "
                "scale_grad_by_freq); use ColwiseParallel"
            )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        given = {
            **dict(zip(("input", "offsets", "per_sample_weights"), call.args, strict=False)),
            **call.kwargs,
        }
        port = call.sharding.input_port()
        offsets = given.get("offsets")
        weights = given.get("per_sample_weights")
        yield from collectives_of_move(given["input"], port.layout, port.desired)
        if offsets is not None and isinstance(port.layout, Shard):
            yield Collective("all_gather", 4 * call.ranks * offsets.element_size())
            yield Collective("all_gather", nbytes(offsets))
        if weights is not None:
            yield from input_collectives(replace(call, args=(weights,), kwargs={}))
        yield from output_collectives(call)

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        tokens, starts, weights, leaving = _bags(self, input, offsets, per_sample_weights)
        if self.rows:
            check_ids(tokens, self.spec("weight").shape[0])
            return ports.partial_output(
                self, self.summed(tokens, starts, weights), None, port=leaving
            )
        out = own_forward(self.module, self.local("weight"), tokens, starts, weights)
        return ports.sharded_output(self, out, port=leaving)

    def summed(self, tokens: Tensor, starts: Tensor | None, weights: Tensor | None) -> Tensor:
        """Sum the rows of each bag that are on this rank.

        A mean is divided by the number of tokens.
        """
        module: Any = self.module
        weight: Any = self.local("weight")["weight"]
        rows = weight.shape[0]
        own = tokens - self.spec("weight").offset(0)
        # no id is -1
        counted = tokens != (-1 if module.padding_idx is None else module.padding_idx)
        # A row of zeros stands for the tokens of other ranks, so a rank may also hold no rows at
        # all.
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        own = torch.where(counted & (own >= 0) & (own < rows), own, rows)
        how = {"mode": "sum", "include_last_offset": module.include_last_offset}
        out = functional.embedding_bag(own, table, starts, per_sample_weights=weights, **how)
        if module.mode == "mean":
            ones = weight.new_ones(1, 1)
            zeros = torch.zeros_like(own)
            factor = counted.to(weight.dtype)
            counts = functional.embedding_bag(zeros, ones, starts, per_sample_weights=factor, **how)
            out = out / counts.clamp(min=1)
        return out
