"""`fully_shard`: parameters sharded over data axes, under torch's names and arguments; and control of sharded modules.

A module and its descendants that are no unit of their own are one unit.

May import: policies, reduction, sharded_parameters, unit, unit_passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    check_plain_tensors,
    complete_forms,
    extended,
    in_backward,
    owners_of,
    refuse_save_pretrained,
    submodule_of,
    takes,
    watch_draws,
)
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.internal import accelerator

from .policies import MixedPrecisionPolicy, OffloadPolicy
from .reduction import GroupReduction, ReducingModule, deliver
from .sharded_parameters import DataAxes
from .unit import STATE, Unit, UnitSettings, unit_of, units_of
from .unit_passes import as_forward, enter, make_outermost


@takes(module=(nn.Module, list), mp_policy=MixedPrecisionPolicy, offload_policy=OffloadPolicy)
def fully_shard(  # noqa: PLR0913  # torch's signature
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    # an immutable value, as in torch's signature
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # likewise
    ignored_params: set[nn.Parameter] | None = None,
    # of the module's class and an `FSDPModule`, which no type says
) -> Any:
    """The module, its parameters sharded over data axes: gathered before its forward and backward, freed after them.

    Parameters become DTensors whose gradients are averaged over the data axes; those that styles
    have placed on other axes of the same mesh stay so there, and are sharded over the data axes
    too. Styles may also come afterwards: each unit that they concern is gathered for them, and
    sharded again. Make the optimizer when all of this is done.

    Args:
        module: changed in place; its class becomes a subclass that is an `FSDPModule` too.
            Descendants that were passed before are units of their own: call it on blocks first, and
            on the model last. Several modules that run one after another can be one unit, as a
            list.
        mesh: the data axes: one, over which parameters are sharded; or two, over the first of which
            they are replicated. The whole world when left out.
        reshard_after_forward: free the gathered parameters after the forward, and gather them again
            in backward. By default all units do but the outermost.
        shard_placement_fn: given a parameter, the `Shard` over the data axes, or None for the first
            dim.
        mp_policy: the dtypes of computation, reduction and outputs.
        offload_policy: where the shards are kept.
        ignored_params: parameters that stay as they are.

    Raises:
        LayoutError: if the mesh has more than two axes, the module is sharded already or has no
            forward, or a parameter is placed on a data axis, partial, or replicated by `replicate`.
        StyleError: if parameters have gradients, or are tensors of tensors, as quantized weights
            are.
        TiedWeightError: if a parameter is shared with a module outside of this unit that is a unit
            already.

    Example:
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     layer = fully_shard(nn.Linear(8, 8), init_device_mesh("cpu", (4,)))
        ...     layer.weight.placements, layer.weight.to_local().shape
        ((Shard(dim=0),), torch.Size([2, 8]))
    """
    modules: list[Any] = module if isinstance(module, list) else [module]  # whose classes change
    axes = _checked_axes(modules, reshard_after_forward, mesh)
    complete_forms(axes.mesh, *modules, over_data=(mp_policy.param_dtype, mp_policy.reduce_dtype))
    policies = mp_policy, offload_policy
    unit = Unit(
        modules,
        axes,
        [*(ignored_params or ())],
        shard_placement_fn,
        policies=policies,
        settings=UnitSettings(reshard_after_forward),
    )
    _check_own(modules, [param for param, _ in unit.owned_parameters()])
    unit.take()
    make_outermost(unit, [inner for module in modules for inner in units_of(module)])
    for one in modules:
        vars(one)[STATE] = unit
        refuse_save_pretrained(one)
        one.__class__ = extended(FSDPModule, one.__class__)
        watch_draws(one, axes.mesh)
    return module


def _checked_axes(
    modules: Sequence[nn.Module], reshard_after_forward: object, mesh: DeviceMesh | None
) -> DataAxes:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise LayoutError(
            "fully_shard: reshard_after_forward is True, False or None, got "
            f"{reshard_after_forward!r}; to shard over "
            "fewer ranks after the forward is not offered"
        )
    for module in modules:
        kind = type(module).__name__
        if isinstance(module, FSDPModule):
            raise LayoutError(
                f"fully_shard: this {kind} is sharded already; it can be one unit only"
            )
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            raise LayoutError(
                f"fully_shard: {kind} has no forward, so nothing would gather its parameters; pass "
                "the modules in it"
            )
    if mesh is None:
        mesh = init_device_mesh(
            accelerator() or "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("data",)
        )
    axes = DataAxes(mesh)
    if mesh.ndim > 2:
        raise LayoutError(
            f"fully_shard: expected one or two data axes, got {mesh!r}; pass them as mesh['data']"
        )
    return axes


def _check_own(modules: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> None:
    owners = [
        owner for module in modules for owner in owners_of(module) if owner.owner == "replicate"
    ]
    replicated = {id(param) for owner in owners for param in owner.held()}
    if any(id(param) in replicated for param in params):
        raise LayoutError(
            "fully_shard: `replicate` has a parameter; of two axes fully_shard replicates over the "
            "first"
        )
    check_plain_tensors("fully_shard", params)
    if any(param.grad is not None for param in params):
        raise StyleError(
            "fully_shard: parameters have gradients, averaged or not; drop them first, with "
            "zero_grad()"
        )


# --- what users call on sharded modules, and functions for other forwards and stages --------------


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

    _made_by = "fully_shard"
    _divides_inside = False

    # no hooks: a module compiled in place would trace them
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with its hooks, compiled or not, between gathering and freeing."""
        forward = super().__call__
        return (
            as_forward(self, forward, args, kwargs)
            if STATE in vars(self)
            else forward(*args, **kwargs)
        )

    def _reducers(self, recurse: bool = True) -> list[Unit]:
        return units_of(self, recurse)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, until `reshard()`; with `async_op`, only start to.

        They are for reading: what is written to them is lost, and `reshard()` says so.
        """
        unit = unit_of(self)
        if not async_op:
            enter(unit)
            return None
        unit.start_gathering()
        return UnshardHandle(unit)

    def reshard(self) -> None:
        """Free this unit's gathered parameters; the module holds its shards again.

        Raises:
            StyleError: if something was written to the gathered parameters.
        """
        unit_of(self).reshard()

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
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.frees_after_forward = reshard_after_forward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the modules whose parameters start to be gathered when this one's forward begins.

        Without it, and in a copy of the module, it is the one whose forward came next the last
        time; with an empty list, none.

        Args:
            modules: that `fully_shard` was called on.  All ranks give the same ones in one order.

        Raises:
            StyleError: if one of them is not sharded.
        """
        unit_of(self).settings.prefetch_in_forward = _units(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The same for backward: by default, the module whose forward came before this one's.

        Raises:
            StyleError: if one of them is not sharded.
        """
        unit_of(self).settings.prefetch_in_backward = _units(modules)


def _units(modules: Sequence[nn.Module]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise StyleError(
                f"expected modules that fully_shard was called on, got {type(module).__name__}"
            )
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
        >>> from shoal_mesh.testing import fake_world
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
        raise LayoutError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}"
        )
    vars(module)[method_name] = lambda *args, **kwargs: as_forward(module, method, args, kwargs)


def reduce_after_last_microbatch(stage: Any) -> None:
    """Have a stage of `torch.distributed.pipelining` reduce gradients once per step: after its last microbatch.

    Backwards keep gradients on each rank. Without this call they are reduced for every microbatch,
    to the same values.

    Args:
        stage: a pipeline stage whose `submod` is an `FSDPModule`; changed in place.

    Raises:
        LayoutError: if its module is not sharded.

    Example:
        >>> from torch.distributed.pipelining import PipelineStage
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        ...     half = fully_shard(nn.Linear(8, 8), mesh["data"])
        ...     stage = PipelineStage(half, 0, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        ...     reduce_after_last_microbatch(stage)
    """
    module = submodule_of("reduce_after_last_microbatch", stage)
    if not isinstance(module, FSDPModule):
        raise LayoutError(
            "reduce_after_last_microbatch: expected a stage whose submod fully_shard was called "
            "on, got a stage of "
            f"{type(module).__name__}"
        )
    scale = stage.perform_reduce_grad

    def perform_reduce_grad(grad_scale_factor: int) -> None:
        module.reduce_gradients()
        scale(grad_scale_factor)

    module.set_requires_gradient_sync(False)
    for unit in units_of(module):
        unit.settings.return_zero_gradients = True
    stage.perform_reduce_grad = perform_reduce_grad
