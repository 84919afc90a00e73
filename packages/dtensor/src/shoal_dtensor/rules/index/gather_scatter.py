"""Sharding of reads and writes along one dim by index.

Reads are gather, index_select and embeddings; writes are scatter, index_add and index_copy.

To read along a sharded dim, every rank looks up the indices in its shard and returns zeros for the
other indices, which makes a partial sum. To write, the written tensor keeps its sharding, and every
rank writes the elements in its shard. Adding is linear, so sharded sources leave a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import with_dependence

from ..._torch.tensors import TRACED
from ...layout.spec import Spec
from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import (
    along_dim,
    check_indices,
    compares_indices,
    functional,
    index_check,
    local_positions,
    sharding_axes,
    where_sharded,
    with_arguments,
)
from ..language.notation import product
from ..language.rule import (
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    family,
    flatten,
)


def lookup_partial(source: TensorMeta) -> P:
    """Return the placement of lookups that leave zeros for the elements of other ranks."""
    return P("max" if source.dtype == torch.bool else "sum")


def lookup(
    local_call: LocalCall, place: int, local: Callable[[Any], tuple[Any, Tensor]], behind: int = 0
) -> LocalFunction:
    """Return a lookup in this rank's shard, with 0 for the elements of other shards.

    Args:
        local_call: the call of the lookup.
        place: the position of the indices among the arguments after the source.
        local: converts the indices to positions in the shard and a mask of the indices that are in
            the shard.
        behind: the number of dims of the result after the dims of the indices.
    """
    call = local_call.call
    shape = local_call.outputs[0].local_shape
    read = functional(call) if call.schema.outs else call.op

    def run(x: Tensor, *args: Any, **_: Any) -> Tensor:
        positions, is_local = local(args[place])
        if 0 in x.shape:
            return with_dependence(x.new_zeros(shape), *flatten([args[place]]))
        elements: Tensor = read(x, *args[:place], positions, *args[place + 1 :])
        shape_of_mask = [*is_local.shape, *[1] * behind]
        return elements.masked_fill_(~is_local.reshape(shape_of_mask), 0)

    return run


def _per_element(call: OpCall) -> bool:
    """Tell whether every element has an index of its own, or an index selects a whole slice."""
    return any(name in call.op.__name__ for name in ("gather", "scatter"))


def _by_index(call: OpCall, *along: Row) -> Iterator[Row]:
    """Yield rows for the dims that are not indexed, then the rows `along` the indexed dim."""
    per_element = _per_element(call)
    source = _source(call)
    operands = [call[name].shape for name in ("self", "index", source) if name]
    shape, index_shape, *_ = operands
    if not shape or (per_element and not index_shape):
        return
    for d in range(len(shape)):
        if d == call.dim():
            continue
        # A shorter index uses only the first rows of a dim, so shards would not correspond.
        if per_element and len({sizes[d] for sizes in operands}) > 1:
            continue
        entries = {source: S(d)} if source else {}
        index_entry = S(d) if per_element else R
        yield call.row(entries, self=S(d), index=index_entry, out=S(d))
    yield from along


def gather(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `gather` and `index_select`."""
    dim = call.dim()
    rows = []
    if call["index"].ndim:
        index_dim = dim if _per_element(call) else 0
        rows.append(call.row(index=S(index_dim), out=S(dim)))
    found_in_shard = lookup_partial(call["self"])
    rows.append(call.row(self=S(dim), out=found_in_shard))
    return _by_index(call, *rows)


@along_dim
def _gather(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    behind = 0 if _per_element(local_call.call) else spec.ndim - dim - 1
    # Indices of `gather` and `index_select` do not count from the end: -1 is out of range.
    to_local = partial(local_positions, spec=spec, dim=dim, from_end=False)
    return lookup(local_call, 1, to_local, behind)


def scatter(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `scatter`, `index_copy` and similar operators."""
    whole_dim = S(call.dim())
    return _by_index(call, call.row(self=whole_dim, out=whole_dim))


def _source(call: OpCall) -> str:
    """Return the name of the tensor whose elements are written; "" for a number or `index_fill`."""
    for name in ("src", "source"):
        if isinstance(call.get(name), TensorMeta):
            return name
    return ""


def scatter_add(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `scatter_add` and `index_add`, linear in target and source together."""
    index = call["index"]
    source = _source(call)
    per_element = _per_element(call)
    yield from scatter(call)
    partial_sum = P("sum")
    yield call.row({source: partial_sum}, self=partial_sum, out=partial_sum)
    if not (call["self"].ndim and index.ndim and call[source].ndim):
        return
    d = call.dim()
    if per_element and index.shape[d] != call[source].shape[d]:
        return
    index_dim = d if per_element else 0
    yield call.row({source: S(d)}, self=partial_sum, index=S(index_dim), out=partial_sum)


@along_dim
def _scatter(local_call: LocalCall, spec: Spec, dim: int) -> LocalFunction:
    """Scatter the elements of this shard; write others to an extra last position and drop it."""
    # The in-place form with the same overload, for example `src` for `src_out`.
    name, _, overload = local_call.call.op.__name__.partition(".")
    in_place = getattr(torch.ops.aten, name.removesuffix("_") + "_")
    functional_overload = overload.removesuffix("out").rstrip("_")
    write = getattr(in_place, functional_overload or "default")
    # Positions 0 to `size` - 1 are in the shard. `size` is the extra position for other elements.
    size = spec.local_shape[dim]

    def run(x: Tensor, dim_: int, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        positions, is_local = local_positions(index, spec, dim, from_end=False)
        shape = [*x.shape]
        shape[dim] = 1
        wide = torch.cat([x, x.new_ones(shape)], dim)
        local_index = positions.masked_fill(~is_local, size)
        write(wide, dim, local_index, *args, **kwargs)
        return wide.narrow(dim, 0, size).contiguous()

    return run


def _write_slices(local_call: LocalCall) -> LocalFunction | None:
    """Write only the slices that fall into the shard."""
    call = local_call.call
    spec = local_call["self"]
    if not spec.ndim:
        return None
    dim = call.dim()
    if not spec.dim_shardings[dim].axes:
        return None
    op = call.op
    has_source = "source" in call.places
    # `index_fill`, which has no source, is the only one of these whose indices count from the end.
    from_end = not has_source

    def run(x: Tensor, dim_: int, index: Tensor, value: Any, *args: Any, **kwargs: Any) -> Any:
        flat_index = index.reshape(-1)
        positions, is_local = local_positions(flat_index, spec, dim, from_end=from_end)
        if has_source:
            source = value if value.ndim else value.reshape([1] * x.ndim)
            value = source.index_select(dim, is_local.nonzero().squeeze(1))
        return op(x, dim, positions[is_local], value, *args, **kwargs)

    return run


def _length(call: OpCall) -> int:
    """Return the number of elements along the indexed dim."""
    source: TensorMeta = call["self"]
    return source.shape[call.dim()] if source.ndim else 1


_along_dim = partial(compares_indices, argument="index", length=_length)
_indices = partial(index_check, argument="index", length=_length)


# --- embeddings: by index, by embedding dim, or by vocabulary (then a partial sum) ----------------


MAX = 2  # the mode of `embedding_bag`


@partial(where_sharded, dims=lambda call: (0,))
def _embedding(local_call: LocalCall, weight: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Look up rows of a sharded vocabulary, whose indices do not count from the end."""
    to_local = partial(local_positions, spec=weight, dim=0, from_end=False)
    return lookup(local_call, 0, to_local, behind=1)


def _rows(call: OpCall) -> int:
    """Return the number of rows of a table."""
    table: TensorMeta = call["weight"]
    return table.shape[0]


_in_table = partial(compares_indices, argument="indices", length=_rows)
_row_indices = partial(index_check, argument="indices", length=_rows)


def embedding_dense_backward(call: OpCall) -> Iterable[Row]:
    # The frequencies must be counted over all indices.
    frequencies = "..." if call["scale_grad_by_freq"] else ""
    return product("... e, ... -> v e", linear=(0,), replicated=frequencies).rows(call)


def embedding_bag(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard the embedding dim or the vocabulary.

    With maxima, their indices are sharded by the embedding dim too. The vocabulary is sharded only
    in a forward call that does not take a maximum.
    """
    of_maxima = S(1) if call["mode"] == MAX else R
    if "grad" in call.places:
        yield call.row(grad=S(1), maximum_indices=of_maxima, out=S(1))
        return
    yield call.row(weight=S(1), out0=S(1), out3=of_maxima)
    if of_maxima is R:
        yield call.row(weight=S(0), out0=P("sum"))


def _dense_gradient(local_call: LocalCall) -> LocalFunction | None:
    """Return the gradient as a dense tensor, because a DTensor cannot be sparse."""
    call = local_call.call
    return with_arguments(call, sparse=False) if call.get("sparse") else None


def _embedding_bag(local_call: LocalCall) -> LocalFunction | None:
    """Sum bags of a sharded vocabulary, with two rows of zeros added to the shard.

    One row is for indices of other ranks, one for padding.
    """
    weight = local_call["weight"]
    call = local_call.call
    if not sharding_axes(weight, (0,)):
        return None
    size = weight.local_shape[0]
    padding = call["padding_idx"]
    place = call.places["weight"][0]
    run_bags = with_arguments(call, padding_idx=size + 1)

    def run(*args: Any, **kwargs: Any) -> Any:
        table, indices = args[place : place + 2]
        positions, is_local = local_positions(indices, weight, 0, from_end=False)
        # Example: this rank's rows 4..7 of the vocabulary are rows 0..3 of its shard. Row 4 is for
        # all other rows of the vocabulary, and row 5 for padding, which is not counted.
        positions = positions.masked_fill(~is_local, size)
        positions = positions.masked_fill(indices == padding, size + 1)
        zeros = table.new_zeros((2, table.shape[1]))
        padded = torch.cat([table, zeros])
        before = args[:place]
        after = args[place + 2 :]
        return run_bags(*before, padded, positions, *after, **kwargs)

    return run


def one_hot(call: OpCall) -> Iterator[Row]:
    for d in range(call["self"].ndim):
        yield call.row(self=S(d), out=S(d))


def _one_hot(local_call: LocalCall) -> LocalFunction:
    """Run the operator itself, which compares indices with the class count only on the CPU."""
    call = local_call.call
    op = call.op
    classes = call["num_classes"]

    def run(index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not index.is_cpu or isinstance(index, TRACED):
            check_indices(index, classes)
        result: Tensor = op(index, *args, **kwargs)
        return result

    return run


GATHER_SCATTER: Table = family(
    {
        "gather index_select": Rule(gather, _along_dim(_gather), moves="self", checks=_indices),
        "scatter scatter_reduce": Rule(scatter, _along_dim(_scatter), checks=_indices),
        "scatter_add": Rule(scatter_add, _along_dim(_scatter), checks=_indices),
        "index_add": Rule(scatter_add, _along_dim(_write_slices), checks=_indices),
        "index_copy index_reduce": Rule(scatter, _along_dim(_write_slices), checks=_indices),
        "index_fill": Rule(
            scatter,
            _along_dim(_write_slices, from_end=True),
            checks=partial(_indices, from_end=True),
        ),
        "embedding": replace(
            product("v e, ... -> ... e", linear=(0,), local=_in_table(_embedding)),
            sizes=None,
            checks=_row_indices,
        ),
        "_embedding_bag _embedding_bag_forward_only": Rule(
            embedding_bag, _in_table(_embedding_bag), checks=_row_indices
        ),
        "_embedding_bag_dense_backward _embedding_bag_backward": Rule(
            embedding_bag, _dense_gradient, linear="grad"
        ),
        # Each result is the product of a row of the gradient and a row of the vocabulary.
        "_embedding_bag_per_sample_weights_backward": replace(
            product(
                "b e, v e, i, o, k -> i", linear=(0, 1), replicated="b i o k", local=_embedding_bag
            ),
            sizes=None,
        ),
        "embedding_dense_backward": Rule(embedding_dense_backward),
        "one_hot": Rule(one_hot, _one_hot),
    }
)
