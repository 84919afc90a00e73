"""Sharding of views: reshapes, permutations, broadcasts, windows and reinterpretations.

Every local call is a view of local storage, so a write through the result changes its base. If the
sharding of an input does not have a row, `propagate` redistributes the input, and records that
the result is not a view of it.

A reshape keeps the row-major order of elements. If dims are merged and divided again, the slowest
dim stays sharded, at multiples of the steps of both dims. For example, (6, 4) -> (4, 6) has steps
of 4 and 6 elements, so shards are multiples of 12 elements, which are 3 source rows or 2 target
rows. If a sharded dim is merged with dims before it, its shards become equal runs
(`StridedDimSharding`). For example, (4, 6) -> (24,) with sharded columns has 4 runs of 6. Dividing
the dim again makes the sharding plain again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import lcm, prod

import torch

from ..language.local_ops import with_arguments
from ..language.rule import (
    LocalCall,
    LocalFunction,
    OpCall,
    Row,
    Rule,
    S,
    Table,
    family,
    no_rows,
)


def groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """Return the shortest runs of source dims and target dims that have equally many elements.

    Dims of size 1 go with the run that follows them; trailing ones form a run of their own.

    Example:
        >>> groups((2, 3, 4), (6, 1, 4, 1))
        [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3)), (range(3, 3), range(3, 4))]
    """
    result: list[tuple[range, range]] = []
    i = 0
    j = 0
    while i < len(source) and j < len(target):
        first = i
        second = j
        have = source[i]
        want = target[j]
        i += 1
        j += 1
        while have != want:
            if have < want:
                # Example: for (2, 3, 4) -> (6, 4), it is 2, then 2 * 3 = 6.
                have *= source[i]
                i += 1
            else:
                # Example: for (6, 4) -> (2, 3, 4), the same holds for the target.
                want *= target[j]
                j += 1
        result.append((range(first, i), range(second, j)))
    if i < len(source) or j < len(target):
        result.append((range(i, len(source)), range(j, len(target))))
    return result


def reshape_mappings(source: Sequence[int], target: Sequence[int]) -> list[tuple[S, S]]:
    """Return pairs of a sharded source dim and its target dim after a reshape, best first.

    Example:
        >>> reshape_mappings((4, 6), (24,)), reshape_mappings((6, 4), (4, 6))
        ([(S(0), S(0, unit=6)), (S(1), S(0, runs=4))], [(S(0, unit=3), S(0, unit=2))])
        >>> reshape_mappings((24,), (2, 12))
        [(S(0, unit=12), S(0)), (S(0, runs=2), S(1))]
    """
    if 0 in source:
        return _mappings_of_empty(source, target)
    mappings: list[tuple[S, S]] = []
    for dims, results in groups(source, target):
        for in_runs in (False, True):
            mappings += _group_mappings(dims, results, source, target, in_runs=in_runs)
    # If a source dim of size 1 is sharded, one coordinate holds all elements. Any target dim can be
    # sharded in this way.
    reached = {entry.dim for entry, _ in mappings}
    for i, size in enumerate(source):
        # Example: dim 1 of (4, 1) -> (4,).
        if size == 1 and i not in reached:
            mappings += [(S(i), S(j, n)) for j, n in enumerate(target)]
    return mappings


def _mappings_of_empty(source: Sequence[int], target: Sequence[int]) -> list[tuple[S, S]]:
    """Return the mappings of a tensor without elements.

    Only the sizes matter: leading and trailing dims with equal sizes keep their sharding.
    """
    # Example: for (2, 0, 3) -> (2, 0, 1, 3), the shift is 1. The leading dims 2 and 0 give the
    # pairs (0, 0) and (1, 1), and the trailing dim 3 gives (2, 3).
    ndim = len(source)
    shift = len(target) - ndim
    pairs: list[tuple[int, int]] = []
    for i in range(min(ndim, len(target))):
        if source[i] != target[i]:
            break
        pairs.append((i, i))
    left = range(len(pairs))
    # 3 and 3: (2, 3)
    for i in reversed(range(ndim)):
        j = i + shift
        if j < 0 or source[i] != target[j]:
            break
        if i not in left and j not in left:
            pairs.append((i, j))
    return [(S(i), S(j)) for i, j in pairs]


def _group_mappings(
    dims: range, results: range, source: Sequence[int], target: Sequence[int], *, in_runs: bool
) -> Iterator[tuple[S, S]]:
    """Yield the shardings of the slowest dims of a group or, `in_runs`, of faster dims in runs."""
    # A dim is sharded in runs if the source, the target or both have slower dims in the group.
    # Example: dim 1 of each in (2, 6) -> (4, 3), a group of 12 elements. There are 2 and 4 rows, so
    # there are 4 runs of 3 elements. A row of the source has 2 runs, a row of the target 1.
    total = prod(source[i] for i in dims)
    for i, j in product(dims, results):
        before_i = prod(source[dims.start : i])
        before_j = prod(target[results.start : j])
        # In the example: max(2, 4) = 4.
        runs = max(before_i, before_j)
        # Sizes may be symbols, whose comparisons are not bools.
        is_other_kind = runs == 1 if in_runs else runs != 1
        if is_other_kind or runs % before_i or runs % before_j:
            continue
        if in_runs and source[i] == 1:
            continue
        # In the example: 2 runs in a row of 6, and 1 in a row of 3.
        runs_in_i = runs // before_i
        runs_in_j = runs // before_j
        inside_i = prod(source[i + 1 : dims.stop])
        inside_j = prod(target[j + 1 : results.stop])
        # Example: for dim 0 of each in (6, 4) -> (4, 6), the step is lcm(4, 6) = 12 elements.
        step = _lcm(inside_i, inside_j)
        if source[i] % runs_in_i or target[j] % runs_in_j:
            continue
        if step < total // runs or source[i] == 1:
            # In this example, 12 elements are 3 rows of 4 or 2 rows of 6.
            yield S(i, step // inside_i, runs_in_i), S(j, step // inside_j, runs_in_j)


def _lcm(one: int, other: int) -> int:
    """Return the least common multiple.

    Symbols become constants, unless one of the two is a multiple of the other.
    """
    if type(one) is int and type(other) is int:
        return lcm(one, other)
    for multiple, divisor in ((one, other), (other, one)):
        if multiple % divisor == 0:
            return multiple
    return lcm(int(one), int(other))


def same_dims(call: OpCall, pairs: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Yield a row for each pair of a dim of the first argument and an output dim sharded alike."""
    first = next(iter(call.places))
    for d, target in pairs:
        yield call.row({first: S(d)}, out=S(target))


def view(call: OpCall) -> Iterator[Row]:
    """Yield the rows of any reshape, from global shapes; the row-major order of elements stays."""
    for source, target in reshape_mappings(call["self"].shape, call.outputs[0].shape):
        yield call.row(self=source, out=target)


def _view(local_call: LocalCall) -> LocalFunction:
    """View the tensor by a tensor method, which costs less than the overload."""
    shape = local_call.outputs[0].local_shape
    if local_call.call.op is torch.ops.aten._unsafe_view.default:
        return lambda x, size: x.reshape(shape)
    return lambda x, *args: x.view(shape)


def _dims_to_squeeze(call: OpCall) -> list[int]:
    """Return the dims to remove: requested dims that are 1 globally; others may be 1 locally."""
    source = call["self"]
    if "dim" in call.arguments and call["dim"] in ((), []):
        # Here an empty list means no dims, whereas reductions take it for all dims.
        return []
    return [d for d in call.dims() if source.shape[d] == 1]


def squeeze(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `squeeze`, including rows that shard a removed dim.

    A sharded dim of one element is held by one coordinate, which then holds the whole result, as a
    shard of any other dim.
    """
    gone = _dims_to_squeeze(call)
    ndim = call["self"].ndim
    # Example: [0, 2] for (3, 1, 4) without dim 1.
    others = [d for d in range(ndim) if d not in gone]
    yield from same_dims(call, ((d, i) for i, d in enumerate(others)))
    for d in gone:
        for o, n in enumerate(call.outputs[0].shape):
            if n:
                yield call.row(self=S(d), out=S(o, n))


def _squeeze(local_call: LocalCall) -> LocalFunction:
    dims = tuple(_dims_to_squeeze(local_call.call))
    return lambda x, *args: x.squeeze(dims)


def unsqueeze(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `unsqueeze` and `stack`."""
    ndim = call.outputs[0].ndim
    dim = int(call["dim"]) % ndim
    # Example: a new dim 1 of 2 dims maps dim 0 to dim 0 and dim 1 to dim 2.
    kept = [d for d in range(ndim) if d != dim]
    yield from same_dims(call, enumerate(kept))


def view_dtype(call: OpCall) -> Iterator[Row]:
    """Yield the rows of a view as a wider or narrower dtype.

    A wider dtype merges several elements of the last dim, a narrower dtype splits one element.
    """
    source = call["self"]
    target = call.outputs[0]
    yield from same_dims(call, ((d, d) for d in range(source.ndim - 1)))
    if source.ndim:
        last = source.ndim - 1
        n = source.shape[-1]
        m = target.shape[-1]
        # Example: 8 elements of float32 as 4 of float64 are 4 steps, of 2 elements and 1 element.
        steps = max(1, min(n, m))
        unit = max(1, n // steps)
        target_unit = max(1, m // steps)
        yield call.row(self=S(last, unit), out=S(last, target_unit))


def permute(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `permute`, `transpose`, and `t`, for at most two dims."""
    ndim = call["self"].ndim
    dims = [*map(int, call.get("dims", range(ndim)))]
    if "dim0" in call.arguments and ndim:
        one = call.dim("dim0")
        two = call.dim("dim1")
        dims[one] = two
        dims[two] = one
    elif "dims" not in call.arguments:
        # `t`
        dims.reverse()
    # Example: the order (2, 0, 1) maps dim 2 to dim 0.
    yield from same_dims(call, ((dim % ndim, i) for i, dim in enumerate(dims)))


def expand(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `expand` and of `masked_scatter`, whose target is broadcast to the mask."""
    source = call["self"]
    target = call.outputs[0]
    # Example: for (3,) -> (2, 3) there is 1 new dim, so dim 0 is dim 1 of the result.
    new = target.ndim - source.ndim
    for d, n in enumerate(source.shape):
        if n == target.shape[d + new]:
            yield from same_dims(call, [(d, d + new)])


def _expand(local_call: LocalCall) -> LocalFunction:
    shape = local_call.outputs[0].local_shape
    return lambda x, size, **kwargs: x.expand(shape)


def unfold(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `unfold` and its gradient.

    Windows without overlap and remainder are a split; other windows need elements of neighbors.
    """
    # Example: 12 elements in windows of 3 every 4 elements. Window i has the elements 4i to 4i + 2,
    # so shards are multiples of 4 elements.
    is_gradient = "grad_in" in call.places
    step = call["step"]
    whole = call.outputs[0] if is_gradient else call["self"]
    if not whole.ndim:
        return
    dim_argument = "dim" if is_gradient else "dimension"
    dim = int(call[dim_argument]) % whole.ndim
    others = [d for d in range(whole.ndim) if d != dim]
    yield from same_dims(call, ((d, d) for d in others))
    has_full_windows = whole.shape[dim] % step == 0
    is_split = call["size"] <= step and has_full_windows
    if not is_split:
        return
    elements = S(dim, step)
    windows = S(dim)
    if is_gradient:
        yield call.row(grad_in=windows, out=elements)
    else:
        yield call.row(self=elements, out=windows)


def view_as_real(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `view_as_real` and `view_as_complex`, except for the dim of two.

    The dim of two holds the real and the imaginary part.
    """
    ndim = min(call["self"].ndim, call.outputs[0].ndim)
    yield from same_dims(call, ((d, d) for d in range(ndim)))


def with_input_sizes(local_call: LocalCall) -> LocalFunction:
    """Run the gradient of a view with the sizes of this rank's input."""
    return with_arguments(local_call.call, input_sizes=local_call.outputs[0].local_shape)


VIEWS: Table = family(
    {
        "view.default _unsafe_view.default _reshape_alias.default": Rule(view, _view, moves="self"),
        "unsqueeze.default": Rule(unsqueeze, sizes=(), moves="self"),
        "squeeze.default squeeze.dim squeeze.dims": Rule(
            squeeze, _squeeze, skip_empty=True, moves="self"
        ),
        "permute.default transpose.int t.default": Rule(permute, sizes=(), moves="self"),
        "expand.default": Rule(expand, _expand, moves="self"),
        # The kernel refuses a shard that is too short for a window.
        "unfold.default": Rule(unfold, skip_empty=True, moves="self"),
    },
    unordered=True,
) | family(
    {
        "view.dtype": Rule(view_dtype),
        "view_as_real.default view_as_complex.default": Rule(view_as_real, linear="self"),
        # Strides refer to one storage, which no rank has. The input is gathered, so the result is
        # not a view of it.
        "as_strided.default": Rule(no_rows, moves="self"),
        "as_strided_scatter.default": Rule(no_rows, moves="self src"),
        "unfold_backward.default": Rule(
            unfold, with_input_sizes, skip_empty=True, linear="grad_in"
        ),
    }
)
