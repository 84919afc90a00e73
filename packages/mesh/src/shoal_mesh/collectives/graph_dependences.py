"""Dependences that keep the collectives of all ranks' graphs equal if ranks compute differently.

A compiler sees the program of one rank. If the rank does not use the result of a collective, the
compiler drops the collective, although other ranks wait for this rank in it. The compiler also
merges two collectives that are equal on this rank, and moves operations between forward and
backward if that saves memory for the sizes of this rank. The functions here prevent these changes.
In eager code they have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from .._torch import functional, has_tangent, is_compiling, is_exporting, is_traced, tree_leaves
from ..errors import CollectiveError
from ..groups.process_groups import Comm
from ..transport import Pending, split_divisor

NAMESPACE = __name__.split(".collectives", maxsplit=1)[0].replace(".", "_")
"""Namespace of the operators for compiled code (`graph_operators`).

A copy of this package in another package has its own namespace.
"""

# larger than any dim, so that `tensor[-number:]` is the whole tensor
_slice_numbers = count(1 << 40)


def in_graph(name: str, operand: Tensor, comm: Comm, *arguments: object) -> Pending:
    """Add a functional collective, and the wait for its result, to the graph of a compiler.

    On gloo the operator is this package's, which is faster than torch's. The same holds for groups
    that are written in Python, because C++ cannot call them. On other groups, and in exported
    programs, which run without this package, it is torch's operator.
    """
    if not is_compiling() and has_tangent(operand):
        raise CollectiveError(
            "collectives do not support forward-mode derivatives, but the tensor has a tangent"
        )
    after = 1.0
    if _has_own_operator(operand, comm):
        operators = getattr(torch.ops, NAMESPACE)
    else:
        operators = functional
        if arguments[:1] == ("avg",):
            # an average of a half type, which backends sum in this type
            before, after = split_divisor(operand.dtype, comm.size)
            operand = operand if before == 1 else operand * before
            arguments = ("sum", *arguments[1:])
    collective = getattr(operators, name)
    result = in_its_pass(collective, distinct(operand), *arguments, comm.name)
    pending = Pending(functional.wait_tensor(result), None)
    return pending if after == 1 else pending.then(lambda total: total * after)


def _has_own_operator(operand: Tensor, comm: Comm) -> bool:
    """Return whether this package's operator carries a tensor, not torch's."""
    if is_exporting():
        return False
    return comm.in_python or (comm.on_gloo and operand.is_cpu)


def distinct(tensor: Tensor) -> Tensor:
    """Return the input of a functional collective as an expression that is unique in the graph.

    The compiler merges calls with equal inputs, on the assumption that all ranks have the same
    graph. Graphs may differ: two shards that are empty on this rank are equal here, and differ on
    other ranks. A slice with a number that no other call uses makes the inputs different
    expressions (inductor would drop a slice from 0). While Dynamo traces the program of the user,
    equal inputs are equal on all ranks, so the tensor is returned as it is.
    """
    if tensor.ndim == 0 or torch.compiler.is_dynamo_compiling():
        return tensor
    return tensor[-next(_slice_numbers) :]


def in_its_pass(collective: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return the result of a functional collective such that it stays in the backward.

    This concerns collectives that a compiler traces in the backward. The partitioner moves an
    operation that does not depend on a gradient into the forward if that saves memory for the sizes
    of this rank's tensors. Other ranks may have other sizes, and their graphs would keep the
    operation in the backward. A collective with symbols among its arguments is not marked, because
    the symbols may belong to the forward and would have to stay too.
    """
    if torch.compiler.is_dynamo_compiling():
        return collective(*arguments)
    if any(type(leaf) is torch.SymInt for leaf in tree_leaves(arguments)):
        return collective(*arguments)
    meta = torch.fx.traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        return collective(*arguments)
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        return collective(*arguments)
    finally:
        meta["partitioner_tag"] = "is_backward"


def with_dependence(tensor: Tensor, *to: Tensor) -> Tensor:
    """Return the tensor; in compiled code, a copy that depends on another tensor for the compiler.

    Args:
        tensor: a result that does not use the result of a collective on this rank, or an operand to
            which this rank contributes nothing.
        to: the result of the collective, or the tensors from which other ranks compute the operand.

    Example:
        Cumulative sums of two ranks, of which the first has nothing before it to add:

        >>> totals = torch.tensor([6.0, 15.0])
        >>> with_dependence(torch.tensor([1.0, 3.0, 6.0]), totals)
        tensor([1., 3., 6.])
    """
    if not is_traced(tensor):
        return tensor
    parts = [tensor.reshape(-1)]
    for other in to:
        values = torch.view_as_real(other.resolve_conj()) if other.is_complex() else other
        # a tensor without elements that still depends on the other tensor
        empty = values.reshape(-1)[:0]
        parts.append(empty.to(tensor.dtype))
    return torch.cat(parts).view(tensor.shape)


def contribution(operand: Tensor, held: bool, other: float) -> Tensor:
    """Return this rank's term of a reduction of a tensor that all ranks hold, `R -> P`.

    The term is a copy of the tensor on one rank, and a constant on the others. A compiler drops
    operations whose result a constant replaces, so ranks' graphs would have different collectives.
    Compiled code therefore has an opaque operator here.

    Args:
        operand: the tensor that all ranks hold.
        held: whether this rank is the one that contributes the tensor.
        other: the constant of the other ranks, which the reduction ignores: 0 for a sum.

    Example:
        >>> contribution(torch.ones(2), True, 0.0), contribution(torch.ones(2), False, 0.0)
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    if is_traced(operand) and not is_exporting():
        # registers the operator
        Comm.prepare_first_use()
        result: Tensor = getattr(torch.ops, NAMESPACE).contribution(operand, held, other)
        return result
    return operand.clone() if held else torch.full_like(operand, other)
