"""Sizes in calls on shards, as sizes of the global tensor.

Code between styles passes the sizes of its shards to functions. A call on the global tensor needs
the sizes of the global tensor. The numbers do not show which of them are sizes of sharded dims:
the layout of the shard and the shape of the result do.

For example, `h` of shape (2, 5, 8) is a shard of (2, 5, 16) on 2 ranks. `h.view(2, 5, 2, 4)` is a
shard of the reshape of the global tensor to (2, 5, 4, 4).

If several readings fit on some rank, the layout is unknown on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout.placements import Placement, Replicate, Shard
from ..layout.spec import Spec
from .layouts import AnyShard, UnknownLayoutError

RESHAPING = frozenset(("view", "reshape", "unflatten"))
"""Functions of which `reshape_call` makes a reshape of the global tensor."""
MAKING = frozenset(("new_empty", "new_zeros", "new_ones", "new_full"))
"""Methods that make a tensor of explicit sizes from another tensor."""


class SpecCall(NamedTuple):
    """A call of a torch function in which specs stand for shards and for replicated tensors."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


# --- expand, and tensors of explicit sizes --------------------------------------------------------


def expand_call(call: SpecCall, out: Tensor) -> SpecCall:
    """Return the `expand` of a global tensor whose shard was expanded to `out`.

    For example, a shard (4,) of (8,) is expanded to (3, 4), and the global tensor to (3, 8).
    """
    spec = call.args[0]
    if not isinstance(spec, Spec):
        raise UnknownLayoutError("a tensor that is not sharded is expanded by the size of a shard")
    # New dims go in front: (4,) expanded to (3, 4) has 1 new dim.
    first_kept = out.ndim - spec.ndim
    sizes = [*out.shape[:first_kept]]
    for size, expanded_size in zip(spec.shape, out.shape[first_kept:], strict=True):
        sizes.append(expanded_size if size == 1 else size)
    return call._replace(args=(spec, *sizes), kwargs={})


def spec_of_new_tensor(source: Any, out: Tensor) -> Spec:
    """Return the spec of a tensor that was made from `source` with explicit sizes.

    A dim of the size of a shard is sharded. For `x` of shape (4, 6) on each of 2 ranks, rows of a
    tensor of shape (8, 6), `x.new_empty(4, 1)` is a shard of (8, 1), and `x.new_empty(1, 6)` is
    refused, because nothing shows that it is sharded.
    """
    if not isinstance(source, Spec) or source.is_strided:
        raise UnknownLayoutError("it was made with explicit sizes, from a tensor in runs")
    placements: list[Placement] = [Replicate()] * source.mesh.ndim
    shape = list(out.shape)
    for axis, placement in enumerate(source.placements):
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim
        size = out.shape[dim] if dim < out.ndim else 1
        if 1 in source.sizes(dim):
            raise UnknownLayoutError(
                "it was made with explicit sizes; where a rank has one row, a size of 1 may be "
                "the size of a shard"
            )
        if size == source.local_shape[dim]:
            placements[axis] = placement
            shape[dim] = source.shape[dim]
        elif size != 1:
            raise UnknownLayoutError(
                "it was made with explicit sizes, which may be the sizes of a shard"
            )
    if not any(placement.is_shard() for placement in placements):
        raise UnknownLayoutError(
            "it was made with explicit sizes, none of them the size of a shard"
        )
    return Spec(source.mesh, placements, shape, None, dtype=out.dtype)


# --- reshapes -------------------------------------------------------------------------------------


def reshape_call(call: SpecCall, out: Tensor) -> SpecCall:
    """Return the `reshape` of a global tensor whose shard was reshaped to `out`."""
    spec = call.args[0]
    arguments = [*call.args[1:], *call.kwargs.values()]
    # `view` with a dtype changes the number of elements.
    if not isinstance(spec, Spec) or spec.is_strided or isinstance(arguments[0], torch.dtype):
        raise UnknownLayoutError("it reinterprets memory")
    inferred_dim = _inferred_dim(call.name, spec.ndim, arguments)
    sizes = list(out.shape)
    for dim in {placement.dim for placement in spec.placements if isinstance(placement, AnyShard)}:
        target, size = _dim_after_reshape(spec, dim, tuple(out.shape), inferred_dim)
        is_free = sizes[target] == out.shape[target]
        # -1 refuses two sharded dims that go to one dim.
        sizes[target] = size if is_free else -1
    if -1 in sizes or prod(sizes) != spec.shape.numel():
        raise UnknownLayoutError(
            "its sizes do not show which dims are sharded; write -1 for a sharded dim"
        )
    return SpecCall("reshape", torch.reshape, (spec, sizes), {})


def _inferred_dim(name: str, ndim: int, arguments: Sequence[Any]) -> int | None:
    """Return the dim of the result whose size the program left to torch, as -1; None without it.

    Args:
        name: the name of the function.
        ndim: the number of dims of the tensor that is reshaped.
        arguments: the arguments after the tensor: sizes, as numbers or as one list. `unflatten`
            gets the dim that it divides before them.
    """
    # the first dim that the sizes are for
    start = 0
    sizes = arguments
    if name == "unflatten":
        start = arguments[0] % ndim
        sizes = arguments[1:]
    if isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return start + sizes.index(-1) if -1 in sizes else None


def _dim_after_reshape(
    spec: Spec, dim: int, out: tuple[int, ...], inferred_dim: int | None
) -> tuple[int, int]:
    """Return the dim of a reshaped tensor that a sharded dim went to, and its global size.

    A reshape keeps the order of elements in memory. Therefore the sharded dim of the result is the
    dim that has as many elements, together with the dims after it, as `dim` and the dims after it.
    If shards have size 1 on some rank, other dims fit as well, and only a -1 determines the dim.

    Args:
        spec: the layout of the tensor that is reshaped.
        dim: the sharded dim.
        out: the shape of the reshaped shard.
        inferred_dim: the dim of the result whose size was given as -1, or None.
    """
    candidates = _find_candidates(spec.local_shape, dim, out)
    target = inferred_dim if inferred_dim in candidates.dims else candidates.dims[0]
    total = spec.shape[dim]
    size, rest = _global_size(spec, dim, out, target)
    if rest:
        raise UnknownLayoutError("the sizes of shards are not multiples of it")
    is_certain = target == inferred_dim or not candidates.are_exact
    for rows in set(spec.sizes(dim)):
        # Example: a rank with 3 of 8 elements would have 3 * 4 / 8 of a dim of 4.
        if total and rows * size % total:
            raise UnknownLayoutError("the sizes of shards are not multiples of it")
        # A dim of size 1 has as many elements as the dims after it, so another rank finds another
        # dim if its shard has size 1 before the reshape only, or after the reshape only.
        has_one_before = rows == 1
        has_one_after = rows * size == total
        if rows and has_one_before != has_one_after and not is_certain:
            raise UnknownLayoutError(
                "its sizes do not show which dim is sharded; write -1 for the sharded dim"
            )
    return target, size


class _Candidates(NamedTuple):
    """The dims of a reshaped tensor that a sharded dim may have gone to.

    Attributes:
        dims: these dims.
        are_exact: whether each of these dims has, together with the dims after it, as many elements
            as the sharded dim with the dims after it. Otherwise the sharded dim was folded into a
            larger dim.
    """

    dims: list[int]
    are_exact: bool


def _find_candidates(local: Sequence[int], dim: int, out: tuple[int, ...]) -> _Candidates:
    """Return the dims of the shape `out` that a sharded dim of a local shape may have gone to.

    For a local shape of (2, 4, 6) with dim 1 sharded, 24 elements belong to dim 1 and the dims
    after it. Reshaped to (2, 2, 2, 6), dim 1 has 24 elements too: an exact candidate. Reshaped to
    (8, 6), dim 0 has 48 elements and dim 1 has 6, so the sharded dim was folded into dim 0.
    """
    if not local[dim]:
        empty_dims = [j for j, size in enumerate(out) if size == 0]
        if len(empty_dims) != 1:
            raise UnknownLayoutError("a sharded dim does not go to one dim of the result")
        return _Candidates(empty_dims, are_exact=True)
    elements = prod(local[dim:])
    # the elements of each dim and the dims after it: (8, 6) -> [48, 6, 1]
    elements_from = [prod(out[j:]) for j in range(len(out) + 1)]
    dims = range(len(out))
    exact_dims = [j for j in dims if elements_from[j] == elements]
    if exact_dims:
        return _Candidates(exact_dims, are_exact=True)
    folded_dims = [j for j in dims if elements_from[j + 1] < elements < elements_from[j]]
    if not folded_dims:
        raise UnknownLayoutError("a sharded dim does not go to one dim of the result")
    return _Candidates(folded_dims, are_exact=False)


def _global_size(spec: Spec, dim: int, out: tuple[int, ...], target: int) -> tuple[int, int]:
    """Return the global size of the dim that a sharded dim went to, and the division's rest."""
    local = spec.local_shape
    total = spec.shape[dim]
    if local[dim]:
        # Example: if the dim has 2 elements on this rank, which has 4 of 8 elements of the source,
        # it has 2 * 8 // 4 = 4 elements in all.
        return divmod(out[target] * total, local[dim])
    # Example: an empty shard (0, 6) of 8 rows as (0, 2, 3) gives 6 * 8 // 6 = 8.
    others = prod(size for j, size in enumerate(local) if j != dim)
    others_of_out = prod(size for size in out if size)
    return others * total // others_of_out, 0
