"""Differentiable moves of local tensors along one mesh axis.

A move has two steps: the first moves the tensor, the second moves the tensor's gradient in
backward. The ranks along the axis are a `Line`, and each of them calls `move` with its own tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.internal import apply, is_compiling, spmd
from shoal_mesh import (
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    reduce_scatter,
    reduce_scatter_v,
)
from shoal_mesh.internal import Pending

from .in_flight import InFlight, wait_without_gradient
from .line import Line

Kind = Literal[
    "keep", "keep_first", "slice", "pad", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
]
Sizes = tuple[int, ...] | None
_COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True)
class TypeStep:
    """One step of a move, as data.

    A step changes the spmd type of a tensor along an axis, as an all-gather changes S(0) to R.

    Attributes:
        kind: `keep` returns the tensor; `keep_first` returns it on the first rank, and zeros on the
            others; `slice` returns this rank's shard; `pad` returns a whole tensor with the shard
            at its place and zeros elsewhere; the others are collectives.
        dim: the dim that is sharded or gathered; for `all_to_all` the dim that is split.
        stacks: whether the global tensor stacks the ranks' tensors, as `torch.stack` does: `dim`
            has one entry per rank, and the tensor of one rank does not have this dim. `slice` and
            `reduce_scatter` then remove the dim, and `pad` and `all_gather` add it.
        concat_dim: for `all_to_all`, the dim along which blocks are joined.
        sizes: sizes of the ranks' shards along `dim`; None for equal ones. For `all_to_all`, the
            numbers of rows (dim 0) that this rank sends to each rank.
        received: for `all_to_all` with sizes, the numbers of rows that this rank receives from each
            rank.
        reduce_op: the reduction of `all_reduce`.
        in_place: whether `all_reduce` writes to its argument.
        in_flight: whether a collective may still be running when its result is returned.
    """

    kind: Kind
    dim: int = 0
    stacks: bool = False
    concat_dim: int = 0
    sizes: Sizes = None
    received: Sizes = None
    reduce_op: str = "sum"
    in_place: bool = False
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of a move and of the move of its gradient.

    Attributes:
        op: the dtype in which the move is done; None for the dtype of the tensor.
        out: the dtype of its result; None for the dtype of the move.
        backward_op: the dtype in which the gradient's move is done; None for the dtype of the
            incoming gradient.
        backward_out: the dtype of the gradient that backward returns; None for the dtype of the
            tensor that was moved in forward.
    """

    op: torch.dtype | None = None
    out: torch.dtype | None = None
    backward_op: torch.dtype | None = None
    backward_out: torch.dtype | None = None


UNCHANGED = Dtypes()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Collective(NamedTuple):
    """The collective of a step.

    Attributes:
        start: runs it; with `async_op=True` it returns a `Pending`.
        shaped: gives its result the shape that the step returns.
    """

    start: Callable[..., Any]
    shaped: Callable[[Tensor], Tensor] = _as_it_is


class Move(torch.autograd.Function):
    """A move along an axis; the first of its two steps runs in forward, the second in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, line: Line, steps: tuple[TypeStep, TypeStep], dtypes: Dtypes
    ) -> Tensor:
        ctx.line = line
        ctx.steps = steps
        ctx.dtypes = dtypes
        ctx.dtype = x.dtype
        step, _ = steps
        # `x` may itself be the result of a collective in flight: wait for it.
        source = wait_without_gradient(x)
        if step.in_place:
            ctx.mark_dirty(x)
            return x.copy_(run_step(step, source, line))
        if dtypes.op is not None:
            source = source.to(dtypes.op)
        if step.in_flight and _communicates(step, source, line):
            return _start(step, source, line, dtypes.out)
        moved = run_step(step, source, line)
        return moved if dtypes.out is None else moved.to(dtypes.out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        forward_step, back = ctx.steps
        forward_dtypes: Dtypes = ctx.dtypes
        dtypes = Dtypes(forward_dtypes.backward_op, forward_dtypes.backward_out or ctx.dtype)
        # The second-order gradient of this move is moved as `x` was in forward. It may be added to
        # the `.grad` of a leaf, so it is neither written in place nor still in flight.
        second_order = replace(forward_step, in_place=False, in_flight=False)
        steps = (back, second_order)
        return apply(Move, grads[0], ctx.line, steps, dtypes), None, None, None


def move(
    x: Tensor, line: Line, steps: tuple[TypeStep, TypeStep], dtypes: Dtypes | None = None
) -> Tensor:
    """Run a differentiable move.

    The checker of spmd types does not check the operators of the move. The caller checks the type
    of `x`, and gives the result its type.

    Args:
        x: this rank's tensor.
        line: the ranks.
        steps: the step of the tensor, and the step of the gradient.
        dtypes: the dtypes of both moves.
    """
    arguments = (x, line, steps, dtypes or UNCHANGED)
    if not spmd.is_active():
        return cast(Tensor, apply(Move, *arguments))
    with spmd.paused():
        return cast(Tensor, apply(Move, *arguments))


def run_step(step: TypeStep, x: Tensor, line: Line) -> Tensor:
    """Return this rank's result of a step.

    Args:
        step: the step.
        x: this rank's tensor.
        line: the ranks.
    """
    if step.kind == "keep":
        return x.view_as(x)
    if step.kind == "keep_first":
        return x.clone() if line.rank == 0 else torch.zeros_like(x)
    if step.kind == "slice":
        return _own_shard(step, x, line)
    if step.kind == "pad":
        return _pad(step, x, line)
    # The other kinds are collectives. A single rank and tensors without memory send nothing.
    if not line.must_send(x):
        return _run_alone(step, x, line)
    collective = _collective(step, x, line)
    return collective.shaped(collective.start())


def _communicates(step: TypeStep, x: Tensor, line: Line) -> bool:
    """Return whether a step runs a collective that can be in flight.

    Under a compiler it cannot: the compiler places the waits of collectives by itself.
    """
    return step.kind in _COLLECTIVES and line.must_send(x) and not is_compiling()


def _start(step: TypeStep, x: Tensor, line: Line, dtype: torch.dtype | None) -> Tensor:
    """Start a collective, and return its result in flight, in a dtype."""
    collective = _collective(step, x, line)
    pending: Pending[Tensor] = collective.start(async_op=True).then(collective.shaped)
    # `InFlight` takes the dtype and the device of the result from this tensor.
    like = x
    if dtype is not None:
        pending = pending.then(lambda moved: moved.to(dtype))
        like = x.new_empty(0, dtype=dtype)
    return InFlight(pending, _shape_after(step, x, line), like)


def _shape_after(step: TypeStep, x: Tensor, line: Line) -> list[int]:
    """Return the shape of this rank's result of a collective."""
    shape = [*x.shape]
    if step.kind == "all_gather":
        if step.stacks:
            shape.insert(step.dim, line.size)
        elif step.sizes is None:
            shape[step.dim] *= line.size
        else:
            shape[step.dim] = sum(step.sizes)
    elif step.kind == "reduce_scatter":
        if step.stacks:
            del shape[step.dim]
        else:
            shape[step.dim] = _sizes(step, x, line)[line.rank]
    elif step.kind == "all_to_all":
        if step.received is None:
            shape[step.dim] //= line.size
            shape[step.concat_dim] *= line.size
        else:
            shape[0] = sum(step.received)
    return shape


def _own_shard(step: TypeStep, x: Tensor, line: Line) -> Tensor:
    """Return this rank's shard of a whole tensor, or its entry of the dim that ranks stack."""
    if step.stacks:
        return x.select(step.dim, line.rank).clone()
    sizes = _sizes(step, x, line)
    start = sum(sizes[: line.rank])
    return x.narrow(step.dim, start, sizes[line.rank]).clone()


def _pad(step: TypeStep, x: Tensor, line: Line) -> Tensor:
    """Return a whole tensor of zeros with this rank's shard in its place."""
    source = x.unsqueeze(step.dim) if step.stacks else x
    sizes = step.sizes
    if sizes is None:
        sizes = (source.shape[step.dim],) * line.size
    shape = [*source.shape]
    shape[step.dim] = sum(sizes)
    padded = source.new_zeros(shape)
    start = sum(sizes[: line.rank])
    place = padded.narrow(step.dim, start, sizes[line.rank])
    place.copy_(source)
    return padded


def _sizes(step: TypeStep, x: Tensor, line: Line) -> Sequence[int]:
    """Return the sizes of the ranks' shards of a whole tensor, which add up to its size."""
    length = x.shape[step.dim]
    if step.sizes is not None:
        if len(step.sizes) != line.size or sum(step.sizes) != length:
            raise ArgumentValueError(
                f"split_sizes must be one size for each of the {line.size} ranks along "
                f"{line.axis!r}, and add up to {length}, the size of dim {step.dim} of "
                f"{tuple(x.shape)}; got {step.sizes}"
            )
        return step.sizes
    if length % line.size:
        raise ArgumentValueError(
            f"dim {step.dim} of {tuple(x.shape)} is not a multiple of the {line.size} ranks along "
            f"{line.axis!r}; pad the dim, or pass split_sizes to a collective with this argument"
        )
    return (length // line.size,) * line.size


def _run_alone(step: TypeStep, x: Tensor, line: Line) -> Tensor:
    """Return the result of a collective without sending anything.

    For a single rank, the result is right. For tensors without memory, it has the right shape.
    """
    if step.kind == "all_reduce":
        return x.clone()
    if step.kind == "all_gather":
        if step.stacks:
            return torch.stack([x] * line.size, step.dim)
        if step.sizes is None:
            return torch.cat([x] * line.size, step.dim)
        if line.size == 1:
            # The only shard is the whole tensor.
            return _own_shard(step, x, line)
        shape = [*x.shape]
        shape[step.dim] = sum(step.sizes)
        return x.new_empty(shape)
    if step.kind == "reduce_scatter":
        return _own_shard(step, x, line)
    if step.received is not None:
        if line.size > 1:
            return x.new_empty([sum(step.received), *x.shape[1:]])
        if step.received != step.sizes:
            raise ArgumentValueError(
                f"a single rank along {line.axis!r} receives the rows that it sends: "
                f"output_split_sizes must be {step.sizes}, got {step.received}"
            )
        return x.clone()
    # Equal blocks: (4, 6) over 2 ranks with dims 0 and 1 becomes (2, 12).
    _check_divides(x, step.dim, line.size)
    blocks = x.chunk(line.size, step.dim)
    return torch.cat(blocks, step.concat_dim)


def _check_divides(x: Tensor, dim: int, size: int) -> None:
    if x.shape[dim] % size:
        raise ArgumentValueError(
            f"all_to_all splits dim {dim} of {tuple(x.shape)}, which is not a multiple of {size}"
        )


def _collective(step: TypeStep, x: Tensor, line: Line) -> _Collective:
    """Return the collective of a step."""
    comm = line.comm
    assert comm is not None, "a line that sends needs a communicator"
    if step.kind == "all_reduce":
        return _Collective(partial(all_reduce, x, comm, step.reduce_op))
    if step.kind == "all_gather":
        if step.stacks:
            return _Collective(partial(all_gather, x.unsqueeze(step.dim), comm, step.dim))
        if step.sizes is not None:
            return _Collective(partial(all_gather_v, x, comm, step.sizes, step.dim))
        return _Collective(partial(all_gather, x, comm, step.dim))
    if step.kind == "reduce_scatter":
        if step.stacks:
            start = partial(reduce_scatter, x, comm, step.dim)
            return _Collective(start, lambda entry: entry.squeeze(step.dim))
        if step.sizes is not None:
            return _Collective(partial(reduce_scatter_v, x, comm, step.sizes, step.dim))
        return _Collective(partial(reduce_scatter, x, comm, step.dim))
    assert step.kind == "all_to_all", f"no collective {step.kind}"
    if step.sizes is None or step.received is None:
        return _Collective(partial(all_to_all, x, comm, step.dim, step.concat_dim))
    # Rows are exchanged as flat elements: with rows of shape (3, 2), 5 rows are 30 elements.
    row_shape = x.shape[1:]
    row_elements = prod(row_shape)
    shape = (sum(step.received), *row_shape)
    sent = [rows * row_elements for rows in step.sizes]
    received = [rows * row_elements for rows in step.received]
    start = partial(all_to_all_v, x.reshape(-1), comm, sent, received)
    return _Collective(start, lambda flat: flat.reshape(shape))
