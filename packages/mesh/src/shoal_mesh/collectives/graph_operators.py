"""Operators by which compiled code runs the eager collectives on gloo and on Python groups.

The functional collectives of torch call gloo, whose latency dominates a small step: an all-reduce
of 1 KiB takes 500 us between two ranks of one host, and 60 us by the operators here. Observers and
the recorder record them like eager collectives. The code that inductor generates calls the function
of an operator directly, as the operator's attribute `run`, without torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import _torch
from ..groups.process_groups import Comm
from .even import all_gather, all_reduce, broadcast, reduce_scatter
from .graph_dependences import NAMESPACE
from .uneven import all_to_all_v

# Declared mutable state: group name -> communicator over the group that has this name now. Graphs
# refer to groups by name and may run at any time, so entries are kept.
_COMMS: dict[str, Comm] = {}


def _comm(name: str) -> Comm:
    """Return the communicator of a group's ranks in the order of the group.

    The graph has already put the blocks in that order.
    """
    group = _torch.group_by_name(name)
    comm = _COMMS.get(name)
    if comm is None or comm._group is not group:
        comm = Comm.over(group, ("group",), _torch.ranks_in_order(group))
        _COMMS[name] = comm
    return comm


def _rows(operand: Tensor, count: int) -> Tensor:
    """Return an empty result with another number of rows, for compilers."""
    return operand.new_empty((count, *operand.shape[1:]))


def _exchange_rows(operand: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Exchange blocks of rows, (sum(send), ...) -> (sum(receive), ...)."""
    row_shape = operand.shape[1:]
    row_elements = prod(row_shape)
    send_counts = [rows * row_elements for rows in send]
    receive_counts = [rows * row_elements for rows in receive]
    flat = all_to_all_v(operand.reshape(-1), _comm(group), send_counts, receive_counts)
    return flat.view(sum(receive), *row_shape)


def _empty_result(operand: Tensor, *_: object) -> Tensor:
    """Return an empty result with the shape of the operand, for compilers."""
    return operand.new_empty(operand.shape)


# Schema -> the function that runs, and the function that returns an empty result for compilers.
# Results are contiguous, and blocks are in the order of the group.
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce(Tensor operand, str op, str group) -> Tensor": (
        lambda operand, op, group: all_reduce(operand.contiguous(), _comm(group), op),
        _empty_result,
    ),
    "all_gather_into_tensor(Tensor operand, int size, str group) -> Tensor": (
        lambda operand, size, group: all_gather(operand, _comm(group)),
        lambda operand, size, group: _rows(operand, operand.shape[0] * size),
    ),
    "reduce_scatter_tensor(Tensor operand, str op, int size, str group) -> Tensor": (
        lambda operand, op, size, group: reduce_scatter(operand, _comm(group), op=op),
        lambda operand, op, size, group: _rows(operand, operand.shape[0] // size),
    ),
    "all_to_all_single(Tensor operand, SymInt[] receive, SymInt[] send, str group) -> Tensor": (
        _exchange_rows,
        lambda operand, receive, send, group: _rows(operand, sum(receive)),
    ),
    "contribution(Tensor operand, bool held, Scalar other) -> Tensor": (
        lambda operand, held, other: operand.clone() if held else torch.full_like(operand, other),
        lambda operand, *_: torch.empty_like(operand),
    ),
    "broadcast(Tensor operand, int root, str group) -> Tensor": (
        lambda operand, root, group: broadcast(operand.contiguous(), _comm(group), root),
        _empty_result,
    ),
}


def _shape_of(name: str, shape: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that gives compilers the shape of an operator's result.

    The function also has inductor keep the operator in order (`kept_in_order`). It does so here
    because inductor, if it compiles, is loaded when a compiler calls the function.
    """

    def trace(*arguments: Any) -> Tensor:
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        _torch.kept_in_order(packet.default, f"torch.ops.{NAMESPACE}.{name}.run")
        return shape(*arguments)

    return trace


# Declared mutable state: the library. torch removes its operators when the library is freed.
_LIBRARIES: list[Any] = []


def define_operators() -> None:
    """Register the operators with torch."""
    library: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
    for schema, (run, shape) in OPERATORS.items():
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        library.impl(name, _shape_of(name, shape), "Meta")
        getattr(getattr(torch.ops, NAMESPACE), name).run = run
    _LIBRARIES.append(library)
