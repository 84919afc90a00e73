"""Partial sums on their way out of a module: reduced, the bias added once, in the layout and form that are wanted."""

from __future__ import annotations

from torch import Tensor

from shoal_dtensor import Replicate

from ..sharding import Port
from .boundary import leave, leave_local, wrap_like
from .enter import enter
from .forward import Lowered
from .regions import axis_dim, reduce, scatter, uneven

__all__ = ["leave_partial"]


def leave_partial(lowered: Lowered, partial: Tensor, bias: Tensor | None, features: int = -1) -> Tensor:
    """What leaves a module whose ranks each hold a summand of the output.

    Args:
        lowered: the stand-in; its output port says where the output goes.
        partial: the rank's summand.
        bias: a replicated parameter, added behind the reduction.
        features: the dim of the output along which the bias lies.

    Raises:
        LayoutError: if plain outputs would be cut unevenly.
    """
    port, comm, local = lowered.port_out, lowered.comm, lowered.sharding.local_outputs
    features %= partial.ndim
    where = axis_dim(port.desired, comm)
    if where is not None and where[1] % partial.ndim != features:
        _, dim, sizes = where
        dim %= partial.ndim
        if sizes is not None or partial.shape[dim] % comm.size == 0:
            # Every rank sees a part of the output, so the gradients of the bias are partial sums.
            out = _plus(scatter(partial, comm, dim, sizes), enter({"bias": bias}, comm)["bias"], features)
            return out if local else wrap_like(out, port.desired, lowered.mesh, None)
        if local:
            raise uneven(lowered.sharding.kind, partial.shape[dim], dim, comm)
    whole = _plus(reduce(partial, comm), enter({"bias": bias})["bias"], features)
    if local and port.desired == Replicate():
        return whole
    left = leave(whole, Port(Replicate(), port.desired), lowered.mesh)
    return leave_local(left) if local else left


def _plus(out: Tensor, bias: Tensor | None, features: int) -> Tensor:
    if bias is None:
        return out
    return out + bias.to(out.dtype).view(-1, *(1,) * (out.ndim - features - 1))
