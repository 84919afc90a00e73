"""SPMD types of the autograd functions of losses and of mixtures of experts.

The checker of SPMD types uses them if a program on plain tensors, without DTensors, calls these
functions.

A type describes a tensor along one mesh axis (`shoal_dtensor.spmd.types.axis_types`). R and I are
equal on all ranks, and with I the ranks also compute the same with the tensor. V may differ between
ranks, P is an addend of a pending sum, and S(dim) is a shard along a tensor dim.

A loss over a sharded vocabulary sums the ranks' terms itself, and all ranks continue with the same
number. Therefore its result has the type I. If it sums the gradient of an operand over the ranks
too, this operand has the type I.

May import: experts, losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, ShardType as Shard, V, spmd
from shoal_mesh import Comm

from .experts.token_route import ArrivedRows, ExpertExchange, StartedExchange
from .losses.functional import LogSoftmaxFunction, RowStatisticsFunction
from .losses.linear_cross_entropy import LinearStatisticsFunction


def _check_shard(tensor: Tensor, comm: Comm, dim: int, call: str) -> None:
    """Raise SpmdTypeError unless a tensor has the type S(dim), or V, which uneven shards have.

    A tensor without a type is not checked.
    """
    axis = spmd.normalize_axis(comm)
    present = spmd.type_of(tensor)
    if present is None or present.by_axis.get(axis) is V:
        return
    spmd.check_source(tensor, axis, Shard(dim), call)


def _set_moved(outputs: Any, tensor: Tensor, comm: Comm, axis_type: spmd.AnyAxisType) -> None:
    """Give outputs the type of a tensor, with another type along one axis.

    Outputs have the leading dims of the tensor. If another axis shards a dim of the tensor, it
    shards the same dim of the outputs.
    """
    axis = spmd.normalize_axis(comm)
    present = spmd.type_of(tensor)
    # Along an axis of one rank types are not checked, so they do not change.
    after = (
        present.with_axis(axis, axis_type) if present is not None and axis.size() > 1 else present
    )
    for output in spmd.tensors_in(outputs):
        spmd.set_type(output, after)


def _declare_statistics(outputs: Any, args: tuple[Any, ...]) -> None:
    # the arguments of RowStatisticsFunction: logits, targets, weights q, vocabulary
    logits, _, _, vocab = args
    if spmd.type_of(logits) is None:
        return
    _check_shard(logits, vocab.comm, logits.ndim - 1, "a loss over a sharded vocabulary")
    _set_moved(outputs, logits, vocab.comm, I)


def _declare_log_softmax(outputs: Any, args: tuple[Any, ...]) -> None:
    logits, vocab = args
    if spmd.type_of(logits) is None:
        return
    _check_shard(logits, vocab.comm, logits.ndim - 1, "log_softmax over a sharded vocabulary")
    spmd.set_type(outputs, spmd.type_of(logits))


def _declare_linear_statistics(outputs: Any, args: tuple[Any, ...]) -> None:
    # the arguments of LinearStatisticsFunction: rows, weight, bias, targets, weights q, blocks
    rows, weight, _, _, _, blocks = args
    if spmd.type_of(rows) is None:
        return
    comm = blocks.vocab.comm
    spmd.check_source(rows, spmd.normalize_axis(comm), I, "linear_cross_entropy")
    _check_shard(weight, comm, 0, "the weight of linear_cross_entropy")
    _set_moved(outputs, rows, comm, I)


def _declare_started(outputs: Any, args: tuple[Any, ...]) -> None:
    rows, exchange, _ = args
    _declare_exchange(outputs, rows, exchange)


def _declare_arrived(outputs: Any, args: tuple[Any, ...]) -> None:
    # This tensor without elements stands for the rows in flight, and has their type.
    rows_in_flight, exchange, _ = args
    _declare_exchange(outputs, rows_in_flight, exchange)


def _declare_exchange(outputs: Any, rows: Tensor, exchange: ExpertExchange) -> None:
    """Give the type V to the rows that experts get.

    The values of the router decide which rows a rank gets, so the rows are not S(0).
    """
    present = spmd.type_of(rows)
    if present is None:
        return
    axis = spmd.normalize_axis(exchange.comm)
    axis_type = present.by_axis.get(axis, V)
    if not isinstance(axis_type, Shard) and axis_type is not V:
        raise SpmdTypeError(
            f"{spmd.user_line()}: an exchange of tokens with experts takes each rank's own rows, V "
            f"or S(0) over {axis!r}, and got {axis_type}"
        )
    _set_moved(outputs, rows, exchange.comm, V)


# An error names the line of the user's program, not a line of this package.
spmd.hide_frames_of(str(Path(__file__).parent))
spmd.declare_types(RowStatisticsFunction, _declare_statistics)
spmd.declare_types(LogSoftmaxFunction, _declare_log_softmax)
spmd.declare_types(LinearStatisticsFunction, _declare_linear_statistics)
spmd.declare_types(StartedExchange, _declare_started)
spmd.declare_types(ArrivedRows, _declare_arrived)
