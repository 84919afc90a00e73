"""`Lowered`: a `ModuleForward` that computes on local shards as a `ModuleSharding` declares.

A `Lowered` refers to the module's dict of parameters. When a module is copied or pickled, its
`Lowered` is built again from the `ModuleSharding`, the declaration of the style. The functions at
the end of the file declare the collectives of layout changes for previews.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import ModuleForward, forward_of, is_tracing
from shoal_mesh import Comm, DeviceMesh

from ..sharding.module_sharding import Collective, ModuleCall, ModuleSharding, Port
from .parameters import local_parameters, plain_error


class FeaturePart(NamedTuple):
    """Some consecutive features of an output, as this rank holds them.

    Attributes:
        size: their number.
        layout: `whole`: equal on all ranks, and so is their gradient; `read_by_rank`: equal on all
            ranks, and the module sums the gradients of all ranks; `shard`: this rank's shard of a
            block of features.
    """

    size: int
    layout: Literal["whole", "read_by_rank", "shard"]


@lru_cache(maxsize=1024)
def _names_of_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a forward's parameters in their order, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


class Lowered(ModuleForward):
    """Forward of a module on local shards, with explicit collectives; base class of the lowerings.

    Args:
        module: the module.
        sharding: the declaration of the style.
        mesh: the mesh on which the style acts.
        inner: the earlier forward that this forward calls; None for the forward of the class.

    Attributes:
        params: the module's own dict of parameters.
        sharding: the declaration of the style.
        comm: the communicator of the first axis of the mesh.
        port_in: the port of the first input; replicated if none is declared.
        port_out: the port of the first output; replicated if none is declared.
    """

    __slots__ = ("comm", "params", "port_in", "port_out", "sharding")

    params: dict[str, Any]

    def __init__(
        self,
        module: nn.Module,
        sharding: ModuleSharding,
        mesh: DeviceMesh,
        inner: ModuleForward | None = None,
        *,
        params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(module, mesh, inner)
        self.params = module._parameters if params is None else params
        self.sharding: ModuleSharding = sharding
        self.comm: Comm = mesh.comm(0)
        self.port_in: Port = sharding.input_port()
        self.port_out: Port = sharding.output_port()
        if params is None:
            self.resolve()

    def resolve(self) -> None:
        """Compute everything that calls need from the declaration; overridden by each lowering."""

    def feature_parts(self) -> Sequence[FeaturePart]:
        """Return the parts of the output's features, if they have different layouts."""
        return ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        """Yield the collectives of one call, forward and backward, for plain inputs.

        By default these are the collectives of the declared inputs and first output.
        """
        for index in range(len(call.sharding.inputs or ())):
            yield from input_collectives(call, index)
        yield from output_collectives(call)

    @property
    def title(self) -> str:
        return self.sharding.style

    def declared_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[tuple[Any, Placement]]:
        ports = self.sharding.inputs or ()
        names = _names_of_parameters(type(self.module).forward)
        # Inputs with a port may be passed by name too.
        by_name = dict(zip(names[len(args) :], ports[len(args) :], strict=False))
        by_name.update(self.sharding.keywords)
        passed = [*zip(args, ports, strict=False)]
        passed += [(kwargs[name], port) for name, port in by_name.items() if name in kwargs]
        return [(value, port.layout) for value, port in passed if port is not None]

    def output_layouts(self) -> Sequence[Placement | None]:
        return [None if port is None else port.desired for port in self.sharding.outputs or ()]

    def output_sizes(self, index: int, size: int) -> Sequence[int] | None:
        port = self.sharding.output_port(index)
        weight = self.params.get("weight")
        if not isinstance(weight, DTensor) or port.layout != port.desired:
            return None
        dim = getattr(weight.placements[0], "dim", None)
        if dim is None:
            return None
        sizes = weight.spec.sizes(dim)
        return sizes if sizes and sizes[self.comm.rank] == size else None

    def extra_repr(self) -> str:
        """Return the printed attributes of the module, and its styles."""
        parts = [super().extra_repr()]
        sharding = self.sharding
        if sharding.parameters or sharding.inputs or sharding.outputs or sharding.lowering:
            axes = "x".join(map(str, self.mesh.axis_names))
            parts.append(f"{sharding.style} on {axes}")
        return ", ".join(filter(None, parts))

    def parameter(self, name: str) -> Any:
        """Return a parameter of the module, or the tensor that is computed in its place.

        `weight_norm`, pruning and parametrizations compute such tensors, if they are applied to a
        module that is already parallel.

        Raises:
            LayoutError: if a computed tensor is not sharded as the parameter was, or in compiled
                code.
        """
        if name in self.params:
            return self.params[name]
        tensor = getattr(self.module, name, None)
        placements = self.sharding.placements(name, self.mesh.shape)
        got: object = type(tensor).__name__
        if isinstance(tensor, DTensor):
            got = tensor.placements
        if is_tracing() or got != placements:
            raise LayoutError(
                f"{self.sharding.style}: {name} of {type(self.module).__name__} has been computed "
                "from other parameters since the plan was applied (weight_norm, pruning, a "
                "parametrization); outside of compiled code it must be a DTensor with "
                f"{placements}, got {got}. Make the result permanent (remove_parametrizations, "
                "remove_weight_norm, prune.remove), or leave the module out of the plan"
            )
        return tensor

    def local(self, *names: str, comm: Comm | None = None) -> dict[str, Tensor | None]:
        """Return `local_parameters` of some of the module's parameters.

        Args:
            names: names of the parameters; a parameter that is None stays None.
            comm: the communicator of an axis over which their local gradients are partial sums.
        """
        return local_parameters({name: self.parameter(name) for name in names}, comm)

    def spec(self, name: str) -> Spec:
        """Return the spec of one of the module's parameters.

        Raises:
            LayoutError: if it is not a DTensor (any more).
        """
        return spec_of(self.parameter(name), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = super().__deepcopy__(memo)
        clone.params = copy.deepcopy(self.params, memo)
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = partial(type(self), params=self.params)
        return rebuild, (self.module, self.sharding, self.mesh, self.inner)

    # hidden from type checkers, which would accept any attribute
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # While a module is unpickled, it does not have its attributes yet. So `resolve` is
            # called when a result of it is first used.
            slots = {slot for cls in type(self).__mro__ for slot in getattr(cls, "__slots__", ())}
            if name in slots:
                self.resolve()
                return object.__getattribute__(self, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )


class OnLocalTokens(Lowered):
    """Forward with replicated parameters on this rank's tokens or rows; a base class.

    The gradients of the parameters are partial sums, which are reduced together.
    """

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from summed_gradient_collectives(call.module.parameters())


def lowered_of(module: nn.Module) -> Lowered | None:
    """Return the outermost lowering among the forwards of a module; None if there is none."""
    forward = forward_of(module)
    while forward is not None and not isinstance(forward, Lowered):
        forward = forward.inner
    return forward


def spec_of(param: Tensor, name: str) -> Spec:
    """Return the spec of a distributed parameter, or raise LayoutError if it is not a DTensor."""
    if isinstance(param, DTensor):
        return param.spec
    raise plain_error(name, param)


# --- declared collectives -------------------------------------------------------------------------

# The collective that brings a tensor from one layout to another, in forward or backward.
_COLLECTIVES: dict[tuple[type[Placement], type[Placement]], str] = {
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
}


def collectives_of_move(
    x: Any,
    source: Placement,
    target: Placement,
    grad: Placement | None = None,
    once: Hashable = None,
) -> Iterator[Collective]:
    """Yield the collectives of a tensor that moves, and of its gradient.

    `grad` is the layout in which the gradient arrives; by default it follows from `target`.
    """
    if not isinstance(x, Tensor):
        return
    yield from _collective(x, source, target, backward=False, once=once)
    if x.requires_grad:
        grad_before = grad or _layout_of_gradient(target)
        grad_after = _layout_of_gradient(source)
        yield from _collective(x, grad_before, grad_after, backward=True, once=once)


def _collective(
    x: Tensor, before: Placement, after: Placement, *, backward: bool, once: Hashable
) -> Iterator[Collective]:
    """Yield the collective of one tensor in one direction, if it needs one."""
    op = _COLLECTIVES.get((type(before), type(after)))
    if op is not None and before != after:
        yield Collective(op, nbytes(x), backward, once)


def _layout_of_gradient(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


def input_collectives(call: ModuleCall, index: int = 0) -> Iterator[Collective]:
    """Yield the collectives of an input.

    Readers of a replicated input share the gather, and the reduction of its partial gradient.
    """
    x = call.input(index)
    port = call.sharding.input_port(index)
    is_partial_output = not call.sharding.output_port().layout.is_replicate()
    if x is None or not port.desired.is_replicate() or not is_partial_output:
        yield from collectives_of_move(x, port.layout, port.desired)
        return
    # The gradient edge of a leaf leads back to it, so its readers do not share.
    is_shared = not (x.is_leaf and x.requires_grad)
    once = (id(x), port.layout) if is_shared else None
    yield from collectives_of_move(x, port.layout, port.desired, Partial(), once=once)


def output_collectives(call: ModuleCall, bias: str | None = "bias") -> Iterator[Collective]:
    """Yield the collectives of the first output.

    If a partial output becomes sharded, the gradients of the bias are summed over the ranks.
    """
    port = call.sharding.output_port()
    out = call.output
    desired = port.desired
    if not isinstance(port.layout, Partial) or not isinstance(desired, Shard):
        yield from collectives_of_move(out, port.layout, desired)
        return
    dim = desired.dim % out.ndim
    features = getattr(call.sharding.input_port().desired, "dim", -1) % out.ndim
    is_uneven = desired.sizes is None and out.shape[dim] % call.ranks
    if dim != features and is_uneven:
        # Uneven shards of this dim are made from the whole sum, as DTensors.
        yield from collectives_of_move(out, port.layout, Replicate())
        yield from collectives_of_move(out, Replicate(), desired)
        return
    yield from collectives_of_move(out, port.layout, desired)
    if bias is not None:
        yield from summed_gradient_collectives(call.trained_parameters(bias))


def summed_gradient_collectives(params: Iterable[nn.Parameter]) -> Iterator[Collective]:
    """Yield the collectives of `local_parameters(..., comm)`.

    The gradients of each dtype are all-reduced together.
    """
    by_dtype: dict[object, list[Tensor]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    for same in by_dtype.values():
        yield Collective("all_reduce", nbytes(*same), backward=True)


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of the values of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
