"""What users call on sharded modules: `FSDPModule`, as torch names it, and functions for other forwards and stages.

May import: reduction, unit, unit_forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import in_backward, submodule_of, takes

from .reduction import GroupReduction, ReducingModule, deliver
from .unit import STATE, Unit, units_of
from .unit_forward import as_forward, enter, unit_of


@dataclass(frozen=True, slots=True)
class UnshardHandle:
    """Parameters that are being gathered; `wait()` returns when the module sees them.

    Args:
        unit: the module's unit; `unshard(async_op=True)` of the module makes the handle.
    """

    unit: Unit

    def wait(self) -> None:
        """Have the module see the gathered parameters."""
        enter(self.unit)


class FSDPModule(ReducingModule):
    """What `fully_shard` adds to a module's class: control over gathering and reducing, as torch names it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # no hooks: a module compiled in place would trace them
        """The module's forward with its hooks, compiled or not, between gathering and freeing."""
        forward = super().__call__
        return as_forward(self, forward, args, kwargs) if STATE in vars(self) else forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """What the module shows of itself when it is printed."""
        return ", ".join(filter(None, [super().extra_repr(), "fully_shard"]))

    def _reducers(self, recurse: bool = True) -> list[Unit]:
        return units_of(self, recurse)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, until `reshard()`; with `async_op`, only start to.

        They are for reading: what is written to them is lost, and `reshard()` says so.
        """
        unit = unit_of(self)
        if async_op:
            unit.start()
            return UnshardHandle(unit)
        enter(unit)
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters; the module holds its shards again.

        Raises:
            StyleError: if something was written to the gathered parameters.
        """
        unit_of(self).leave()

    def reduce_gradients(self) -> None:
        """Reduce the gradients that were kept, without another backward.

        Raises:
            StyleError: a backward is running, or one that added to them raised.
        """
        if in_backward():
            raise StyleError("reduce_gradients: a backward is running; it is to be called after it")
        for unit in self._reducers():
            unit.check_kept()
        deliver([GroupReduction(unit, {}) for unit in self._reducers() if unit.kept])

    @takes(reshard_after_forward=bool)
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether gathered parameters are freed after a forward, between it and a backward or the next forward."""
        for unit in units_of(self, recurse):
            unit.reshards = unit.frees = reshard_after_forward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the modules whose parameters start to be gathered when this one's forward begins.

        Without it, and in a copy of the module, it is the one whose forward came next the last time; with
        an empty list, none.

        Args:
            modules: that `fully_shard` was called on.  All ranks give the same ones in one order.

        Raises:
            StyleError: if one of them is not sharded.
        """
        unit_of(self).next_forward = _units(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The same for backward: by default, the module whose forward came before this one's.

        Raises:
            StyleError: if one of them is not sharded.
        """
        unit_of(self).next_backward = _units(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what this unit's summed gradients are divided by: the number of ranks on the data axes by default.

        With batches of different sizes, let every rank divide its summed loss by the size of the global batch, and set
        1 here.
        """
        unit_of(self).divisor = float(factor)


def _units(modules: Sequence[nn.Module]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise StyleError(f"expected modules that fully_shard was called on, got {type(module).__name__}")
    return [unit_of(module) for module in modules]


@takes(module=nn.Module, method_name=str)
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a unit count as its forward: parameters are gathered before it and freed after it.

    Args:
        module: a module; nothing is done unless it is an `FSDPModule`.
        method_name: for example "generate" or "encode".

    Raises:
        LayoutError: if there is no such method.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_data_parallel import fully_shard
        >>> class Encoder(nn.Linear):
        ...     def encode(self, x: torch.Tensor) -> torch.Tensor:
        ...         return x @ self.weight.T
        >>> with fake_world(4):
        ...     model = fully_shard(Encoder(8, 8), init_device_mesh("cpu", (4,)))
        ...     register_fsdp_forward_method(model, "encode")
        ...     model.encode(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise LayoutError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}")
    vars(module)[method_name] = lambda *args, **kwargs: as_forward(module, method, args, kwargs)


def reduce_after_last_microbatch(stage: Any) -> None:
    """Have a stage of `torch.distributed.pipelining` reduce gradients once per step: after its last microbatch.

    Backwards keep gradients on each rank.  Without this call they are reduced for every microbatch, to the same values.

    Args:
        stage: a pipeline stage whose `submod` is an `FSDPModule`; changed in place.

    Raises:
        LayoutError: if its module is not sharded.

    Example:
        >>> from torch.distributed.pipelining import PipelineStage
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_data_parallel import fully_shard
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        ...     half = fully_shard(nn.Linear(8, 8), mesh["data"])
        ...     stage = PipelineStage(half, 0, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        ...     reduce_after_last_microbatch(stage)
    """
    module = submodule_of("reduce_after_last_microbatch", stage)
    if not isinstance(module, FSDPModule):
        raise LayoutError(
            f"reduce_after_last_microbatch: expected a stage whose submod fully_shard was called on, got a stage of "
            f"{type(module).__name__}"
        )
    scale = stage.perform_reduce_grad

    def perform_reduce_grad(grad_scale_factor: int) -> None:
        module.reduce_gradients()
        scale(grad_scale_factor)

    module.set_requires_gradient_sync(False)
    for unit in units_of(module):
        unit.stands_in = True
    stage.perform_reduce_grad = perform_reduce_grad
