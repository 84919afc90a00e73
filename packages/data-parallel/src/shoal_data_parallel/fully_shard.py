"""`fully_shard`: parameters sharded over data axes, under torch's names and arguments.

A module is one unit together with its descendants that are not units of their own.

May import: fsdp_module, parameters, units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import nn

from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    DataDtypes,
    check_plain_tensors,
    check_types,
    complete_forwards,
    owners_of,
    refuse_save_pretrained,
    watch_draws,
    with_methods,
)
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.internal import accelerator

from .fsdp_module import FSDPModule
from .parameters.agreement import check_same_on_data_axes
from .parameters.data_axes import DataAxes
from .parameters.gather_extensions import has_extension
from .parameters.parameter_meshes import MeshAssignment, PlacementFunction, data_axes_of
from .parameters.policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from .units.unit import STATE, Unit, units_of
from .units.unit_passes import make_outermost
from .units.unit_settings import UnitSettings


@overload
def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_optimizer: bool = False,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: list[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_optimizer: bool = False,
) -> list[FSDPModule]: ...
@check_types(
    module=(nn.Module, list),
    mp_policy=MixedPrecisionPolicy,
    offload_policy=OffloadPolicy,
    dp_mesh_dims=(DataParallelMeshDims, type(None)),
    shard_optimizer=bool,
)
def fully_shard(  # noqa: PLR0913  # torch's signature
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    # an immutable value, as in torch's signature
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # likewise
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_optimizer: bool = False,
) -> FSDPModule | list[FSDPModule]:
    """Shard the parameters of a module over data axes, in place, and return the module.

    Parameters are gathered before forward and backward, and freed afterwards. They become DTensors
    whose gradients are averaged over the data axes. Parameters that styles have placed on other
    axes of the same mesh keep these placements, and are sharded over the data axes too. Styles may
    also be applied afterwards: each unit with affected parameters is gathered for them, and sharded
    again. Make the optimizer when all of this is done.

    Args:
        module: the module, changed in place. Its class becomes a subclass that is an `FSDPModule`
            too. Descendants that were passed before are units of their own, so call the function on
            blocks first and on the model last. A list of modules that run one after another becomes
            one unit.
        mesh: the data axes. Parameters are sharded over one axis. If there are two, the first one
            has replicas. By default the axis has all ranks.
        reshard_after_forward: free the gathered parameters after the forward, and gather them again
            in backward. By default all units do this except the outermost one. With a number,
            groups of this many neighboring ranks keep all of the parameters in larger shards, such
            as the ranks of one host, and the backward gathers inside of the group.
        shard_placement_fn: given a parameter, the `Shard` over the data axes, or None for the first
            dim; or a `ShardPlacementResult`, which also has the data axes of this parameter.
            Parameters of other axes are gathered and reduced by themselves, and their gradients are
            averaged over their own axes. It is called once for each parameter that has a dim.
        mp_policy: the dtypes of computation, reduction and outputs.
        offload_policy: where the shards are kept.
        ignored_params: parameters that stay as they are.
        dp_mesh_dims: the data axes in `mesh`. Modules then see parameters that are DTensors
            replicated over the data axes. A loss that is a DTensor of all ranks counts once; losses
            that each rank computes from `to_local()` are averaged. Plain parameters with types on
            the other axes (`shoal_spmd_types.assert_type`) are sharded like DTensors of these
            types, and modules see plain tensors; gradients of parameters of type R are summed over
            these axes, too.
        shard_optimizer: shard the parameters that the optimizer updates, and so gradients and the
            optimizer's state, over the replicas too. Parameters are gathered over the replicas once
            after each step, and a rank keeps the shards that all replicas have. `sizes` of a
            placement then has an entry for each shard, or for each rank: those of all replicas of
            the first shard, then those of the second, and so on. Without an axis of replicas this
            changes nothing.

    Raises:
        LayoutError: if the mesh has more than two axes, if `reshard_after_forward` does not divide
            the number of ranks that shard, or is a number together with `shard_optimizer`, if the
            module is sharded already or has no forward, or if a parameter is placed on a data axis,
            partial, or replicated by `replicate`; or if a parameter with types has none on an axis
            of the mesh, or one that no layout has.
        LockstepError: (of shoal_mesh) on all ranks, if they have other parameters, or choose other
            placements for them.
        StyleError: if parameters have gradients, or are tensors of tensors, as quantized weights
            are, without the methods `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
        TiedWeightError: if a parameter is shared with a module outside of this unit that is a unit
            already.

    Example:
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     layer = fully_shard(nn.Linear(8, 8), init_device_mesh("cpu", (4,)))
        ...     layer.weight.placements, layer.weight.to_local().shape
        ((Shard(dim=0),), torch.Size([2, 8]))
    """
    modules: list[Any] = module if isinstance(module, list) else [module]
    check_modules("fully_shard", modules)
    assignment = MeshAssignment(
        shard_placement_fn, _checked_axes(mesh, dp_mesh_dims), shard_optimizer=shard_optimizer
    )

    def make_unit(axes: DataAxes) -> Unit:
        return Unit(
            modules,
            axes,
            [*(ignored_params or ())],
            assignment,
            policies=(mp_policy, offload_policy),
            settings=UnitSettings(_checked_resharding(reshard_after_forward, axes)),
        )

    first_unit = make_unit(assignment.axes[0])
    first_unit.assign_all()
    first_unit.peers += map(make_unit, assignment.axes[1:])
    install_unit(first_unit, FSDPModule)
    # their classes are subclasses of FSDPModule now
    return cast(FSDPModule | list[FSDPModule], module)


def install_unit(first_unit: Unit, cls: Any) -> None:
    """Shard the parameters of a unit's modules, and add the class `cls` to their classes.

    This includes the parameters of the unit's peers. `cls` is a subclass of FSDPModule.
    """
    modules: list[Any] = first_unit.modules
    precision = first_unit.policies[0]
    dtypes = DataDtypes(compute=precision.param_dtype, reduce=precision.reduce_dtype)
    for unit in first_unit.peers:
        unit.peers = first_unit.peers
        complete_forwards(unit.axes.mesh, *modules, over_data=dtypes)
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    for unit in first_unit.peers:
        owned = unit.owned_parameters()
        _check_own(modules, [param for param, _ in owned])
        described = []
        for param, sites in owned:
            # Shards of other placements may have equal sizes, so the ranks compare placements too.
            placement = unit.assignment.of(param, sites).placement
            chosen = "" if placement is None else f" with {placement!r}"
            described.append((f"{names[id(param)]}{chosen}", param))
        check_same_on_data_axes("fully_shard", described, unit.axes)
    for unit in first_unit.peers:
        unit.take_parameters()
    make_outermost(first_unit, [inner for module in modules for inner in units_of(module)])
    for module in modules:
        vars(module)[STATE] = first_unit
        refuse_save_pretrained(module)
        module.__class__ = with_methods(cls, module.__class__)
        watch_draws(module, first_unit.axes.mesh)


def _checked_resharding(setting: object, axes: DataAxes) -> bool | int | None:
    """Return the checked `reshard_after_forward`.

    The number of all ranks becomes True, and 1 becomes False.
    """
    if setting is None or isinstance(setting, bool):
        return setting
    ranks = axes.num_shards
    if not isinstance(setting, int) or setting < 1 or ranks % setting:
        raise LayoutError(
            "fully_shard: reshard_after_forward must be True, False, None, or a number that "
            f"divides the {ranks} ranks of the sharding axis, got {setting!r}"
        )
    if setting in (1, ranks):
        return setting == ranks
    if axes.shards_over_replicas:
        raise LayoutError(
            "fully_shard: with shard_optimizer, reshard_after_forward must be True, False or None, "
            f"got {setting!r}: backwards gather among the ranks of {axes.mesh!r} that have one "
            "replica. Make the axis of shards smaller to gather among fewer ranks"
        )
    return setting


def check_modules(name: str, modules: Sequence[nn.Module]) -> None:
    """Raise LayoutError if one of these modules is a unit already, or has no forward."""
    for module in modules:
        class_name = type(module).__name__
        if isinstance(module, FSDPModule):
            raise LayoutError(
                f"{name}: this {class_name} is sharded already; call fully_shard on a module once"
            )
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            raise LayoutError(
                f"{name}: {class_name} does not define forward, so nothing would gather its "
                "parameters; pass the modules that it contains"
            )


def mesh_of_all_ranks() -> DeviceMesh:
    """Return the mesh that data parallelism uses where none is passed."""
    ranks = torch.distributed.get_world_size()
    return init_device_mesh(accelerator() or "cpu", (ranks,), mesh_dim_names=("data",))


def _checked_axes(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> DataAxes:
    if mesh is None:
        mesh = mesh_of_all_ranks()
    if dims is not None:
        return data_axes_of(DataAxes(mesh).mesh, dims)
    axes = DataAxes(mesh)
    if mesh.ndim > 2:
        raise LayoutError(
            f"fully_shard: expected one or two data axes, got {mesh!r}; pass them as mesh['data']"
        )
    return axes


def _check_own(modules: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> None:
    owners = [
        owner for module in modules for owner in owners_of(module) if owner.made_by == "replicate"
    ]
    replicated = {id(param) for owner in owners for param in owner.held_parameters()}
    if any(id(param) in replicated for param in params):
        raise LayoutError(
            "fully_shard: a parameter was passed to replicate() already; to shard and replicate, "
            "pass fully_shard a mesh of two axes: it replicates over the first axis"
        )
    check_plain_tensors("fully_shard", [param for param in params if not has_extension(param)])
    if any(param.grad is not None for param in params):
        raise StyleError(
            "fully_shard: parameters have gradients, which may be averaged or not; drop the "
            "gradients first, with zero_grad()"
        )
