"""Sharding of embeddings: by index, by embedding dim, or by vocabulary (then a partial sum)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import bound

from ..language.index_bounds import adds_up, check_bounds
from ..language.local_ops import in_every_form, sharding_axes, with_arguments
from ..language.rule import LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from ..language.rule_tables import family

MAX = 2  # the mode of `embedding_bag`


def embedding(call: OpCall) -> Iterator[Row]:
    ndim = call["indices"].ndim
    yield from (call.row(indices=S(d), out=S(d)) for d in range(ndim))
    yield call.row(weight=S(1), out=S(ndim))
    if adds_up(call["weight"]):
        yield call.row(weight=S(0), out=P("sum"))
    yield from call.linear("weight")


def _embedding(local_call: LocalCall) -> LocalFunction | None:
    """With a sharded vocabulary: zeros in the place of rows that other ranks hold."""
    weight = local_call.inputs[0]
    if not sharding_axes(weight, (0,)):
        return None
    start, size, rows = weight.local_offset[0], weight.local_shape[0], weight.shape[0]

    def run(table: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        check_bounds(indices, (indices >= 0) & (indices < rows), rows)
        if not size:
            return bound(table.new_zeros((*indices.shape, table.shape[1])), indices)
        local = indices - start
        outside = (local < 0) | (local >= size)
        result: Tensor = torch.ops.aten.embedding(table, local.masked_fill(outside, 0))
        return result.masked_fill_(outside.unsqueeze(-1), 0)

    return in_every_form(local_call.call, run)


def embedding_dense_backward(call: OpCall) -> Iterator[Row]:
    gradient, indices = call["grad_output"], call["indices"]
    yield call.row(grad_output=S(gradient.ndim - 1), out=S(1))
    yield from call.linear("grad_output")
    if not call["scale_grad_by_freq"]:
        yield from (call.row(grad_output=S(d), indices=S(d), out=P("sum")) for d in range(indices.ndim))


def embedding_bag(call: OpCall) -> Iterator[Row]:
    """By embedding dim; by vocabulary unless a maximum is taken."""
    is_max = call["mode"] == MAX
    yield call.row(weight=S(1), out0=S(1), out3=S(1) if is_max else R)  # out3: where each maximum is
    if not is_max:
        yield call.row(weight=S(0), out0=P("sum"))


def _embedding_bag(local_call: LocalCall) -> LocalFunction | None:
    """With a sharded vocabulary: two rows of zeros are added, one for indices of other ranks, one for padding.

    Rows 4..7 on this rank are 0..3, row 4 stands for all others, and row 5 for padding, which is not counted.
    """
    weight, call = local_call.inputs[0], local_call.call
    if not sharding_axes(weight, (0,)):
        return None
    start, size, padding = weight.local_offset[0], weight.local_shape[0], call["padding_idx"]
    run_bags, rows = with_arguments(call, padding_idx=size + 1), weight.shape[0]

    def run(table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        check_bounds(indices, (indices >= 0) & (indices < rows), rows)
        local = indices - start
        local = local.masked_fill((local < 0) | (local >= size), size).masked_fill(indices == padding, size + 1)
        return run_bags(torch.cat([table, table.new_zeros((2, table.shape[1]))]), local, *args, **kwargs)

    return run


def embedding_bag_backward(call: OpCall) -> Iterator[Row]:
    """By embedding dim; where a maximum was taken, its places have that dim too."""
    yield from call.linear("grad")
    yield call.row(grad=S(1), maximum_indices=S(1) if call["mode"] == MAX else R, out=S(1))


def _embedding_bag_backward(local_call: LocalCall) -> LocalFunction | None:
    """Dense: no DTensor is sparse."""
    return with_arguments(local_call.call, sparse=False) if local_call.call.get("sparse") else None


def per_sample_weights_backward(call: OpCall) -> Iterator[Row]:
    """Each is the product of a row of the gradient and one of the vocabulary."""
    yield call.row(grad=S(1), weight=S(1), out=P("sum"))
    yield call.row(weight=S(0), out=P("sum"))
    yield from call.linear("grad", "weight")


def _per_sample_weights_backward(local_call: LocalCall) -> LocalFunction | None:
    """With a sharded vocabulary: a row of zeros is added for indices of other ranks and for padding."""
    weight, call = local_call.inputs[1], local_call.call
    if not sharding_axes(weight, (0,)):
        return None
    start, size, padding = weight.local_offset[0], weight.local_shape[0], call["padding_idx"]
    without_padding = with_arguments(call, padding_idx=-1)

    def run(gradient: Tensor, table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        local = indices - start
        local = local.masked_fill((local < 0) | (local >= size) | (indices == padding), size)
        return without_padding(
            gradient, torch.cat([table, table.new_zeros((1, table.shape[1]))]), local, *args, **kwargs
        )

    return run


EMBEDDING: Table = family(
    {
        "embedding": Rule(embedding, _embedding),
        "_embedding_bag _embedding_bag_forward_only": Rule(embedding_bag, _embedding_bag),
        "_embedding_bag_dense_backward _embedding_bag_backward": Rule(embedding_bag_backward, _embedding_bag_backward),
        "_embedding_bag_per_sample_weights_backward": Rule(per_sample_weights_backward, _per_sample_weights_backward),
        "embedding_dense_backward": Rule(embedding_dense_backward),
    }
)
