"""`Lowered`: the callable that stands in for a module's forward.

Its bound `__call__` is stored in the instance (`module.forward`), so `nn.Module.__call__`, hooks and `state_dict` work
as before and calls pay for no extra hook.  Of a bound method a compiler guards the function and not the object, so
blocks of equal structure share one graph.  It refers to the module's parameter dict, and to the module weakly: no
reference cycle, so dropping a model frees it at once.  Copying or pickling a module rebuilds its callable from the
`ModuleSharding`.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, Self

from torch import Tensor, nn

from shoal_dtensor import DTensor, Spec
from shoal_mesh import Comm, DeviceMesh

from .._torch import is_tracing
from ..errors import LayoutError
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall, ModuleSharding, Port
from .compile import make_traceable
from .parameters import check_plain, kept_shards, local_parameters, summed_gradients
from .traced_shards import TracedShards

__all__ = ["Lowered", "lowered_of", "set_lowered", "spec_of", "trace_blocks"]


class Lowered(ABC):
    """Base of the lowerings.

    Attributes:
        params: the module's own dict of parameters.
        sharding: the record it was built from.
        mesh: the one-axis mesh.
        comm: the communicator of that axis.
        inner: the callable that was the module's forward before; None for its class's forward.
        traced_shards: what compiled code reads of the parameters of the block that the module is part of.
        name: of the module in it.
        port_in, port_out: the ports of the first input and output (replicated where none is declared).
    """

    __slots__ = (
        "_module",
        "comm",
        "inner",
        "mesh",
        "name",
        "params",
        "port_in",
        "port_out",
        "sharding",
        "traced_shards",
    )

    params: dict[str, Any]

    def __init__(
        self, module: nn.Module, sharding: ModuleSharding, mesh: DeviceMesh, inner: Lowered | None = None
    ) -> None:
        self._module = weakref.ref(module)
        self.params = module._parameters
        self.sharding: ModuleSharding = sharding
        self.mesh: DeviceMesh = mesh
        self.inner: Lowered | None = inner
        self.comm: Comm = mesh.comm(0)
        self.port_in: Port = sharding.input_port()
        self.port_out: Port = sharding.output_port()
        make_traceable()
        self.join(TracedShards.of(kept_shards), "")
        self.resolve()

    def resolve(self) -> None:  # noqa: B027  # not abstract: many lowerings have nothing to work out
        """Work out everything that calls need from the record; overridden by each lowering."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward returns, in the layouts of its output ports."""

    @classmethod
    @abstractmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        """The collectives that one call runs, forward and backward; plain tensors are taken to arrive."""

    @property
    def module(self) -> nn.Module:
        """The module this stands in for."""
        module = self._module()
        assert module is not None, "a forward outlived its module"
        return module

    def join(self, block: TracedShards, name: str) -> None:
        """Read the parameters, in compiled code, with those of the other modules of a block."""
        self.traced_shards: TracedShards = block
        self.name: str = name
        block.include(name, self._module)

    def take_parameters(self, params: dict[str, Any]) -> None:
        """Use another dict as the module's own."""
        self.params = params

    def parameter(self, name: str) -> Any:
        """One of the module's parameters; where it was replaced since by what is computed from others, the result.

        `weight_norm`, pruning and parametrizations of an already parallel module do that.

        Raises:
            LayoutError: if the result is not sharded as the parameter was, or in compiled code.
        """
        if name in self.params:
            return self.params[name]
        tensor = getattr(self.module, name, None)
        wanted = self.sharding.placements(name, self.mesh.shape)
        if is_tracing() or not isinstance(tensor, DTensor) or tensor.placements != wanted:
            got = tensor.placements if isinstance(tensor, DTensor) else type(tensor).__name__
            raise LayoutError(
                f"{self.sharding.style}: {name} of {type(self.module).__name__} is computed from other parameters "
                "since its plan was applied (weight_norm, pruning, a parametrization); outside of compiled code the "
                f"module reads a DTensor with {wanted} there, got {got}. Make the result permanent "
                "(remove_parametrizations, remove_weight_norm, prune.remove), or leave the module out of the plan"
            )
        return tensor

    def local(self, *names: str, comm: Comm | None = None) -> dict[str, Tensor | None]:
        """`local_parameters` of some of the module's parameters.

        Args:
            names: of the parameters; those that are None stay None.
            comm: given where their local gradients are partial sums over an axis.
        """
        if not is_tracing():
            params = self.params
            try:
                own = {name: params[name] for name in names}
            except KeyError:  # one is computed since
                own = {name: self.parameter(name) for name in names}
            return local_parameters(own, comm)
        return summed_gradients({name: self.shard(name) for name in names}, comm)

    def shard(self, name: str) -> Tensor | None:
        """In compiled code: the local shard of one of the module's parameters."""
        if not is_tracing():  # an exporter without Dynamo
            return self.local(name)[name]
        shards = self.traced_shards.local[self.name]
        return shards[name] if name in shards else self.parameter(name)

    def spec(self, name: str) -> Spec:
        """The spec of one of the module's parameters.

        Raises:
            LayoutError: if it is not a DTensor (any more).
        """
        spec: Spec | None = self.traced_shards.specs[self.name].get(name) if is_tracing() else None
        return spec_of(self.parameter(name), name) if spec is None else spec

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = copy.copy(self)
        memo[id(self)] = clone
        clone._module = weakref.ref(copy.deepcopy(self.module, memo))
        clone.take_parameters(copy.deepcopy(self.params, memo))
        clone.join(copy.deepcopy(self.traced_shards, memo), self.name)
        clone.inner = copy.deepcopy(self.inner, memo)
        return clone

    def __copy__(self) -> Self:
        clone = object.__new__(type(self))
        for kind in type(self).__mro__:
            for name in getattr(kind, "__slots__", ()):
                setattr(clone, name, getattr(self, name))
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.module, self.params, self.sharding, self.mesh, self.inner)


def lowered_of(module: nn.Module) -> Lowered | None:
    """The lowering of a module; None if its forward is its class's, or another one."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    return owner if isinstance(owner, Lowered) else None


def set_lowered(module: nn.Module, lowered: Lowered | None) -> None:
    """Give a module a lowering in place of its forward; None gives it that of its class back."""
    if lowered is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = MethodType(_call_with_signature(type(lowered), type(module).forward), lowered)


@lru_cache(maxsize=1024)
def _call_with_signature(kind: type[Lowered], forward: Any) -> FunctionType:
    """`kind.__call__` with the signature of the forward stood in for, which libraries inspect for the inputs it takes.

    The same function for all modules of one class: a compiler guards it, so they share a graph.
    """
    call: Any = kind.__call__
    function = FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    function.__kwdefaults__, function.__qualname__ = call.__kwdefaults__, call.__qualname__
    function.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # what `inspect` looks for
    return function


def _rebuild(
    kind: type[Lowered],
    module: nn.Module,
    params: dict[str, Any],
    sharding: ModuleSharding,
    mesh: DeviceMesh,
    inner: Lowered | None,
) -> Lowered:
    # The module is still being unpickled and has no state yet: build without touching it.
    module.__dict__.setdefault("_parameters", params)
    lowered = kind(module, sharding, mesh, inner)
    lowered.take_parameters(params)
    return lowered


def trace_blocks(root: nn.Module) -> None:
    """Have compiled code look at all parameters of a block at once: of `layers.3`, and of what is in no such block."""
    blocks: dict[str, TracedShards] = {}
    for path, module in root.named_modules():
        block, name = _place(path)
        lowered = lowered_of(module)
        while lowered is not None:
            if block not in blocks:
                blocks[block] = TracedShards.of(kept_shards)
            lowered.join(blocks[block], name)
            lowered = lowered.inner


def _place(path: str) -> tuple[str, str]:
    """`layers.3.attention.wq` -> (`layers.3`, `attention.wq`); `norm` -> (``, `norm`)."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])


def spec_of(param: Tensor, name: str) -> Spec:
    """The spec of a distributed parameter.

    Raises:
        LayoutError: if the parameter is not a DTensor (any more).
    """
    if isinstance(param, DTensor):
        return param.spec
    check_plain(param)
    raise LayoutError(
        f"the parameter {name!r} of a parallel module is a plain {type(param).__name__}; it must stay a DTensor. "
        "Call unparallelize_module to get a plain module back."
    )
