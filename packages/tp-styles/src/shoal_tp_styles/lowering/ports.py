"""Plain tensors that enter and leave a lowering, and the collectives that this takes, declared beside the code.

columns   replicated_input   x: R | S(d) -> R, its gradient partial      sharded_output   y: S(features) -> port
rows      sharded_input      x: R | S(d) -> S(features)                  partial_output   y: P -> port, then the bias

A port that is left out is that of the lowering's first input, or output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.internal import current_arithmetic, shard_sizes
from shoal_mesh import Comm

from ..sharding.module_sharding import Collective, ModuleCall, Port
from .boundary import from_local, leaving, local_input, port_moves
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


def declares(*parts: Callable[[ModuleCall], Iterable[Collective]]) -> Any:
    """`collectives` of a lowering: those of its inputs and outputs, in order."""
    return classmethod(lambda cls, call: (collective for part in parts for collective in part(call)))


def replicated_input(lowered: Lowered, x: Tensor, port: Port | None = None) -> Tensor:
    """`R | S(d) -> R`: one input whose gradient is partial in the lowering."""
    port = port or lowered.port_in
    where = sharded_dim(port.layout, lowered.comm)
    if isinstance(x, DTensor) or (where is None and not port.layout.is_replicate()):
        if current_arithmetic() is not None:  # reduced before those of other readers are added
            return copy(local_input(x, port, lowered.mesh, grad=port.desired), lowered.comm)
        return local_input(x, port, lowered.mesh, grad=Partial())
    return copy(x, lowered.comm) if where is None else gather_partial(x, *where)


def declare_replicated_input(call: ModuleCall, index: int = 0) -> Iterator[Collective]:
    """What `replicated_input` runs: readers of one activation share the gather, and the reduction of its gradient."""
    x, layout = call.input(index), call.sharding.input_port(index).layout
    if x is None:
        return
    once = None if x.is_leaf and x.requires_grad else (id(x), layout)
    size = nbytes(x)
    if not layout.is_replicate():
        yield Collective("all_gather" if isinstance(layout, Shard) else "all_reduce", size, once_for=once)
    if x.requires_grad:
        op = "reduce_scatter" if isinstance(layout, Shard) else "all_reduce"
        yield Collective(op, size, backward=True, once_for=once)


def own_input(lowered: Lowered, x: Tensor, port: Port | None = None) -> Tensor:
    """What a module reads whose plain inputs arrive as it needs them: those, or the local shard of a DTensor."""
    port = port or lowered.port_in
    return local_input(x, port, lowered.mesh, grad=port.desired) if isinstance(x, DTensor) else x


def sharded_input(lowered: Lowered, x: Tensor, features: int, sizes: Sizes, port: Port | None = None) -> Tensor:
    """`R | S(d) -> S(features)`: the input sharded along its features; `sizes` are those of each rank."""
    port = port or lowered.port_in
    if not isinstance(x, DTensor):
        if port.layout == port.desired:
            return x
        if port.layout.is_replicate():
            return split(x, lowered.comm, features, sizes)
    return local_input(x, port, lowered.mesh, grad=port.desired)


def declare_sharded_input(call: ModuleCall) -> Iterator[Collective]:
    """What `sharded_input` runs."""
    yield from port_moves(call.sharding.input_port(), call.input())


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


def declare_sharded_output(call: ModuleCall) -> Iterator[Collective]:
    """What `sharded_output` runs."""
    yield from port_moves(call.sharding.output_port(), call.output)


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


def declare_partial_output(call: ModuleCall, bias: str | None = None, features: int = -1) -> Iterator[Collective]:
    """What `partial_output` runs; the gradients of a bias are summed where the output is sharded."""
    desired, out = call.sharding.output_port().desired, call.output
    size = nbytes(out)
    if isinstance(desired, Partial):
        return
    if not isinstance(desired, Shard):
        yield Collective("all_reduce", size)
        return
    dim = desired.dim % out.ndim
    known = dim == features % out.ndim or desired.sizes is not None or out.shape[dim] % call.ranks == 0
    yield Collective("reduce_scatter" if known else "all_reduce", size)
    if out.requires_grad:
        yield Collective("all_gather", size, backward=True)
    if known and bias is not None:
        yield from declare_summed_gradients(call.trained(bias))


def declare_summed_gradients(params: Iterable[nn.Parameter]) -> Iterator[Collective]:
    """What `local_parameters(..., comm)` runs: one all-reduce for the gradients of each dtype."""
    by_dtype: dict[object, list[Tensor]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    for same in by_dtype.values():
        yield Collective("all_reduce", nbytes(*same), backward=True)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the values of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _plus(out: Tensor, bias: Tensor | None, features: int) -> Tensor:
    if bias is None:
        return out
    return out + bias.to(out.dtype).view(-1, *(1,) * (out.ndim - features - 1))
