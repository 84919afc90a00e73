"""Plain tensors at the ports of a lowering: what every module cut by columns or rows does on its way in and out.

columns   arrive_whole   x: R | S(d) -> R, its gradient partial      leave_cut       y: S(features) -> as wanted
rows      arrive_cut     x: R | S(d) -> S(features)                  leave_partial   y: P -> as wanted, the bias once
"""

from __future__ import annotations

from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate

from ..sharding import Port
from .boundary import arrive_local, leave, leave_local, wrap_like
from .enter import enter
from .forward import Lowered
from .regions import Sizes, axis_dim, copy, gather, gather_partial, reduce, scatter, split, uneven

__all__ = ["arrive_cut", "arrive_whole", "leave_cut", "leave_partial"]


def arrive_whole(lowered: Lowered, x: Tensor, port: Port | None = None) -> Tensor:
    """One replicated input, whose gradient is partial here.

    Args:
        lowered: the stand-in.
        x: the input.
        port: what it means; the first input's port if left out.
    """
    port = port or lowered.port_in
    where = axis_dim(port.layout, lowered.comm)
    if isinstance(x, DTensor) or (where is None and not port.layout.is_replicate()):
        return arrive_local(x, port, lowered.mesh, grad=Partial())
    return copy(x, lowered.comm) if where is None else gather_partial(x, *where)


def arrive_cut(lowered: Lowered, x: Tensor, features: int, sizes: Sizes) -> Tensor:
    """The input cut along its features, as the weight is.

    Args:
        lowered: the stand-in.
        x: the input.
        features: the dim that is cut.
        sizes: features of each rank.
    """
    port = lowered.port_in
    if not isinstance(x, DTensor):
        if port.layout == port.desired:
            return x
        if port.layout.is_replicate():
            return split(x, lowered.comm, features, sizes)
    return arrive_local(x, port, lowered.mesh, grad=port.desired)


def leave_cut(lowered: Lowered, out: Tensor, features: int, size: int, sizes: Sizes) -> Tensor:
    """What leaves a module whose ranks each hold some features of the output.

    Args:
        lowered: the stand-in; its output port says where the output goes.
        out: the rank's features.
        features: the dim that is cut.
        size: features of all ranks.
        sizes: features of each rank.
    """
    port, local = lowered.port_out, lowered.sharding.local_outputs
    if local and port.layout == port.desired:
        return out
    if local and port.desired.is_replicate():
        return gather(out, lowered.comm, features, sizes)
    shape = list(out.shape)
    shape[features] = size
    left = leave(out, port, lowered.mesh, shape)
    return leave_local(left) if local else left


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
    if local and port.desired.is_replicate():
        return whole
    left = leave(whole, Port(Replicate(), port.desired), lowered.mesh)
    return leave_local(left) if local else left


def _plus(out: Tensor, bias: Tensor | None, features: int) -> Tensor:
    if bias is None:
        return out
    return out + bias.to(out.dtype).view(-1, *(1,) * (out.ndim - features - 1))
