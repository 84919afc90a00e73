"""Sharding of operators that join tensors, move whole dims or use diagonals.

Examples are cat, pad, roll, repeat and tril.

Along a dim that grows, the shards of the sharded operand stay in place, and its first and last
shard grow by the elements before and after it. For example, if x has 4 rows on 2 ranks, `cat([a, x,
b])` is a, x[:2] on rank 0 and x[2:], b on rank 1. To roll, flip or repeat a sharded dim, each rank
sends exactly the ranges that other ranks need.

A diagonal is a view of a matrix whose rows and columns may be sharded. If both are sharded, by
different mesh axes, an element is held by the rank whose rows and columns both contain it: on 2 x 2
ranks, two ranks hold the diagonal of a (4, 4) matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...layout.boxes import spans
from ...layout.dim_sharding import DimSharding
from ..exchange import Relocation
from ..language.local_ops import bytes_of, in_every_form, with_arguments
from ..language.notation import product, rows_sharded_alike
from ..language.op_call import ShardingMap, entries_at
from ..language.rule import (
    LocalCall,
    LocalFunction,
    OpCall,
    Row,
    Rule,
    S,
    Table,
    Traffic,
    family,
)
from .slicing import SliceMap
from .views import same_dims, unsqueeze, with_input_sizes


def cat(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `cat`; along the joined dim, one operand is sharded."""
    (result,) = call.outputs
    tensors = call.tensors
    dim = int(call["dim"]) % max(result.ndim, 1)
    # torch ignores 1-D tensors without elements among tensors of any shape.
    joined = [i for i, t in enumerate(tensors) if t.ndim == result.ndim]
    count = len(tensors)
    for d in range(result.ndim):
        if d != dim:
            entries = entries_at(joined, S(d), count)
            yield call.row(tensors=entries, out=S(d))
    lengths = [0] * count
    for i in joined:
        lengths[i] = tensors[i].shape[dim]
    for i in joined:
        # Example: for lengths 2, 4 and 1, the result is -2:5 in positions of the second operand.
        before = sum(lengths[:i])
        after = sum(lengths[i:])
        padded = SliceMap(-before, after, exclusive=True)
        entries = entries_at([i], S(dim), count)
        yield call.row(tensors=entries, out=S(dim, map=padded))


def _cat(local_call: LocalCall) -> LocalFunction | None:
    """Join the parts of the operands that this rank's shard of the result covers."""
    # Each rank joins only the parts that belong to its shard of the result. It may hold more: all
    # elements of replicated operands, and elements of an operand that another axis shards.
    (result,) = local_call.outputs
    dim = int(local_call.call["dim"]) % max(result.ndim, 1)
    joined = [i for i, spec in enumerate(local_call.inputs) if spec.ndim == result.ndim]
    parts_are_sharded = [local_call.inputs[i].dim_shardings[dim].axes for i in joined]
    is_sharded = result.ndim and any(parts_are_sharded)
    if not is_sharded:
        return None
    op = local_call.call.op
    start = result.offset(dim)
    # Example: operands of 2, 4 (sharded as 2 + 2) and 1 rows. Rank 1 has 4:7 of the result.
    stop = start + result.local_shape[dim]
    parts = []
    before = 0
    for i in joined:
        spec = local_call.inputs[i]
        # In the example, rank 1 holds the parts 0:2, 4:6 and 6:7.
        first = before + spec.offset(dim)
        last = first + spec.local_shape[dim]
        # In the example, it joins nothing of the first part, and all of the others.
        length = max(min(last, stop) - max(first, start), 0)
        at = max(first, start) - first if length else 0
        parts.append((i, at, length))
        before += spec.shape[dim]

    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        local_parts = [tensors[i].narrow(dim, at, length) for i, at, length in parts]
        return op(local_parts, *args, **kwargs)

    return run


def _pads(call: OpCall) -> dict[int, tuple[int, int]]:
    """Return the growth of every padded dim at its start and at its end."""
    # Example: for 2 dims, (1, 2, 0, 3) gives {1: (1, 2), 0: (0, 3)}.
    pad = [int(n) for n in call["pad"]]
    ndim = call["self"].ndim
    pads = {}
    for i in range(0, len(pad), 2):
        before = pad[i]
        after = pad[i + 1]
        if before or after:
            pads[ndim - 1 - i // 2] = (before, after)
    return pads


def constant_pad_nd(call: OpCall) -> Iterator[Row]:
    """Yield the rows of a padding; partial values may stay so if it adds nothing, or zeros."""
    pads = _pads(call)
    for d, n in enumerate(call["self"].shape):
        if d in pads:
            # Example: the padding (2, 1) of 8 elements gives -2:9.
            before, after = pads[d]
            padded = SliceMap(-before, n + after, exclusive=True)
            yield call.row(self=S(d), out=S(d, map=padded))
        else:
            yield call.row(self=S(d), out=S(d))
    if all(max(pair) <= 0 for pair in pads.values()):
        yield from call.keeping_partials("self")
    elif call["value"] == 0:
        yield from call.linear("self")


def _constant_pad_nd(local_call: LocalCall) -> LocalFunction | None:
    """Pad only the ends that this rank holds.

    A negative width removes elements from the shards at that end.
    """
    # Example: for 6 elements on 2 ranks and the padding (2, -4), rank 0 pads by (2, -1) and rank 1
    # by (0, -3).
    source = local_call["self"]
    (result,) = local_call.outputs
    pads = _pads(local_call.call)
    if not any(source.dim_shardings[d].axes for d in pads):
        return None
    local: list[int] = []
    for d in reversed(range(source.ndim)):
        have = source.local_shape[d]
        want = result.local_shape[d]
        # In the example, rank 1 holds 3:6, which is 5:8 after the padding of 2, and has 4:4 of the
        # result. `low` would be 5 - 4 = 1, but it must not exceed the wanted size, which is 0. The
        # end is then 0 - 3 - 0 = -3.
        before, _ = pads.get(d, (0, 0))
        low = source.local_offset[d] + before - result.local_offset[d]
        low = min(max(low, -have), want)
        local += [low, want - have - low]
    return with_arguments(local_call.call, pad=local)


def _shard_traffic(call: OpCall) -> Traffic:
    """Return the traffic of receiving at most the rank's shard of the result."""
    return lambda ranks: bytes_of(call.outputs[0]) / ranks


def _shift_of_dims(call: OpCall) -> dict[int, int]:
    """Return the shift of every dim that roll or flip rearranges; 0 for flip.

    The result is empty for a roll of the flattened tensor.
    """
    source = call["self"]
    shift_of = dict[int, int]()
    if not source.ndim:
        return shift_of
    dims = call["dims"]
    shifts = call.get("shifts") or [0] * len(dims)
    for d, shift in zip(dims, shifts, strict=False):
        dim = int(d) % source.ndim
        # Example: for 6 elements, a roll by 1 shifts by 1, and a roll by -1 shifts by 5.
        total = shift_of.get(dim, 0) + int(shift)
        shift_of[dim] = total % max(source.shape[dim], 1)
    return shift_of


def roll(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `roll` and `flip`."""
    shift_of = _shift_of_dims(call)
    is_flattened = not shift_of and call.get("shifts") is not None
    if is_flattened:
        return
    others = [d for d in range(call["self"].ndim) if d not in shift_of]
    yield from same_dims(call, ((d, d) for d in others))
    for d in shift_of:
        yield call.row(self=S(d), out=S(d), traffic=_shard_traffic(call))


def _rearrange(
    local_call: LocalCall,
    moves: list[Relocation],
    rest: Callable[[Tensor], Tensor],
    *,
    always: bool = False,
) -> LocalFunction | None:
    """Return a function that rearranges sharded dims between ranks, then the others by `rest`.

    The dims are independent of each other. If no dim moves, return None, so that the operator
    itself runs; with `always`, return a function that runs `rest`.
    """

    def run(x: Tensor, *args: object) -> Tensor:
        for move in moves:
            x = move.forwards(x)
        return rest(x)

    return in_every_form(local_call.call, run) if moves or always else None


def _flipped_bytes(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Flip numbers of one byte; torch flips float8 only for shapes that shards may not have."""
    flipped: Tensor = x.view(torch.uint8).flip([*dims])
    return flipped.view(x.dtype)


def _roll(local_call: LocalCall) -> LocalFunction | None:
    """Return the local function of `roll` or `flip`: sharded dims are exchanged between ranks."""
    call = local_call.call
    source = local_call["self"]
    moves = []
    shift_of = _shift_of_dims(call)
    is_flip = call.get("shifts") is None
    for d in [d for d in shift_of if source.dim_shardings[d].axes]:
        n = source.shape[d]
        shards = spans(source.sizes(d))
        # Example: the shard 3:6 of 6 elements. A roll by 1 puts it at 4 and at -2. A flip leaves
        # shards at their places, and the rank wants 0:3, which it then flips.
        places: list[tuple[int, ...]]
        if is_flip:
            places = [(start,) for start, _ in shards]
            wanted = [(n - stop, n - start) for start, stop in shards]
        else:
            shift = shift_of.pop(d)
            shifted = [start + shift for start, _ in shards]
            places = [(start, start - n) for start in shifted]
            wanted = shards
        moves.append(Relocation(source, d, places, wanted))
    if not is_flip and shift_of:
        return _rearrange(local_call, moves, lambda x: x.roll([*shift_of.values()], [*shift_of]))
    if not is_flip:
        return _rearrange(local_call, moves, lambda x: x)
    dims = call["dims"]
    if source.dtype.is_floating_point and source.dtype.itemsize == 1:
        is_sharded = not source.replicated
        return _rearrange(local_call, moves, lambda x: _flipped_bytes(x, dims), always=is_sharded)
    return _rearrange(local_call, moves, lambda x: x.flip(dims))


@dataclass(frozen=True, slots=True)
class RepeatMap(ShardingMap):
    """The map to the sharding of a dim that is `times` as long, in the shards of `torch.chunk`."""

    times: int

    def __call__(self, sharding: DimSharding) -> DimSharding:
        return sharding.rechunked(sharding.length * self.times)


def repeat(call: OpCall) -> Iterator[Row]:
    """Yield the rows of `repeat`; a repeated dim may be sharded too."""
    repeats = call["repeats"]
    ndim = call["self"].ndim
    # Example: for 2 dims and repeats (3, 1, 2) there is 1 new dim, so dim 0 is dim 1 of the result
    # and is not repeated.
    new = len(repeats) - ndim
    single = [d for d in range(ndim) if repeats[d + new] == 1]
    yield from same_dims(call, ((d, d + new) for d in single))
    for d in range(ndim):
        if repeats[d + new] > 1:
            repeated = S(d + new, map=RepeatMap(repeats[d + new]))
            yield call.row(self=S(d), out=repeated, traffic=_shard_traffic(call))


def _repeat(local_call: LocalCall) -> LocalFunction | None:
    """Return the local function of `repeat`: repeated sharded dims are exchanged between ranks."""
    source = local_call["self"]
    target = local_call.outputs[0]
    repeats = [int(n) for n in local_call.call["repeats"]]
    moves = []
    new = len(repeats) - source.ndim
    sharded = []
    for d in range(source.ndim):
        times = repeats[d + new]
        if times <= 1 or not source.dim_shardings[d].axes:
            continue
        sharded.append(d)
        n = source.shape[d]
        wanted = spans(target.sizes(d + new))
        places = []
        for start in source.dim_sharding(d).offsets:
            of_shard = [start + n * k for k in range(times)]
            places.append(of_shard)
        # Example: if 3 elements are repeated twice, the shard 2:3 is put at 2 and 5.
        moves.append(Relocation(source, d, places, wanted))
    # Example: for repeats (2, 3), if dim 0 is exchanged between ranks, the others are (1, 3).
    others = [*repeats]
    for d in sharded:
        others[d + new] = 1
    return _rearrange(local_call, moves, lambda x: x.repeat(others))


def _beside_matrix(call: OpCall, ndim: int) -> list[int]:
    """Return the dims other than rows and columns of a tensor of `ndim` dims."""
    matrix = {int(call["dim1"]) % ndim, int(call["dim2"]) % ndim}
    return [d for d in range(ndim) if d not in matrix]


def diagonal(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard either dim of the matrix, and rows for the other dims."""
    one = call.dim("dim1")
    two = call.dim("dim2")
    offset = call["offset"]
    last = call.outputs[0].ndim - 1
    length = call.outputs[0].shape[-1]
    # Example: the diagonal of (4, 4) with offset 1 is in rows 0:3 and columns 1:4.
    for d, start in ((one, max(0, -offset)), (two, max(0, offset))):
        selected = SliceMap(start, start + length, intersects=True)
        yield call.row(self=S(d), out=S(last, map=selected))
    other_dims = _beside_matrix(call, call["self"].ndim)
    yield from same_dims(call, ((d, i) for i, d in enumerate(other_dims)))


def _diagonal(local_call: LocalCall) -> LocalFunction | None:
    """Return the diagonal of the shard that is on the global diagonal."""
    call = local_call.call
    spec = local_call["self"]
    one = call.dim("dim1")
    two = call.dim("dim2")
    if not (spec.dim_shardings[one].axes or spec.dim_shardings[two].axes):
        return None
    # Example: for rows 2:4 of (4, 4) it is 0 + 2 - 0: element (2, 2) is (0, 2) of the shard.
    offset = call["offset"] + spec.offset(one) - spec.offset(two)
    return lambda x, *args: x.diagonal(offset, one, two)


def diag_embed(call: OpCall) -> Iterator[Row]:
    """Yield rows of `diag_embed` and `diagonal_backward`, for the other dims of the matrix."""
    yield from same_dims(call, enumerate(_beside_matrix(call, call.outputs[0].ndim)))


def diagonal_scatter(call: OpCall) -> Iterator[Row]:
    for i, d in enumerate(_beside_matrix(call, call["self"].ndim)):
        yield call.row(self=S(d), src=S(i), out=S(d))


def _tril(local_call: LocalCall) -> LocalFunction | None:
    """Shift the diagonal for the shard that starts at (row, column)."""
    row, column = local_call["self"].local_offset[-2:]
    if row == column:
        return None
    # Example: for rows 2:4 of (4, 4) it is 0 + 2 - 0.
    diagonal = local_call.call["diagonal"] + row - column
    return with_arguments(local_call.call, diagonal=diagonal)


REARRANGEMENT: Table = family(
    {
        "cat.default cat.out": Rule(cat, _cat, moves="tensors"),
        "stack": Rule(unsqueeze, moves="tensors"),
        "constant_pad_nd.default": Rule(constant_pad_nd, _constant_pad_nd),
        "roll flip": Rule(roll, _roll, moves="self"),
        "rot90": Rule(lambda call: rows_sharded_alike(call, *call.dims("dims")), moves="self"),
        "repeat": Rule(repeat, _repeat, moves="self"),
        "diagonal.default": Rule(
            diagonal, _diagonal, unordered=True, skip_empty=True, moves="self"
        ),
        "diagonal_backward.default": Rule(
            diag_embed, with_input_sizes, skip_empty=True, linear="grad_output"
        ),
        "diagonal_scatter": Rule(diagonal_scatter, moves="self src"),
        "diag_embed": Rule(diag_embed, linear="self"),
        "tril triu": product("... -> ...", linear=(0,), local=_tril),
    }
)
