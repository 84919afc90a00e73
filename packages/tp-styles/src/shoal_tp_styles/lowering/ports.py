"""Layout changes of the tensors that enter and leave a module.

A DTensor can change between any two layouts; `DTensorForward`, which runs a module's own forward,
uses this for DTensor inputs and unusual layouts. The usual changes of plain tensors are direct
collectives:

columns   replicated_input   x: R | S(d) -> R, its gradient partial
          sharded_output     y: S(features) -> port
rows      sharded_input      x: R | S(d) -> S(features)
          partial_output     y: P -> port, then the bias

Without the argument `port`, these functions use the port of the lowering's first input or output.
`lowered.py` declares the collectives of these changes for previews.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    current_arithmetic,
    current_watch,
    global_stride,
    is_compiling,
    replicas_are_compared,
    shard_sizes,
    unwatched_functions,
)
from shoal_mesh import DeviceMesh, check_replicas

from ..sharding.module_sharding import Collective, ModuleCall, Port
from .collective_functions import (
    Sizes,
    gather,
    own_shard,
    reduce,
    scatter,
    sharded_dim,
    split,
    uneven_output,
)
from .lowered import Lowered, collectives_of_move
from .parameters import local_parameters
from .shared_reduction import copy, gather_partial


def input_dtensor(tensor: Tensor, port: Port, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor in the port's desired layout; a plain tensor has the port's `layout`."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise LayoutError(f"the input is on {tensor.device_mesh}, but the module is on {mesh}")
        return _redistribute(tensor, port.desired)
    if isinstance(tensor, Tensor):
        return _redistribute(from_local(tensor, port.layout, mesh), port.desired)
    raise LayoutError(
        f"layout {port.layout} is given for a {type(tensor).__name__}; use None for values that "
        "are not tensors"
    )


def _redistribute(tensor: DTensor, placement: Placement) -> DTensor:
    if isinstance(placement, Shard) and placement.dim < 0:
        placement = placement.on_dim(placement.dim + tensor.ndim)
    placements = (placement,)
    if tensor.placements == placements:
        return tensor
    return tensor.redistribute(placements=placements)


def local_input(tensor: Tensor, port: Port, mesh: DeviceMesh, grad: Placement) -> Tensor:
    """Return the local shard of an input in the port's desired layout.

    `grad` is the placement of the gradient that the computation returns for the shard.
    """
    return input_dtensor(tensor, port, mesh).to_local(grad_placements=(grad,))


def module_output(
    lowered: Lowered, tensor: Tensor, port: Port, shape: Sequence[int] | None = None
) -> Tensor:
    """Return an output in the port's desired layout: a DTensor, or its local shard.

    The style determines whether plain tensors leave.

    `shape` is the global shape of a plain tensor if ranks may hold shards of different sizes.
    """
    if not isinstance(tensor, DTensor):
        tensor = from_local(tensor, port.layout, lowered.mesh, shape)
    output = _redistribute(tensor, port.desired)
    sharding = lowered.sharding
    return local_output(output, sharding.style) if sharding.local_outputs else output


def local_output(tensor: DTensor, style: str, source: Tensor | None = None) -> Tensor:
    """Return the local shard of an output.

    `source` is the plain tensor from which the output was made, if both have the same layout on
    other axes.
    """
    (placement,) = tensor.placements
    # If the last dim, the features, is sharded, the next module knows the sizes of the shards from
    # its weight. It cannot know the sizes of shards of other dims.
    if isinstance(placement, Shard) and placement.sizes is None:
        dim = placement.dim
        if dim < tensor.ndim - 1 and not tensor.spec.even:
            raise uneven_output(style, tensor.shape[dim], dim, tensor.device_mesh.comm(0))
    # The consumer of a replicated or partial plain tensor returns a replicated gradient.
    grad: Placement = Replicate() if isinstance(placement, Partial) else placement
    local = tensor.to_local(grad_placements=(grad,))
    watch = None if is_compiling() else current_watch()
    if watch is not None:
        watch.axes.note_spec(local, tensor.spec, source)
    return local


def from_local(
    tensor: Tensor, placement: Placement, mesh: DeviceMesh, shape: Sequence[int] | None = None
) -> DTensor:
    """Wrap a plain local shard as a DTensor.

    `shape` is the global shape if shards may differ in size.
    """
    stride = None if shape is None else global_stride(tensor, shape)
    return DTensor.from_local(tensor, mesh, (placement,), shape=shape, stride=stride)


class DTensorForward(Lowered):
    """Forward on DTensors: the module's own forward, or the forward of an earlier style.

    The inputs are brought to the layouts of their ports before the call, and the outputs after it.
    """

    sampling: ClassVar[Literal["watched"]] = "watched"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharding = self.sharding
        module = self.module
        if isinstance(module, nn.EmbeddingBag):
            offsets = args[1] if len(args) > 1 else kwargs.get("offsets")
            self._check_offsets(offsets)
        args = self._in_layouts(args, sharding.inputs, self._enter, "inputs")
        for name, port in sharding.keywords.items():
            if name in kwargs:
                kwargs[name] = self._enter(kwargs[name], port)
        if self.inner is not None:
            out = self.inner(*args, **kwargs)
        else:
            out = type(module).forward(module, *args, **kwargs)
        if sharding.outputs is None:
            return out
        if not isinstance(out, (tuple, list)):
            (result,) = self._in_layouts((out,), sharding.outputs, self._leave, "outputs")
            return result
        results = self._in_layouts(tuple(out), sharding.outputs, self._leave, "outputs")
        # the class of a named tuple takes other arguments, so a plain tuple is returned
        return type(out)(results) if type(out) in (tuple, list) else results

    def _check_offsets(self, offsets: Any) -> None:
        """Refuse plain offsets of this rank's bags: the forward counts the tokens of all ranks."""
        layout = self.port_in.layout
        is_plain = offsets is not None and not isinstance(offsets, DTensor)
        if is_plain and isinstance(layout, Shard):
            raise LayoutError(
                f"{self.sharding.style}: an EmbeddingBag that runs on DTensors (a subclass with "
                "its own forward, or lower=False) needs the offsets of all ranks' tokens, got a "
                f"plain {type(offsets).__name__} with input_layouts={layout}. Pass DTensors, or "
                "input_layouts=Replicate() and all tokens, or 2-D tokens with one bag per row"
            )

    def _in_layouts(
        self,
        values: tuple[Any, ...],
        ports: tuple[Port | None, ...] | None,
        move: Callable[[Any, Port], Any],
        role: str,
    ) -> tuple[Any, ...]:
        """Return inputs or outputs in the layouts of their ports.

        Values after the last port pass through.
        """
        if ports is None:
            return values
        if self.sharding.strict and len(values) != len(ports):
            raise LayoutError(
                f"{self.sharding.style}: the module has {len(values)} {role}, but layouts for "
                f"{len(ports)} are given; use None for values that pass through"
            )
        moved = list(values)
        for index, (value, port) in enumerate(zip(values, ports, strict=False)):
            if value is not None and port is not None:
                moved[index] = move(value, port)
        return tuple(moved)

    def _enter(self, value: Any, port: Port) -> Any:
        watch = None if is_compiling() else current_watch()
        with nullcontext() if watch is None else unwatched_functions():
            arrived = input_dtensor(value, port, self.mesh)
            if self.sharding.local_inputs:
                return local_output(arrived, self.sharding.style, value)
            if watch is not None:
                watch.axes.note_spec(arrived, arrived.spec, value)
        return arrived

    def _leave(self, value: Any, port: Port) -> Any:
        is_watched = not is_compiling() and current_watch() is not None
        with unwatched_functions() if is_watched else nullcontext():
            return module_output(self, value, port)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        sharding = call.sharding
        moved = [*zip(call.args, sharding.inputs or (), strict=False)]
        moved += [(call.kwargs.get(name), port) for name, port in sharding.keywords.items()]
        moved += zip(call.outputs, sharding.outputs or (), strict=False)
        for value, port in moved:
            if port is not None:
                yield from collectives_of_move(value, port.layout, port.desired)


def replicated_input(lowered: Lowered, x: Tensor, port: Port | None = None) -> Tensor:
    """Return an input, replicated (`R | S(d) -> R`), whose gradient is partial in the lowering."""
    port = port or lowered.port_in
    shard = sharded_dim(port.layout, lowered.comm)
    is_direct = shard is not None or port.layout.is_replicate()
    if isinstance(x, DTensor) or not is_direct:
        # in a fixed arithmetic, the gradients of readers are reduced one by one and then added
        if current_arithmetic() is not None:
            local = local_input(x, port, lowered.mesh, grad=port.desired)
            return copy(local, lowered.comm)
        return local_input(x, port, lowered.mesh, grad=Partial())
    if shard is not None:
        return gather_partial(x, *shard)
    compare_replicas(lowered, x)
    return copy(x, lowered.comm)


def compare_replicas(lowered: Lowered, x: Tensor) -> None:
    """Raise LockstepError on all ranks if a replicated plain input differs, where this is compared.

    Ranks that read different batches would add products of different inputs, which a rank cannot
    detect in its own values.
    """
    if not is_compiling() and replicas_are_compared():
        check_replicas(x.detach(), lowered.comm, f"the input of {lowered.title}")


def sharded_input(
    lowered: Lowered, x: Tensor, sizes: Sizes = None, port: Port | None = None
) -> Tensor:
    """Return the input sharded like the weight or in shards of `sizes` (`R | S(d) -> S(features)`).

    An input that already has this layout is returned as it is.
    """
    port = port or lowered.port_in
    desired = port.desired
    if isinstance(x, DTensor):
        return local_input(x, port, lowered.mesh, grad=desired)
    if port.layout == desired:
        return x
    if port.layout.is_replicate() and isinstance(desired, Shard):
        sizes = sizes or _shards_of_weight(lowered)[1]
        compare_replicas(lowered, x)
        return split(x, lowered.comm, desired.dim % x.ndim, sizes)
    return local_input(x, port, lowered.mesh, grad=desired)


def sharded_output(
    lowered: Lowered, out: Tensor, sizes: Sizes = None, port: Port | None = None
) -> Tensor:
    """Move sharded features to the layout of the port (`S(features) -> port`).

    Each rank holds some features, sharded like the weight, or in shards of `sizes`.
    """
    port = port or lowered.port_out
    local = lowered.sharding.local_outputs
    if local and port.layout == port.desired:
        return out
    if sizes is None:
        size, sizes = _shards_of_weight(lowered)
    else:
        size = sum(sizes)
    features = getattr(port.layout, "dim", -1) % out.ndim
    if local and port.desired.is_replicate():
        return gather(out, lowered.comm, features, sizes)
    shape = list(out.shape)
    shape[features] = size
    return module_output(lowered, out, port, shape)


def _shards_of_weight(lowered: Lowered) -> tuple[int, Sizes]:
    """Return the size of the sharded dim of the weight, and of its shards."""
    spec = lowered.spec("weight")
    ((dim, _),) = spec.shard_order
    return spec.shape[dim], spec.sizes(dim)


def partial_output(
    lowered: Lowered, partial: Tensor, bias: Tensor | str | None, port: Port | None = None
) -> Tensor:
    """Move a partial output to the layout of the port (`P -> port`).

    The output is the sum of the ranks' partial outputs. The bias, a replicated parameter or its
    name, is added after the reduction, along the dim that holds the features.
    """
    port = port or lowered.port_out
    comm = lowered.comm
    desired = port.desired
    is_local = lowered.sharding.local_outputs
    param = {"bias": lowered.parameter(bias) if isinstance(bias, str) else bias}
    features = getattr(lowered.port_in.desired, "dim", -1) % partial.ndim
    shard = sharded_dim(desired, comm)
    if shard is not None:
        dim = shard.dim % partial.ndim
        size = partial.shape[dim]
        sizes = shard.sizes
        is_even = size % comm.size == 0
        if dim == features and sizes is None and not is_even:
            # Example: 10 features on 4 ranks -> 3 3 3 1. The next module knows these sizes from its
            # weight.
            sizes = tuple(shard_sizes(size, Shard(dim), comm.size))
        if sizes is not None or is_even:
            # Every rank has a shard of the output, so the gradients of the bias are partial sums.
            out = scatter(partial, comm, dim, sizes)
            local_bias = local_parameters(param, comm)["bias"]
            if local_bias is not None and dim == features:
                local_bias = own_shard(local_bias, comm, 0, sizes)
            out = _add_bias(out, local_bias, features)
            if is_local:
                return out
            return from_local(out, desired, lowered.mesh, None if is_even else partial.shape)
        if is_local:
            raise uneven_output(lowered.sharding.style, size, dim, comm)
    local_bias = local_parameters(param)["bias"]
    if isinstance(desired, Partial):
        # The first rank adds the bias. The others add zeros that depend on the bias, so that the
        # bias gets its gradient on every rank.
        if local_bias is not None and comm.rank > 0:
            local_bias = local_bias - local_bias.detach()
        out = _add_bias(partial, local_bias, features)
        return module_output(lowered, out, Port(Partial(), desired))
    full = _add_bias(reduce(partial, comm), local_bias, features)
    if is_local and desired.is_replicate():
        return full
    return module_output(lowered, full, Port(Replicate(), desired))


def _add_bias(out: Tensor, bias: Tensor | None, features: int) -> Tensor:
    """Add a bias along the dim of the features."""
    if bias is None:
        return out
    # Example: an output (2, 5, 7, 7) with 5 features at dim 1 -> a bias (5, 1, 1).
    dims_behind = out.ndim - features - 1
    return out + bias.to(out.dtype).view(-1, *(1,) * dims_behind)
