"""Kernels: a step on one rank, as a preparation of a buffer, one collective, and a conclusion.

`kernel(step, coordinate)` resolves a step to integers once. `prepare` and `finish` work on plain
local tensors; the collective between them is data: the same kernels run over process groups, merged
with others, and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal_mesh.internal import bound, contribution, pack_blocks, unpack_blocks

from ...errors import RedistributeError
from ...layout.boxes import Box, intersect, shape_of, slices_of, volume
from ...layout.placements import norm_order
from ...layout.tensor_meta import has_symbols
from ..blocks import Blocks, boxes_of_rank, exchange_blocks
from ..steps import Step

if TYPE_CHECKING:
    from ...layout.spec import Spec


Coordinate = tuple[int, ...]


class CollectiveCall(NamedTuple):
    """One call of a collective of shoal_mesh; its members' blocks are in order along dim 0."""

    # all_gather, reduce_scatter, all_reduce or all_to_all
    kind: str
    # mesh axes of the communicator, in the order of its members
    axes: tuple[int, ...]
    op: str = "sum"  # reduction
    # lengths of the members' blocks if they differ (for an all_to_all, of the blocks sent)
    sizes: tuple[int, ...] = ()
    # for an all_to_all with sizes: lengths of the blocks received from each
    receives: tuple[int, ...] = ()
    # shape of the result, -1 for the length of the blocks: flat by default
    shape: tuple[int, ...] = (-1,)
    # global ranks of the communicator where it is not along axes of one mesh
    ranks: tuple[int, ...] = ()


def unchanged(local: Tensor) -> Tensor:
    """Return the local tensor: the `prepare` of a step that communicates the tensor as it is."""
    return local


def received(got: Tensor, local: Tensor) -> Tensor:
    """Return the received tensor: the `finish` of a step whose collective gives the result."""
    return got


class Kernel(NamedTuple):
    """A step on one rank."""

    prepare: Callable[[Tensor], Tensor] = unchanged  # local tensor -> buffer to communicate
    # None for a local step: then `finish` does all
    collective: CollectiveCall | None = None
    # (result of the collective, local tensor) -> new local tensor
    finish: Callable[[Tensor, Tensor], Tensor] = received


def kernel(step: Step, coordinate: Coordinate | None) -> Kernel:
    """Return the kernel of a step for the rank at a coordinate of the step's mesh.

    It does nothing if the rank is outside the mesh (None), except for a transfer.
    """
    if coordinate is None and step.name != "Transfer":
        return Kernel()
    return _KERNELS[step.name](step, coordinate)


def members(spec: Spec, axes: Sequence[int], coordinate: Coordinate) -> list[Coordinate]:
    """Return the coordinates of ranks that differ from `coordinate` only along `axes`.

    They are row-major in the order of `axes`.
    """
    # On (2, 2, 2), over axes 2 and 0 from (0, 1, 0): (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1).
    coordinates = []
    for position in product(*(range(spec.mesh.shape[axis]) for axis in axes)):
        along = dict(zip(axes, position, strict=True))
        coordinates.append(tuple(along.get(axis, i) for axis, i in enumerate(coordinate)))
    return coordinates


def blocks_of(step: Step, coordinate: Coordinate) -> Blocks:
    """Return the blocks of this rank in an exchange, with members counted along the step's axes."""
    group = members(step.src, step.axes, coordinate)
    src, dst = (spec.example or spec for spec in (step.src, step.dst))
    blocks = exchange_blocks(
        group.index(coordinate), *([[spec.box(c)] for c in group] for spec in (src, dst))
    )
    if src is step.src:
        return blocks
    # along dims of symbolic sizes, which do not move, every block is as long as that
    own = step.src.box(coordinate)

    def whole(box: Box) -> Box:
        return tuple([b if has_symbols(b) else a for a, b in zip(box, own, strict=True)])

    sends, receives = (
        [(member, whole(box)) for member, box in part] for part in (blocks.sends, blocks.receives)
    )
    return Blocks(tuple(sends), tuple(receives), tuple(map(whole, blocks.kept)))


def _slice(step: Step, coordinate: Coordinate) -> Kernel:
    before = step.src.box(coordinate)
    after = step.dst.box(coordinate)
    # (dim, start, length): rows 4:8 -> 6:8 are (0, 2, 2)
    narrowed = [
        (d, j - i, k - j)
        for d, ((i, m), (j, k)) in enumerate(zip(before, after, strict=True))
        if (i, m) != (j, k)
    ]

    def finish(local: Tensor, _: Tensor) -> Tensor:
        for dim, start, length in narrowed:
            local = local.narrow(dim, start, length)
        return local

    return Kernel(finish=finish)


def _reshape(step: Step, coordinate: Coordinate) -> Kernel:
    shape = step.dst.local_shape_at(coordinate)
    return Kernel(finish=lambda local, _: local.reshape(shape))


def _make_partial(step: Step, coordinate: Coordinate) -> Kernel:
    """Return the kernel of R or S -> P: every element is held once along the axes.

    Elements may be held any number of times for reductions that ignore duplicates.
    """
    before = step.src.box(coordinate)
    after = step.dst.box(coordinate)
    ops = {axis: op for axis, op in step.dst.partials if axis in step.axes}
    sharded = {axis for dim in range(step.src.ndim) for axis in step.src.dim_sharding(dim).axes}
    value = identity_of(next(iter(ops.values())), step.dst.dtype)
    factor = prod(
        step.dst.mesh.shape[axis] for axis, op in ops.items() if op == "avg" and axis in sharded
    )
    shape = shape_of(after)
    own = intersect(before, after)
    once = [
        axis
        for axis, op in ops.items()
        if axis not in sharded and (op in _COUNTED or norm_order(op) is not None)
    ]
    if own is None:
        return Kernel(finish=lambda local, _: bound(local.new_full(shape, value), local))
    # columns 2:4 -> 0:4: local 0:2 to 2:4
    source = slices_of(own, before)
    target = slices_of(own, after)
    held = not any(coordinate[axis] for axis in once)  # R -> P(sum): x on coordinate 0, else 0

    def finish(local: Tensor, _: Tensor) -> Tensor:
        if not held and type(local) is Tensor:
            return local.new_full(shape, value)
        if once and type(local) is not Tensor:
            local = contribution(local, held, value)
        local = local[source]
        if own == after:
            return (
                local.clone(memory_format=torch.contiguous_format)
                if factor == 1
                else local * factor
            )
        out = local.new_full(shape, value)
        out[target] = local if factor == 1 else local * factor
        return out

    return Kernel(finish=finish)


def _scale(step: Step, coordinate: Coordinate) -> Kernel:
    factor = step.factor if step.divisor == 1 else step.factor / step.divisor
    return Kernel(finish=lambda local, _: local * factor)


def _gather_or_scatter(step: Step, coordinate: Coordinate) -> Kernel:
    """Return the kernel of an AllGather or a ReduceScatter.

    The blocks of the ranks along the axes make up, or are parts of, a larger box.
    """
    gathers = step.name == "AllGather"
    fine, coarse = (step.src, step.dst) if gathers else (step.dst, step.src)
    # then this rank's box stands for all
    alike = all(fine.dim_sharding(dim).even for dim in step.dims)
    boxes = [fine.box(c) for c in ([coordinate] if alike else members(fine, step.axes, coordinate))]
    # 5 rows on 2 ranks: boxes 0:3 and 3:5, whole 0:5
    whole = coarse.box(coordinate)
    kind = "all_gather" if gathers else "reduce_scatter"
    shape = shape_of(step.dst.box(coordinate))
    if not volume(whole):
        return Kernel(finish=lambda local, _: local.new_empty(shape))
    op, divide = _reduction(step)
    even = all(shape_of(b) == shape_of(boxes[0]) for b in boxes)
    if step.dims == (0,):
        lengths = () if even else tuple(stop - start for (start, stop), *_ in boxes)  # (3, 2)
        call = CollectiveCall(kind, step.axes, op, lengths, shape=(-1, *shape[1:]))
        return Kernel(collective=call, finish=divide)
    sizes, order = _grid_of_blocks(fine, coarse, step.dims, shape_of(fine.box(coordinate)))
    interleaved = [sizes[i] for i in order]
    back = sorted(range(len(order)), key=order.__getitem__)
    places = [slices_of(box, whole) for box in boxes]

    def split(local: Tensor) -> Tensor:
        if not even:
            return pack_blocks([local[place] for place in places])
        # (4, 6) as (2, 2, 2, 3) to 4 blocks of (2, 3)
        return local.reshape(interleaved).permute(back).reshape(-1)

    def join(flat: Tensor) -> Tensor:
        if even:
            # 2 x 2 blocks of (2, 3): (4, 6)
            return flat.view(sizes).permute(order).reshape(shape).contiguous()
        out = flat.new_empty(shape)
        unpack_blocks(flat, [out[place] for place in places])
        return out

    call = CollectiveCall(kind, step.axes, op, () if even else tuple(map(volume, boxes)))
    if gathers:
        return Kernel(torch.flatten, call, lambda got, _: join(got))
    return Kernel(split, call, lambda got, local: divide(got.view(shape), local))


def _all_reduce(step: Step, coordinate: Coordinate) -> Kernel:
    if not volume(step.src.box(coordinate)):
        return Kernel(finish=lambda local, _: local.clone())
    op, divide = _reduction(step)
    collective = CollectiveCall(
        "all_reduce", step.axes, op, shape=tuple(step.src.local_shape_at(coordinate))
    )
    return Kernel(collective=collective, finish=divide)


def _reducing(step: Step, coordinate: Coordinate) -> Kernel:
    """Return the kernel of a reduction; for a norm, a sum of powers, of which the root is taken."""
    kernel_of = _gather_or_scatter if step.name == "ReduceScatter" else _all_reduce
    order = norm_order(step.op)
    dtype = step.src.dtype
    if order is None:
        return kernel_of(step, coordinate)
    work = kernel_of(replace(step, op="sum"), coordinate)
    if work.collective is None:
        return work
    prepare = work.prepare
    finish = work.finish
    return Kernel(
        prepare=lambda local: prepare(powers(local, order)),
        collective=work.collective,
        finish=lambda got, local: root(finish(got, local), order, dtype),
    )


def _all_to_all(step: Step, coordinate: Coordinate) -> Kernel:
    (src_dim, dst_dim) = step.dims
    before = step.src.box(coordinate)
    after = shape_of(step.dst.box(coordinate))
    ranks = prod(step.src.mesh.shape[axis] for axis in step.axes)
    if not volume(before):
        return Kernel(finish=lambda local, _: local.new_empty(after))
    # (2, 8) S(0) -> S(1) on 4 ranks: blocks of (2, 2), which make (8, 2)
    block = shape_of(before)
    block[dst_dim] = after[dst_dim]

    def prepare(local: Tensor) -> Tensor:
        return local if dst_dim == 0 else torch.cat(local.chunk(ranks, dst_dim))

    def finish(got: Tensor, _: Tensor) -> Tensor:
        return got if src_dim == 0 else torch.cat(got.chunk(ranks), src_dim)

    return Kernel(prepare, CollectiveCall("all_to_all", step.axes, shape=(-1, *block[1:])), finish)


def _exchange(step: Step, coordinate: Coordinate) -> Kernel:
    size = prod(step.src.mesh.shape[axis] for axis in step.axes)
    blocks = blocks_of(step, coordinate)
    return _moved(blocks, step.src.box(coordinate), step.dst.box(coordinate), size, axes=step.axes)


def transfer_kernel(step: Step, rank: int) -> Kernel:
    """Return the kernel of a global rank in a transfer; it does nothing outside both meshes."""
    if rank not in step.ranks:
        return Kernel()
    me = step.ranks.index(rank)
    before, after = ([boxes_of_rank(spec, r) for r in step.ranks] for spec in (step.src, step.dst))
    # an empty box outside of a mesh
    mine, wanted = ([*boxes[me], ((0, 0),)][0] for boxes in (before, after))
    return _moved(
        exchange_blocks(me, before, after), mine, wanted, len(step.ranks), ranks=step.ranks
    )


def _moved(
    blocks: Blocks,
    before: Box,
    after: Box,
    size: int,
    *,
    axes: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
) -> Kernel:
    """Return a kernel that packs, exchanges blocks among `size` members, and unpacks."""
    sends = [0] * size
    receives = [0] * size
    for counts, moves in ((sends, blocks.sends), (receives, blocks.receives)):
        for member, box in moves:
            # to member 1 a (2, 2) block: sends [0, 4]
            counts[member] += volume(box)
    shape = shape_of(after)
    boxes = [box for _, box in blocks.receives]
    where = [slices_of(box, before) for _, box in blocks.sends]
    places = [slices_of(box, after) for box in boxes]
    kept = [(slices_of(box, before), slices_of(box, after)) for box in blocks.kept]
    # Rows 4:5, then 5:7, are in memory as they travel, so they need not be copied.
    full_rows = not kept and all(box[1:] == after[1:] for box in boxes)
    arrives_in_order = full_rows and all(a[0][1] == b[0][0] for a, b in pairwise(boxes))

    def prepare(local: Tensor) -> Tensor:
        return pack_blocks([local[w] for w in where], like=local)

    def finish(got: Tensor, local: Tensor) -> Tensor:
        if arrives_in_order:
            return got.view(shape)
        out = local.new_empty(shape)
        for source, target in kept:
            out[target] = local[source]
        unpack_blocks(got, [out[place] for place in places])
        return out if places else bound(out, got)

    collective = CollectiveCall(
        "all_to_all", axes, sizes=tuple(sends), receives=tuple(receives), ranks=ranks
    )
    return Kernel(prepare, collective, finish)


def _grid_of_blocks(
    fine: Spec, coarse: Spec, dims: Sequence[int], block: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the sizes of a regular grid over `dims`, then of a block, and their order.

    The order is the position of each of these sizes in the tensor.
    """
    # 2 x 3 blocks of (4, 5, 6) over dims 0 and 1: [2, 3, 4, 5, 6], and in the tensor they are dims
    # [0, 2, 1, 3, 4].
    # from 2 shards to 8: 4 blocks
    grid = [fine.dim_sharding(d).shards // coarse.dim_sharding(d).shards for d in dims]
    order: list[int] = []
    for dim in range(len(block)):
        if dim in dims:
            # number of its block, then position inside of that
            order.append(list(dims).index(dim))
        order.append(len(grid) + dim)
    return [*grid, *block], order


def _reduction(step: Step) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the reduction of a step's collective, and the division after it.

    A sum over some axes and an average over others is a sum, divided afterwards. In a half type the
    sum may overflow, so the collective averages over all axes and the result is multiplied by the
    number of ranks of the sum.
    """
    divisor = step.divisor
    dtype = step.src.dtype
    if divisor == 1 or dtype not in (torch.float16, torch.bfloat16):
        return step.op, _division(divisor, dtype)
    ranks_of_sum = prod(step.src.mesh.shape[axis] for axis in step.axes) // divisor
    return "avg", lambda got, _: got.mul_(ranks_of_sum)


def _division(divisor: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    if divisor == 1:
        return received
    if dtype.is_floating_point or dtype.is_complex:
        return lambda got, _: got.div_(divisor)
    return lambda got, _: got.floor_divide_(divisor)


# reductions that count a value as often as it occurs
_COUNTED = frozenset({"sum", "product", "bxor"})


_KERNELS: dict[str, Callable[[Step, Any], Kernel]] = {
    "Slice": _slice,
    "Reshape": _reshape,
    "MakePartial": _make_partial,
    "Scale": _scale,
    "AllGather": _gather_or_scatter,
    "ReduceScatter": _reducing,
    "AllReduce": _reducing,
    "AllToAll": _all_to_all,
    "Exchange": _exchange,
    "Transfer": lambda step, _: transfer_kernel(step, step.src.mesh.get_rank()),  # on either mesh
}


# --- what a reduction does to values --------------------------------------------------------------
#
# The powers of a norm travel as float64, so that squares of values of the type do not overflow
# (torch's own norm of float32 values from 2e19 on is infinite).  In float64 itself they overflow
# where the plain norm does.  The sign is kept beside the power: a value that one rank holds alone
# comes back as it is.


def powers(part: Tensor, order: float) -> Tensor:
    """Return the powers that are summed for a norm.

    Raise RedistributeError if the tensor is not of real floating-point numbers.
    """
    if not part.is_floating_point():
        raise RedistributeError(f"a partial norm is of floating-point numbers, got {part.dtype}")
    wide = part.double()
    return wide * wide.abs() if order == 2 else wide.abs().pow_(order).copysign_(wide)


def root(total: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """Return the norm, given the sum of the powers."""
    size = total.abs()
    return (size.sqrt_() if order == 2 else size.pow_(1 / order)).copysign_(total).to(dtype)


def identity_of(op: str, dtype: torch.dtype) -> float | int | bool:
    """Return the neutral value of a reduction."""
    order = norm_order(op)
    if order is not None:
        return 0.0 if order > 0 else float("inf")
    if op in ("sum", "avg", "bor", "bxor"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op in ("min", "band")
    if op == "band":
        return -1 if dtype.is_signed else torch.iinfo(dtype).max
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    if dtype.is_complex:
        raise RedistributeError(f"{op} is not defined for {dtype}")
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
