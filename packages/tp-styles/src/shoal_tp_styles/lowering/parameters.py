"""Parameters in local computation: DTensors in, local shards out, gradients back to `.grad`.

With `local_parameters` any function of plain tensors is a lowering: autograd differentiates its
computation.

If autograd would only accumulate a gradient, the backward adds it to the local shard of `.grad`
itself and returns None. Autograd's own path (a DTensor, a hook, a detach through dispatch) takes
10 us per parameter, as long as a small product. The leaf's accumulation node still runs, with its
hooks (such as the hooks of DDP's reducer), which find a complete `.grad`. The gradient is returned
to autograd whenever other code could observe it: with hooks of the parameter, in
`torch.autograd.grad`, for parameters that are not leaves, in compiled code, and if `.grad` has
another spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shoal_dtensor import DTensor, Spec
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    GradRoute,
    apply,
    first_order_only,
    grad_route,
    holds_tensors,
    is_compiling,
    local_shard,
    whole_when_compiled,
)
from shoal_mesh import Comm

from .._torch import use_count
from .collective_functions import sum_over_ranks

HOW_TO_QUANTIZE = (
    "To shard quantized weights, apply the plan with parallelize_module(..., lower=False) first "
    "and quantize afterwards: values and scales become shards of the same rows and columns"
)
# Most bytes of a block of rows: a product that is added to a gradient of another dtype is computed
# a block at a time.
_BLOCK_BYTES = 4 * 2**20


def deliver_grad(route: GradRoute, param: Any, spec: Spec, local: Tensor) -> DTensor | None:
    """Return the gradient for autograd, or None after adding it to `.grad`.

    Args:
        route: the destination of the gradient in this pass; not "unused".
        param: the parameter.
        spec: the parameter's spec in the forward.
        local: the local gradient; no other object refers to it.
    """
    if local.dtype is not spec.dtype:
        local = local.to(spec.dtype)
    if route == "accumulate" and param.spec is spec:
        accumulated = param.grad
        if accumulated is None:
            _set_gradient(param, spec, local)
            return None
        if _adds_to(accumulated, spec):
            # `_adds_to` has checked that it is a DTensor
            accumulated._local_tensor.add_(local)
            return None
    return DTensor.__new__(DTensor, local, spec)


def _set_gradient(param: Any, spec: Spec, local: Tensor) -> None:
    """Make a local gradient the `.grad` of a parameter that has none."""
    # Torch refuses a gradient whose dtype is not `param.grad_dtype`. The attribute is read only
    # then, because reading it is slow and few programs choose another dtype.
    try:
        param.grad = DTensor.__new__(DTensor, local, spec)
    except RuntimeError:
        dtype = param.grad_dtype
        param.grad = DTensor.__new__(DTensor, local.to(dtype), spec.with_(dtype=dtype))


def deliver_product(
    route: GradRoute, param: Any, spec: Spec, left: Tensor, right: Tensor
) -> DTensor | None:
    """Deliver the gradient `left @ right` as `deliver_grad` does.

    If `.grad` has another dtype, the product is computed and added a block of rows at a time.

    Args:
        route: as for `deliver_grad`.
        param: the parameter.
        spec: the parameter's spec in the forward.
        left: (rows of the local shard, samples).
        right: (samples, columns of the local shard).
    """
    if route != "accumulate" or param.spec is not spec:
        return deliver_grad(route, param, spec, left.mm(right))
    accumulated = param.grad
    if accumulated is None and param.grad_dtype not in (spec.dtype, None):
        zeros = left.new_zeros(left.shape[0], right.shape[1], dtype=param.grad_dtype)
        param.grad = DTensor.__new__(DTensor, zeros, spec.with_(dtype=zeros.dtype))
        accumulated = param.grad
    has_other_dtype = accumulated is not None and accumulated.dtype is not spec.dtype
    if not has_other_dtype or not _adds_to(accumulated, spec):
        return deliver_grad(route, param, spec, left.mm(right))
    row_bytes = right.shape[1] * right.element_size()
    rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    totals = torch.split(local_shard(accumulated), rows)
    for total, block in zip(totals, torch.split(left, rows), strict=True):
        total.add_(block.mm(right))
    return None


def _adds_to(accumulated: Tensor, spec: Spec) -> bool:
    """Tell whether a local gradient of this spec can be added to the local shard of `.grad`.

    The sum has the dtype of `.grad`.
    """
    if type(accumulated) is not DTensor or accumulated.requires_grad:
        return False
    return accumulated.spec is spec or accumulated.spec is spec.with_(dtype=accumulated.dtype)


# --- parameters of any function of plain tensors --------------------------------------------------


class DeliveredShards(Function):
    """Function from parameters to their local shards.

    Backward returns gradients with the parameters' specs, summed over `comm`.
    """

    @staticmethod
    def forward(ctx: Any, comm: Comm | None, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        ctx.params = params
        specs = [param.spec if isinstance(param, DTensor) else None for param in params]
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(_shard(param).detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        first_order_only()
        routes: list[GradRoute] = []
        complete: list[Tensor | None] = [None] * len(grads)
        seen: set[int] = set()
        edges = ctx.next_functions
        for i, (param, grad) in enumerate(zip(ctx.params, grads, strict=True)):
            node = edges[i][0]
            route: GradRoute = "unused"
            if grad is not None and node is not None:
                route = grad_route(node, param)
            routes.append(route)
            if grad is None or route == "unused":
                continue
            # Autograd passes one tensor as the gradient of both operands of `x + y`, and the user
            # may refer to it too. So a gradient that has other references is copied, as autograd
            # does before it makes a gradient the `.grad` of a parameter.
            is_unshared = id(grad) not in seen and (is_compiling() or use_count(grad) == 1)
            complete[i] = grad.contiguous() if is_unshared else grad.clone()
            seen.add(id(grad))
        delivered: list[Any] = sum_over_ranks(complete, ctx.comm)
        for i, (param, spec) in enumerate(zip(ctx.params, ctx.specs, strict=True)):
            if delivered[i] is not None and spec is not None:
                delivered[i] = deliver_grad(routes[i], param, spec, delivered[i])
        return None, *delivered


@whole_when_compiled
def _delivered_shards(comm: Comm | None, *params: Tensor) -> tuple[Tensor, ...]:
    """Return the local shards of parameters, as one node of compiled code.

    Gradients leave the node as DTensors, as in eager mode.
    """
    shards: tuple[Tensor, ...] = apply(DeliveredShards, comm, *params)
    return shards


def _shard(param: Tensor) -> Tensor:
    if isinstance(param, DTensor):
        return local_shard(param)
    check_plain(param)
    return param


def check_plain(param: Tensor) -> None:
    """Raise LayoutError if a plain parameter was quantized after its module was lowered."""
    if holds_tensors(param):
        raise LayoutError(
            f"a parameter of a parallel module became a {type(param).__name__}, a tensor subclass "
            f"that holds other tensors, which local computation cannot read. {HOW_TO_QUANTIZE}"
        )


def plain_error(name: str, param: Tensor) -> LayoutError:
    """Return the error of a parameter that became a plain tensor after its module was lowered."""
    check_plain(param)
    return LayoutError(
        f"the parameter {name!r} of a parallel module is a plain {type(param).__name__}; it must "
        "stay a DTensor. Call unparallelize_module to get a plain module back."
    )


def local_parameters(
    params: dict[str, Tensor | None], comm: Comm | None = None
) -> dict[str, Tensor | None]:
    """Return the local shards of parameters, by name (None stays None), with gradients.

    Args:
        params: DTensor or plain parameters.
        comm: the communicator of an axis over which the local gradients are partial sums; the
            backward sums them, in one collective for all parameters.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]))
        ...     local_parameters({"weight": weight, "bias": None})["weight"].shape
        torch.Size([2, 2])
    """
    present = {name: param for name, param in params.items() if param is not None}
    local: dict[str, Tensor | None] = dict.fromkeys(params)
    is_trained = torch.is_grad_enabled() and any(param.requires_grad for param in present.values())
    if is_trained or (is_compiling() and present):
        shards = _delivered_shards(comm, *present.values())
    else:
        shards = tuple(map(_shard, present.values()))
    local.update(zip(present, shards, strict=True))
    return local


def call_with_replaced(
    call: Callable[[], Any], *changes: tuple[dict[str, Any], Mapping[str, Any]]
) -> Any:
    """Return the result of a call during which tables of a module have other values.

    The tables hold parameters, buffers or attributes.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for table, values in changes:
            saved.append((table, {name: table[name] for name in values}))
            table.update(values)
        return call()
    finally:
        for table, before in reversed(saved):
            table.update(before)


def run_own_forward(module: nn.Module, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward with other values of its parameters, buffers and attributes.

    `values` has the values by path from the module, such as "0.weight".
    """
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for path, value in values.items():
        prefix, _, name = path.rpartition(".")
        owner = module.get_submodule(prefix) if prefix else module
        tables = (owner._parameters, owner._buffers, vars(owner))
        changes += [(table, {name: value}) for table in tables if name in table]
    forward = partial(type(module).forward, module, *args, **kwargs)
    return call_with_replaced(forward, *changes)
