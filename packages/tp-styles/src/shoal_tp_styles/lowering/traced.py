"""Parameters under torch.compile: a tracer sees one operator that gives the local part of a DTensor.

Dynamo does not look into operators, and autograd's tracer, which does, runs `Local` as Python.  So the graph holds
local computation and functional collectives only, and gradients come back as DTensors as they do in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import Library

from shoal_dtensor import DTensor

__all__ = ["local_traced", "make_traceable"]

# A copy of this package in another gets operators of its own.
_SPACE = __name__.split(".lowering", maxsplit=1)[0].replace(".", "_")
_KEPT: list[Library] = []


class Local(Function):
    """DTensor -> its local part.  Backward: the local gradient as a DTensor of the same spec."""

    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.spec = param._spec
        return param._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False)


def _local(param: Tensor) -> Tensor:
    out: Tensor = Local.apply(param)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return out


def make_traceable() -> None:
    """Define the operator, once in a process; when the first module is lowered, since nobody can while tracing."""
    if _KEPT:
        return
    library: Any = Library(_SPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    library.define("local(Tensor parameter) -> Tensor")
    library.impl("local", _local, "CompositeImplicitAutograd")
    _KEPT.append(library)


def local_traced(param: Tensor) -> Tensor:
    """The local part of a parameter, in code that is being traced."""
    if not isinstance(param, DTensor):
        return param
    operator: Callable[[Tensor], Tensor] = getattr(torch.ops, _SPACE).local
    return operator(param)
