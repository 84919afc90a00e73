"""The forward of a module of experts, run on the experts, or the hidden features of experts, that this rank holds.

x: R, choices: R, weights: R, W: S(hidden) -> y: P -> R        one reduction of y, and one of each input's gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_mesh import Comm

from ..lowering.boundary import local_input
from ..lowering.collective_functions import copy, reduce
from ..lowering.lowered import Lowered
from ..lowering.parameters import local_parameters, while_replaced
from ..lowering.ports import declares, nbytes
from ..sharding.module_sharding import Collective, ModuleCall, ModuleSharding


def local_shards(
    module: nn.Module, sharding: ModuleSharding, experts: Comm | None, hidden: Comm | None
) -> dict[str, Tensor | None]:
    """The local shards of all parameters, by path, where the axis `experts` shards those, and `hidden` their features.

    A parameter that an axis replicates is used by every rank along it in a part of the computation, so its gradients
    are summed. A bias behind the sum over hidden features is added on the first rank of their axis alone.
    """
    along = (sharding.parameters, sharding.second_axis or {}) if experts is not None else ({}, sharding.parameters)
    groups: dict[Comm | None, dict[str, Tensor | None]] = {}
    for name, param in module.named_parameters():
        parts = hidden if hidden is not None and name not in along[1] else None
        if experts is not None and name not in along[0]:
            assert parts is None, "every parameter of experts whose hidden features are sharded belongs to experts"
            parts = experts
        groups.setdefault(parts, {})[name] = param
    local: dict[str, Tensor | None] = {}
    for comm, params in groups.items():
        shards = local_parameters(params, comm)
        if comm is hidden and hidden is not None and hidden.rank > 0:
            shards = {name: None if shard is None else shard * 0 for name, shard in shards.items()}
        local.update(shards)
    return local


def own_forward(module: Any, local: Mapping[str, Any], count: int, own: range | None, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, with local shards (by path) for its parameters, and this rank's experts for all `count`.

    `own` are the children of a list that stay; with None the numbers in which the module counts its experts stay too.
    """
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        changes.append((owner._parameters, {n: local[dot + n] for n in owner._parameters if dot + n in local}))
    if own is not None:
        numbers = [n for n, v in vars(module).items() if "experts" in n and type(v) is int and v == count]
        changes.append((vars(module), dict.fromkeys(numbers, len(own))))
        if isinstance(module, nn.ModuleList):
            children = {str(i): module._modules[str(index)] for i, index in enumerate(own)}
            changes.append((vars(module), {"_modules": children}))
    return while_replaced(partial(type(module).forward, module, *args, **kwargs), *changes)


class SlicedExperts(Lowered):
    """A module of experts, of whose hidden features each rank holds some: its own forward gives a partial sum."""

    __slots__ = ()
    sampling: ClassVar[Literal["refused"]] = "refused"

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield Collective("all_reduce", nbytes(call.output))
        for tensor in (*call.args, *call.kwargs.values()):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                yield Collective("all_reduce", nbytes(tensor), backward=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.module
        args = tuple(map(self.entering, args))
        kwargs = {name: self.entering(value) for name, value in kwargs.items()}
        out = own_forward(module, local_shards(module, self.sharding, None, self.comm), 0, None, *args, **kwargs)
        if type(out) is not Tensor:
            raise UnsupportedModuleError(
                f"{self.sharding.style}: {type(module).__name__} returns a {type(out).__name__}; expected one tensor, "
                "the weighted sum over the experts of each token"
            )
        return reduce(out, self.comm)

    def entering(self, value: Any) -> Any:
        """An argument, whose gradient is partial inside."""
        if isinstance(value, DTensor):
            return local_input(value, self.port_in, self.mesh, grad=Partial())
        return copy(value, self.comm) if isinstance(value, Tensor) else value


class DividedInput(Lowered):
    """A module without parameters, among experts whose outputs are summed over the ranks: its share of that sum."""

    __slots__ = ()
    collectives = declares()

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        return type(module).forward(module, input / self.comm.size, *args, **kwargs)
