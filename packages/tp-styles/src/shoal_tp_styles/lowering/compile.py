"""Parameters under torch.compile: a tracer sees one operator that returns the local shard of a DTensor.

Dynamo does not look into operators, and autograd's tracer, which does, runs `_LocalShard` as Python.  So the graph
holds local computation and functional collectives only, and gradients are DTensors as they are in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import Library

from shoal_dtensor import DTensor
from shoal_dtensor.internal import local_shard

# A copy of this package in another gets operators of its own.
_NAMESPACE = __name__.split(".lowering", maxsplit=1)[0].replace(".", "_")
_LIBRARIES: list[Library] = []


class _LocalShard(Function):
    """DTensor -> its local shard.  Backward: the local gradient as a DTensor of the same spec."""

    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.spec = param.spec
        return local_shard(param).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False)


def _local(param: Tensor) -> Tensor:
    out: Tensor = _LocalShard.apply(param)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return out


def make_traceable() -> None:
    """Define the operator, once in a process; when the first module is lowered, since it cannot be while tracing."""
    if _LIBRARIES:
        return
    library: Any = Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    library.define("local(Tensor parameter) -> Tensor")
    library.impl("local", _local, "CompositeImplicitAutograd")
    _LIBRARIES.append(library)


def local_traced(param: Tensor) -> Tensor:
    """The local shard of a parameter, in code that is being traced."""
    if not isinstance(param, DTensor):
        return param
    operator: Callable[[Tensor], Tensor] = getattr(torch.ops, _NAMESPACE).local
    return operator(param)
