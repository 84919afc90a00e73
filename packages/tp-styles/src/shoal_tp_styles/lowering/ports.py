"""Plain tensors that enter and leave a lowering; `lowered.py` declares the collectives that this takes.

columns   replicated_input   x: R | S(d) -> R, its gradient partial      sharded_output   y: S(features) -> port
rows      sharded_input      x: R | S(d) -> S(features)                  partial_output   y: P -> port, then the bias

A port that is left out is that of the lowering's first input, or output.
"""

from __future__ import annotations

from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.internal import current_arithmetic, shard_sizes
from shoal_mesh import Comm

from ..sharding.module_sharding import Port
from .boundary import from_local, leaving, local_input
from .collective_functions import (
    Sizes,
    copy,
    gather,
    gather_partial,
    reduce,
    scatter,
    sharded_dim,
    split,
    uneven_output,
)
from .lowered import Lowered
from .parameters import local_parameters


def replicated_input(lowered: Lowered, x: Tensor, port: Port | None = None) -> Tensor:
    """`R | S(d) -> R`: one input whose gradient is partial in the lowering."""
    port = port or lowered.port_in
    where = sharded_dim(port.layout, lowered.comm)
    if isinstance(x, DTensor) or (where is None and not port.layout.is_replicate()):
        if current_arithmetic() is not None:  # reduced before those of other readers are added
            return copy(local_input(x, port, lowered.mesh, grad=port.desired), lowered.comm)
        return local_input(x, port, lowered.mesh, grad=Partial())
    return copy(x, lowered.comm) if where is None else gather_partial(x, *where)


def sharded_input(
    lowered: Lowered, x: Tensor, features: int = -1, sizes: Sizes = None, *, port: Port | None = None
) -> Tensor:
    """`R | S(d) -> S(features)`: the input sharded along its features, of which each rank has its `sizes`.

    A plain input that arrives as the module needs it stays as it is; so may one that is replicated inside.
    """
    port = port or lowered.port_in
    if not isinstance(x, DTensor):
        if port.layout == port.desired:
            return x
        if port.layout.is_replicate():
            return split(x, lowered.comm, features, sizes)
    return local_input(x, port, lowered.mesh, grad=port.desired)


def sharded_output(
    lowered: Lowered, out: Tensor, features: int, size: int, sizes: Sizes, port: Port | None = None
) -> Tensor:
    """`S(features) -> port`: what leaves a module whose ranks each hold some features of the output.

    All ranks have `size` features along the dim `features`, each of them its `sizes`.
    """
    port, local = port or lowered.port_out, lowered.sharding.local_outputs
    if local and port.layout == port.desired:
        return out
    if local and port.desired.is_replicate():
        return gather(out, lowered.comm, features, sizes)
    shape = list(out.shape)
    shape[features] = size
    return leaving(lowered, out, port, shape)


def _bias(lowered: Lowered, bias: Tensor | str | None, comm: Comm | None = None) -> Tensor | None:
    if isinstance(bias, str):
        return lowered.local(bias, comm=comm)[bias]
    return local_parameters({"bias": bias}, comm)["bias"]


def partial_output(
    lowered: Lowered, partial: Tensor, bias: Tensor | str | None, features: int = -1, port: Port | None = None
) -> Tensor:
    """`P -> port`: what leaves a module whose ranks each hold a summand of the output.

    The bias, a replicated parameter or the name of one of the module's, is added after the reduction along the dim
    `features`.  Plain outputs with shards of different sizes are a LayoutError.
    """
    port, comm, local = port or lowered.port_out, lowered.comm, lowered.sharding.local_outputs
    features %= partial.ndim
    where = sharded_dim(port.desired, comm)
    if where is not None:
        _, dim, sizes = where
        dim %= partial.ndim
        shape, even = partial.shape, partial.shape[dim] % comm.size == 0
        if dim == features and sizes is None and not even:
            # 10 features on 4 ranks: 3 3 3 1; the next module knows them by its weight.
            sizes = tuple(shard_sizes(shape[dim], Shard(dim), comm.size))
        if sizes is not None or even:
            # Every rank has a shard of the output, so the gradients of the bias are partial sums.
            out, whole = scatter(partial, comm, dim, sizes), _bias(lowered, bias, comm)
            if whole is not None and dim == features:
                per_rank = sizes or (shape[dim] // comm.size,) * comm.size
                whole = whole.narrow(0, sum(per_rank[: comm.rank]), per_rank[comm.rank])
            out = _plus(out, whole, features)
            return out if local else from_local(out, port.desired, lowered.mesh, None if even else shape)
        if local:
            raise uneven_output(lowered.sharding.style, shape[dim], dim, comm)
    whole = _bias(lowered, bias)
    if isinstance(port.desired, Partial):
        if whole is not None and comm.rank > 0:  # the first rank adds it; here are zeros that take its gradient
            whole = whole - whole.detach()
        return leaving(lowered, _plus(partial, whole, features), Port(Partial(), port.desired))
    full = _plus(reduce(partial, comm), whole, features)
    if local and port.desired.is_replicate():
        return full
    return leaving(lowered, full, Port(Replicate(), port.desired))


def _plus(out: Tensor, bias: Tensor | None, features: int) -> Tensor:
    if bias is None:
        return out
    return out + bias.to(out.dtype).view(-1, *(1,) * (out.ndim - features - 1))
