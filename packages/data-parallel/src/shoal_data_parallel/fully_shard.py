"""`fully_shard`: parameters sharded over data axes, under torch's name and arguments.

    fully_shard(block, mesh["data"]) for every block, then fully_shard(model, mesh["data"])

A module and its descendants that are no unit of their own are one unit.

May import: fsdp_module, policies, sharded_parameters, unit, unit_forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError, StyleError, TiedWeightError
from shoal_dtensor.internal import (
    check_plain_tensors,
    complete_forms,
    extended,
    owners_of,
    refuse_save_pretrained,
    register_owner,
    takes,
    watch_draws,
)
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.internal import accelerator

from .fsdp_module import FSDPModule
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .sharded_parameters import DataAxes, Site, make_whole, shard_parameter
from .unit import Unit
from .unit_forward import STATE, UnitState, states_of


@takes(module=(nn.Module, list), mp_policy=MixedPrecisionPolicy, offload_policy=OffloadPolicy)
def fully_shard(  # noqa: PLR0913  # torch's signature
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # an immutable value, as in torch's signature
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # likewise
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:  # of the module's class and an `FSDPModule`, which no type says
    """The module, its parameters sharded over data axes: gathered before its forward and backward, freed after them.

    Parameters become DTensors whose gradients are averaged over the data axes; those that styles have placed on other
    axes of the same mesh stay so there, and are sharded over the data axes too. Styles may also come afterwards: each
    unit that they concern is gathered for them, and sharded again. Make the optimizer when all of this is done.

    Args:
        module: changed in place; its class becomes a subclass that is an `FSDPModule` too. Descendants that were
            passed before are units of their own: call it on blocks first, and on the model last. Several modules that
            run one after another can be one unit, as a list.
        mesh: the data axes: one, over which parameters are sharded; or two, over the first of which they are
            replicated. The whole world when left out.
        reshard_after_forward: free the gathered parameters after the forward, and gather them again in backward. By
            default all units do but the outermost.
        shard_placement_fn: given a parameter, the `Shard` over the data axes, or None for the first dim.
        mp_policy: the dtypes of computation, reduction and outputs.
        offload_policy: where the shards are kept.
        ignored_params: parameters that stay as they are.

    Raises:
        LayoutError: if the mesh has more than two axes, the module is sharded already or has no forward, or a parameter
            is placed on a data axis, partial, or replicated by `replicate`.
        StyleError: if parameters have gradients, or are tensors of tensors, as quantized weights are.
        TiedWeightError: if a parameter is shared with a module outside of this unit that is a unit already.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     layer = fully_shard(nn.Linear(8, 8), init_device_mesh("cpu", (4,)))
        ...     layer.weight.placements, layer.weight.to_local().shape
        ((Shard(dim=0),), torch.Size([2, 8]))
    """
    modules: list[Any] = module if isinstance(module, list) else [module]  # whose classes change
    _check(modules, reshard_after_forward)
    axes = _data_axes(mesh)
    complete_forms(axes.mesh, *modules, over_data=(mp_policy.param_dtype, mp_policy.reduce_dtype))
    unit = Unit("+".join(type(one).__name__ for one in modules), [], axes)
    state = UnitState(unit, modules, mp_policy, reshard_after_forward)
    policies = mp_policy, offload_policy
    state.source = source = UnitParameters(state, axes, [*(ignored_params or ())], shard_placement_fn, policies)
    _check_own(modules, [param for param, _ in source.own()])
    source.take()
    state.lead([inner for module in modules for inner in states_of(module)])
    for one in modules:
        vars(one)[STATE] = state
        refuse_save_pretrained(one)
        one.__class__ = extended(FSDPModule, one.__class__)
        watch_draws(one, axes.mesh)
    return module


def _check(modules: Sequence[nn.Module], reshard_after_forward: object) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise LayoutError(
            f"fully_shard: reshard_after_forward is True, False or None, got {reshard_after_forward!r}; to shard over "
            "fewer ranks after the forward is not offered"
        )
    for module in modules:
        kind = type(module).__name__
        if isinstance(module, FSDPModule):
            raise LayoutError(f"fully_shard: this {kind} is sharded already; it can be one unit only")
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            raise LayoutError(
                f"fully_shard: {kind} has no forward, so nothing would gather its parameters; pass the modules in it"
            )


def _data_axes(mesh: DeviceMesh | None) -> DataAxes:
    if mesh is None:
        mesh = init_device_mesh(accelerator() or "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("data",))
    axes = DataAxes(mesh)
    if mesh.ndim > 2:
        raise LayoutError(
            f"fully_shard: expected one or two data axes, got {mesh!r}; pass a slice such as mesh['data']"
        )
    return axes


def _check_own(modules: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> None:
    owners = [owner for module in modules for owner in owners_of(module) if owner.owner == "replicate"]
    replicated = {id(param) for owner in owners for param in owner.held()}
    if any(id(param) in replicated for param in params):
        raise LayoutError(
            "fully_shard: a parameter is replicated by `replicate` already; fully_shard averages gradients itself, and "
            "over two axes replicates over the first"
        )
    check_plain_tensors("fully_shard", params)
    if any(param.grad is not None for param in params):
        raise StyleError(
            "fully_shard: parameters have gradients, of which nobody knows whether they are averaged over the data "
            "axes; drop them first, with zero_grad()"
        )


@dataclass(eq=False, repr=False)
class UnitParameters:
    """Where a unit's parameters are from, and how they are sharded.

    Attributes:
        owner: the function that makes units, for messages.
        state: of the unit.
        axes: the data axes.
        ignored: parameters that stay as they are; of others `placement` and `policies` are as in `shard_parameter`.
    """

    owner = "fully_shard"
    state: UnitState
    axes: DataAxes
    ignored: Sequence[nn.Parameter]
    placement: Callable[[nn.Parameter], Shard | None] | None
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy of the module."""
        vars(self).update(state)
        register_owner(self)

    @property
    def data_mesh(self) -> DeviceMesh:
        """That of the data axes."""
        return self.axes.mesh

    @property
    def keeps_gradients(self) -> bool:
        """Whether this rank keeps gradients of the unit for a later reduction."""
        return bool(self.state.unit.kept)

    def held(self) -> Iterable[Tensor]:
        """The leaves of the unit."""
        return [parameter.leaf for parameter in self.state.unit.parameters]

    def own(self) -> list[tuple[nn.Parameter, list[Site]]]:
        """The parameters of the unit's modules and not of units in them, each once, with the modules that hold it.

        Raises:
            TiedWeightError: if one is shared with a module that is part of another unit.
        """
        owned: dict[int, tuple[nn.Parameter, list[Site]]] = {}
        inner = {state for module in self.state.modules for state in states_of(module)} - {self.state}
        others = {module for state in inner for root in state.modules for module in root.modules()}
        ignored = set(map(id, self.ignored))
        for name, owner in (pair for module in self.state.modules for pair in module.named_modules()):
            for key, param in owner._parameters.items() if owner not in others else ():
                if param is None or id(param) in ignored:
                    continue
                if hasattr(param, STATE):
                    raise TiedWeightError(
                        f"fully_shard: the parameter {key!r} of {name!r} is shared with a module that is part of "
                        "another unit; make one unit of the modules that share it, or of a module that contains them"
                    )
                owned.setdefault(id(param), (param, []))[1].append((owner, key))
        return list(owned.values())

    def take(self) -> None:
        """Shard the parameters that the modules hold now."""
        unit, owned = self.state.unit, self.own()
        unit.parameters = [shard_parameter(p, sites, self.axes, self.placement, self.policies) for p, sites in owned]
        for param, _ in owned:
            setattr(param, STATE, True)
        unit.reset()
        register_owner(self)

    def give_back(self) -> None:
        """Have the modules hold the parameters as they were before data axes sharded them."""
        unit = self.state.unit
        unit.leave()
        make_whole(unit.parameters)
        unit.parameters = []
        unit.reset()
