"""Embedding tables and bags sharded along the vocabulary (rows) or along the features (columns).

columns  tokens: R -> y: S(-1)      no communication in either direction; any bag mode
rows     tokens: R -> y: R | S(d)   each rank looks up its tokens, zeros elsewhere; then their sum
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.errors import LayoutError, OperatorIndexError, UnsupportedModuleError
from shoal_dtensor.internal import (
    FakeTensor,
    apply,
    assert_on_device,
    first_order_only,
    is_compiling,
    selectively_checkpointed,
    whole_when_compiled,
)
from shoal_mesh import all_gather, all_gather_v

from ..lowering import ports
from ..lowering.lowered import (
    Lowered,
    collectives_of_move,
    input_collectives,
    nbytes,
    output_collectives,
)
from ..lowering.parameters import run_own_forward
from ..lowering.shared_reduction import gather_partial
from ..sharding.module_sharding import Collective, ModuleCall, Port


def check_ids(tokens: Tensor, rows: int) -> None:
    """Raise OperatorIndexError, on all ranks, for ids that are not rows of the table.

    Their result would be zeros. Accelerators and compiled code raise when the device runs the
    assertion.
    """
    valid = (tokens >= 0) & (tokens < rows)
    is_deferred = is_compiling() or not tokens.is_cpu or isinstance(tokens, FakeTensor)
    if is_deferred:
        message = f"an id is out of bounds for a table of {rows} rows"
        assert_on_device(valid.all(), message)
    elif not valid.all():
        first = tokens[~valid][0].item()
        raise OperatorIndexError(f"id {first} is out of bounds for a table of {rows} rows")


class _Table(Lowered):
    """Base class of the forwards that look up rows of a table.

    It refuses options that a sharded table does not support.
    """

    def resolve(self) -> None:
        style = self.sharding.style
        module = self.module
        if getattr(module, "max_norm", None) is not None:
            raise UnsupportedModuleError(
                f"{style}: {module} has max_norm, which renormalizes rows in place and cannot be "
                "sharded"
            )
        if getattr(module, "sparse", False):
            raise UnsupportedModuleError(
                f"{style}: {module} has sparse=True, but DTensors cannot hold sparse gradients"
            )


class ColumnEmbedding(_Table):
    """Forward of an embedding whose features are sharded."""

    def __call__(self, input: Tensor) -> Tensor:
        tokens = ports.replicated_input(self, input)
        return ports.sharded_output(self, self.look_up(tokens))

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

    Example: 8 rows on 2 ranks. On the second rank, with the rows 4:8 and `first` = 4, the tokens
    1 5 7 are the local rows 4 1 3. Local row 4, after the last one, stands for a token of another
    rank.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, first: int, padding: int | None, scale: bool
    ) -> Tensor:
        rows = table.shape[0]
        local_rows = tokens - first
        # Tokens of other ranks point to the row after the last one, which exists in the gradient
        # only.
        is_local = (local_rows >= 0) & (local_rows < rows)
        local_rows = torch.where(is_local, local_rows, rows)
        ctx.save_for_backward(local_rows)
        local_padding = -1
        if padding is not None and 0 <= padding - first < rows:
            local_padding = padding - first
        ctx.table = rows, local_padding, scale
        outside = (local_rows == rows).unsqueeze(-1)
        if rows == 0:
            return table.new_zeros((*tokens.shape, table.shape[1]))
        looked_up = functional.embedding(local_rows.clamp(max=rows - 1), table)
        # a checkpoint may have saved `looked_up`, so it is not changed in place
        if is_compiling() or selectively_checkpointed():
            return looked_up.masked_fill(outside, 0)
        return looked_up.masked_fill_(outside, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (local_rows,) = ctx.saved_tensors
        rows, padding, scale = ctx.table
        # one more row than the table, for the tokens of other ranks
        dense = torch.ops.aten.embedding_dense_backward(
            grad.contiguous(), local_rows, rows + 1, padding, scale
        )
        return None, dense[:rows], None, None, None


@whole_when_compiled
def _own_rows(
    tokens: Tensor, table: Tensor, first: int, padding: int | None, scale: bool
) -> Tensor:
    out: Tensor = apply(OwnRows, tokens, table, first, padding, scale)
    return out


class RowEmbedding(_Table):
    """Forward of an embedding whose vocabulary is sharded."""

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


class _Bags(NamedTuple):
    """The bags of all ranks, replicated.

    Attributes:
        tokens: the tokens of all bags.
        starts: index of the first token of each bag; None: the rows of `tokens` are the bags.
        weights: a weight of each token.
        port: the layouts in which the results are computed and leave.
    """

    tokens: Tensor
    starts: Tensor | None
    weights: Tensor | None
    port: Port


def _bags(lowered: Lowered, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> _Bags:
    """Return the bags of one call.

    Plain sharded tokens with offsets are this rank's own bags.
    """
    layout = lowered.port_in.layout
    if offsets is not None and isinstance(layout, Shard):
        if isinstance(input, DTensor) is not isinstance(offsets, DTensor):
            raise LayoutError(
                f"{lowered.sharding.style}: tokens and offsets must be both plain (offsets count "
                f"the tokens of this rank, with input_layouts={layout}) or both DTensors (offsets "
                f"count the tokens of all ranks); got a {type(input).__name__} of tokens and a "
                f"{type(offsets).__name__} of offsets"
            )
        if not isinstance(input, DTensor):
            return _bags_of_ranks(lowered, input, offsets, weights, dim=layout.dim)
    starts = None
    if offsets is not None:
        starts = ports.replicated_input(lowered, offsets, Port(Replicate(), Replicate()))
    if weights is not None:
        weights = ports.replicated_input(lowered, weights)
    tokens = ports.replicated_input(lowered, input)
    return _Bags(tokens, starts, weights, lowered.port_out)


class _RankOfBags(NamedTuple):
    """The bags of one rank, as the ranks exchange them."""

    tokens: int
    bags: int
    first_offset: int
    last_offset: int

    def fits(self, *, include_last_offset: bool) -> bool:
        """Tell whether the offsets begin with 0 and end inside of the rank's tokens."""
        if self.first_offset:
            return False
        if include_last_offset or not self.bags:
            return self.last_offset == self.tokens
        return self.last_offset <= self.tokens


def _bags_of_ranks(
    lowered: Lowered, input: Tensor, offsets: Tensor, weights: Tensor | None, dim: int
) -> _Bags:
    """Return the ranks' own bags, rank after rank; their numbers and lengths may differ."""
    comm = lowered.comm
    port = lowered.port_out
    includes_last = bool(lowered.module.include_last_offset)
    count = offsets.shape[0] - int(includes_last)
    # Example: 5 tokens in bags that begin at 0 2 4 -> this rank sends 5 tokens, 3 bags, first
    # offset 0, last offset 4.
    counts = offsets.new_tensor([input.shape[dim], count])
    described = torch.stack([*counts, offsets[:1].sum(), offsets[-1:].sum()])
    gathered: list[list[int]] = all_gather(described, comm).view(-1, 4).tolist()
    ranks = [_RankOfBags(*row) for row in gathered]
    wrong = [i for i, rank in enumerate(ranks) if not rank.fits(include_last_offset=includes_last)]
    if wrong:
        got = [(*ranks[rank],) for rank in wrong]
        raise LayoutError(
            f"{lowered.sharding.style}: offsets must begin with 0 and end inside this rank's "
            "tokens (at their end with include_last_offset), got (tokens, bags, first, last) "
            f"{got} on ranks {wrong} along {'x'.join(comm.axes)}"
        )
    token_counts = tuple(rank.tokens for rank in ranks)
    bag_counts = tuple(rank.bags for rank in ranks)
    tokens_before = sum(token_counts[: comm.rank])
    starts = all_gather_v(offsets[:count] + tokens_before, comm, bag_counts)
    if includes_last:
        starts = torch.cat([starts, starts.new_tensor([sum(token_counts)])])
    if weights is not None:
        weights = gather_partial(weights, comm, dim, token_counts)
    if len(set(bag_counts)) > 1 and port.desired in (Shard(0), Shard(-2)):
        port = Port(port.layout, Shard(0, sizes=bag_counts))
    tokens = all_gather_v(input.contiguous(), comm, token_counts, dim)
    return _Bags(tokens, starts, weights, port)


class EmbeddingBag(_Table):
    """Forward of an embedding bag whose features, or vocabulary, are sharded.

    Sharded features support every mode, because a rank has all tokens of a bag. A sharded
    vocabulary supports sums and means, because they are sums over the ranks.
    """

    __slots__ = ("is_row_sharded",)

    def resolve(self) -> None:
        super().resolve()
        module: Any = self.module
        self.is_row_sharded: bool = isinstance(self.port_out.layout, Partial)
        if self.is_row_sharded and (module.mode == "max" or module.scale_grad_by_freq):
            raise UnsupportedModuleError(
                f"RowwiseParallel: {module} cannot be computed as a sum over the ranks "
                "(mode='max' or scale_grad_by_freq); use ColwiseParallel"
            )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        names = ("input", "offsets", "per_sample_weights")
        arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        port = call.sharding.input_port()
        offsets = arguments.get("offsets")
        weights = arguments.get("per_sample_weights")
        yield from collectives_of_move(arguments["input"], port.layout, port.desired)
        if offsets is not None and isinstance(port.layout, Shard):
            yield Collective("all_gather", 4 * call.ranks * offsets.element_size())
            yield Collective("all_gather", nbytes(offsets))
        if weights is not None:
            yield from input_collectives(replace(call, args=(weights,), kwargs={}))
        yield from output_collectives(call)

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        bags = _bags(self, input, offsets, per_sample_weights)
        if self.is_row_sharded:
            check_ids(bags.tokens, self.spec("weight").shape[0])
            return ports.partial_output(self, self.sum_local_rows(bags), None, port=bags.port)
        local = self.local("weight")
        out = run_own_forward(self.module, local, bags.tokens, bags.starts, bags.weights)
        return ports.sharded_output(self, out, port=bags.port)

    def sum_local_rows(self, bags: _Bags) -> Tensor:
        """Sum the rows of each bag that are on this rank.

        A mean is divided by the number of tokens.
        """
        module: Any = self.module
        weight: Any = self.local("weight")["weight"]
        rows = weight.shape[0]
        # without a padding index, a number that is not an id
        padding = -1 if module.padding_idx is None else module.padding_idx
        is_counted = bags.tokens != padding
        # A row of zeros is looked up for tokens of other ranks. With it, a rank may hold no rows.
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        local_rows = bags.tokens - self.spec("weight").offset(0)
        is_local = is_counted & (local_rows >= 0) & (local_rows < rows)
        local_rows = torch.where(is_local, local_rows, rows)
        add_bags = partial(
            functional.embedding_bag,
            offsets=bags.starts,
            mode="sum",
            include_last_offset=module.include_last_offset,
        )
        out = add_bags(local_rows, table, per_sample_weights=bags.weights)
        if module.mode == "mean":
            ones = weight.new_ones(1, 1)
            zeros = torch.zeros_like(local_rows)
            counts = add_bags(zeros, ones, per_sample_weights=is_counted.to(weight.dtype))
            out = out / counts.clamp(min=1)
        return out
