"""What keeps the collectives of all ranks' graphs the same, where ranks compute differently.

A compiler sees one rank's program.  It drops a collective whose result that rank does not use, though the others need
it there, and computes what does not depend on a gradient in the forward.  In eager code nothing of this does anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import is_compiling, is_exporting
from ..groups.process_groups import Comm
from .backend_calls import NAMESPACE

__all__ = ["bound", "contribution"]


def bound(tensor: Tensor, *to: Tensor) -> Tensor:
    """A tensor of which a compiler knows that it depends on others.

    Args:
        tensor: a rank's result where it uses nothing of what a collective brought, or the operand of a collective to
            which it has nothing to give.
        to: what the collective brought; what the operands of the other ranks are made of.

    Returns:
        The tensor itself; in compiled code a copy.

    Example:
        >>> totals = torch.tensor([6.0, 15.0])  # of two ranks, of which the first has nothing before it to add
        >>> bound(torch.tensor([1.0, 3.0, 6.0]), totals)
        tensor([1., 3., 6.])
    """
    if not is_compiling():
        return tensor
    nothing = [_real(other).reshape(-1)[:0].to(tensor.dtype) for other in to]
    return torch.cat([tensor.reshape(-1), *nothing]).view(tensor.shape)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def contribution(operand: Tensor, held: bool, other: float) -> Tensor:
    """`R -> P`: what a rank adds to a reduction of a tensor that all hold: its copy on one rank, a constant on others.

    A compiler drops what a constant replaces: ranks' graphs would have different collectives. So compiled code has an
    operator here that it cannot look into.

    Args:
        operand: what all ranks hold.
        held: whether this rank is the one.
        other: what the reduction ignores.

    Returns:
        A tensor of its own, shaped like the operand.

    Example:
        >>> contribution(torch.ones(2), True, 0.0), contribution(torch.ones(2), False, 0.0)
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    if is_compiling() and not is_exporting():
        Comm.run_at_first()  # defines it
        result: Tensor = getattr(torch.ops, NAMESPACE).contribution(operand, held, other)
        return result
    return operand.clone() if held else torch.full_like(operand, other)
