"""Experts of which every rank holds some hidden features, of all experts.

x: R, choices: R, weights: R, W: S(hidden) -> y: P -> R        one reduction of y, and one of each input's gradient
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from torch import Tensor

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.errors import UnsupportedModuleError

from ..lowering.boundary import local_input
from ..lowering.collective_functions import copy, reduce
from ..lowering.lowered import Lowered
from ..lowering.ports import nbytes
from ..sharding.module_sharding import Collective, ModuleCall
from .own_forward import local_shards, own_forward


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

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from ()

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        return type(module).forward(module, input / self.comm.size, *args, **kwargs)
