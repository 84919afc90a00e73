"""Parameters enter local computation: DTensor parameters in, their local parts out, gradients back.

With it any function of plain tensors is a lowering: what it computes on local parts, autograd
differentiates natively.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import DTensor
from shoal_mesh import Comm

from .._torch import is_compiling
from .gradients import SKIP, course, first_order_only, settle
from .regions import add_up, copy
from .traced import local_traced

__all__ = ["enter"]


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm | None, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.params = comm, params
        ctx.specs = tuple(getattr(param, "_spec", None) for param in params)
        ctx.set_materialize_grads(False)
        return tuple(param._local_tensor.detach() if isinstance(param, DTensor) else param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        first_order_only()
        ways, kept = [], []
        for param, grad, (node, _) in zip(ctx.params, grads, ctx.next_functions, strict=True):
            how = SKIP if grad is None or node is None else course(node, param)
            ways.append(how)
            kept.append(None if how == SKIP or grad is None else grad.contiguous())
        whole: list[Any] = add_up(kept, ctx.comm)
        for i, (param, spec, how) in enumerate(zip(ctx.params, ctx.specs, ways, strict=True)):
            if whole[i] is not None and spec is not None:
                whole[i] = settle(how, param, spec, whole[i])
        return (None, *whole)


def _traced(param: Tensor | None, comm: Comm | None) -> Tensor | None:
    if param is None:
        return None
    local = local_traced(param)
    return local if comm is None else copy(local, comm)


def enter(params: dict[str, Tensor | None], comm: Comm | None = None) -> dict[str, Tensor | None]:
    """The local parts of parameters, by name (None stays None).

    Args:
        params: DTensor or plain parameters.
        comm: given where the local gradients of these parameters are partial sums over an axis: they are summed,
            in one collective for all of them.
    """
    if is_compiling():
        return {name: _traced(param, comm) for name, param in params.items()}
    present = {name: param for name, param in params.items() if param is not None}
    local: dict[str, Tensor | None] = dict.fromkeys(params)
    if not torch.is_grad_enabled() or not any(param.requires_grad for param in present.values()):
        local.update((name, getattr(param, "_local_tensor", param)) for name, param in present.items())
        return local
    entered = _Enter.apply(comm, *present.values())  # type: ignore[no-untyped-call] # torch leaves apply untyped
    local.update(zip(present, entered, strict=True))
    return local
