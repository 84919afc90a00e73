"""Gradients of a Linear's parameters, and what its backward keeps: common to column-wise and row-wise layers."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from shoal_dtensor import DTensor
from shoal_dtensor.internal import grad_route

from ..lowering.parameters import check_plain, deliver_grad, deliver_product


def note_parameters(ctx: Any, weight: DTensor, bias: DTensor | None) -> None:
    """Keep the parameters for the backward, with their present specs."""
    ctx.params = weight, bias
    try:
        ctx.specs = weight.spec, None if bias is None else bias.spec
    except AttributeError:
        check_plain(weight)
        raise


def save_operands(ctx: Any, x: Tensor, w: Tensor) -> None:
    """Keep what the backward reads: a frozen weight needs no input, an input without gradient no weight."""
    needs_input, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weight else None, w if needs_input else None)


def weight_grads(ctx: Any, grad: Tensor, x: Tensor) -> tuple[DTensor | None, DTensor | None]:
    """Gradients of weight and bias from local dy (..., out) and x (..., in); None for those added to `.grad`."""
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    weight_grad = bias_grad = None
    if not needs_weight and not needs_bias:
        return None, None
    weight, bias = ctx.params
    weight_spec, bias_spec = ctx.specs
    edges = ctx.next_functions
    if grad.ndim != 2:
        grad = grad.reshape(prod(grad.shape[:-1]), grad.shape[-1])  # not by -1: the shard may have no features
    if needs_weight:
        route = grad_route(edges[1][0], weight)
        if route != "unused":
            if x.ndim != 2:
                x = x.reshape(prod(x.shape[:-1]), x.shape[-1])
            weight_grad = deliver_product(route, weight, weight_spec, grad.t(), x)
    if needs_bias:
        route = grad_route(edges[2][0], bias)
        if route != "unused":
            bias_grad = deliver_grad(route, bias, bias_spec, grad.sum(0))
    return weight_grad, bias_grad
