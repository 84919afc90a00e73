"""`parallelize_module` applies a plan; `unparallelize_module` undoes it.

Both work in place. A plan is resolved and checked on the whole module before anything is changed.
"""

from __future__ import annotations

import warnings
from typing import Literal, TypeVar

from torch import nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, PlanError
from shoal_dtensor.internal import (
    check_device_mesh,
    check_types,
    complete_forwards,
    refuse_save_pretrained,
    releasable_owners,
    unwatch_draws,
    watch_draws,
    whole_parameters,
)
from shoal_mesh import DeviceMesh, current_mesh

from .._torch import hook_end_of_forward, unhook_end_of_forward, unhook_start_of_forward
from ..apply.apply import plain_module
from ..errors import UnmatchedPlanWarning
from ..lowering.lowered import lowered_of
from .explain_errors import explain_local_shards
from .materialized import await_values
from .resolve import AutoPlan, Plan, resolve

# For each class of torch the attribute that forbids its fused kernel if it is false. Setting the
# attribute has no other effect.
_ALLOWS_FUSED_KERNEL = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}
_WAS_FUSED = "_shoal_was_fused"
# The `stacklevel` of warnings that shows the caller of a public function. 1 is the function itself,
# and 2 is the wrapper of `check_types`.
_CALLER = 3

Module = TypeVar("Module", bound=nn.Module)


@check_types(module=nn.Module)
def parallelize_module(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    on_unmatched: Literal["warn", "error"] = "warn",
    lower: bool = True,
) -> Module:
    """Make a module parallel in place; return it.

    Args:
        module: the root that the plan's paths start from.
        device_mesh: the mesh; the mesh of the enclosing `with mesh:` if left out. With several axes
            the styles name theirs: `ColwiseParallel().on("tp")`.
        parallelize_plan: one style for the module itself, or styles by module path, with wildcards
            and `""` for the module itself. A style may be given by its Hugging Face name.
        src_data_rank: rank along the axis whose parameters are broadcast. With None, nothing is
            sent: every rank takes its shard from the values that it has itself.
        on_unmatched: whether a path that matches no module warns or raises.
        lower: run known module types as local computation with explicit collectives; False runs
            everything through DTensor dispatch (slower; needed for second derivatives).

    Returns:
        `module`.

    Raises:
        LayoutError: if there is no mesh, or it has several axes and a style names none.
        PlanError: if a path matches nothing (`on_unmatched="error"`), two styles shard one module,
            or a module already has the style: `unparallelize_module` comes first. Also if
            `auto_plan` made the plan and has not tried it on a mesh of this shape
            (`AutoPlan.proven_for`). Nothing has been changed then.
        TiedWeightError: if the styles of modules that share a parameter have different placements,
            or one module has no style.
        TypeError: if the plan is neither a style nor a mapping of styles, or `module` is not a
            module (`StyleTypeError`).
        LockstepError: if the ranks of the mesh have different modules. It is not raised with
            `src_data_rank=None`, because nothing is sent.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     mlp = parallelize_module(mlp, mesh, {"0": "colwise", "2": "rowwise"})
        ...     mlp[0].weight.placements, mlp[0].weight.to_local().shape
        ((Shard(dim=0),), torch.Size([2, 4]))
    """
    mesh = _mesh_of_plan(device_mesh, parallelize_plan)
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module: no plan was passed, so the module is unchanged",
            UnmatchedPlanWarning,
            stacklevel=_CALLER,
        )
        return module
    resolved = resolve(module, parallelize_plan)
    for problem in resolved.unmatched:
        if on_unmatched == "error":
            raise PlanError(problem)
        warnings.warn(problem, UnmatchedPlanWarning, stacklevel=_CALLER)
    # The forwards that make random numbers (dropout) equal to those of one device are wrapped
    # around the forwards of styles, so they are removed first and made again last.
    unwatch_draws(module)
    resolved.apply(mesh, src_data_rank=src_data_rank, lower=lower)
    # Under `invariant_arithmetic`, modules without a style get forwards with equal bits too.
    complete_forwards(mesh, module)
    watch_draws(module)
    # `save_pretrained` of transformers would write this rank's shards.
    refuse_save_pretrained(module)
    _forbid_fused_kernels(module)
    # A lowered module may return a plain tensor that is only this rank's shard. The module that
    # calls it may then fail with an error that does not mention shards.
    children = (child for child in module.modules() if child is not module)
    if any(lowered_of(child) for child in children):
        hook_end_of_forward(module, explain_local_shards)
    # Parameters on the meta device get their values later, at the latest before the first forward.
    await_values(module)
    return module


def _mesh_of_plan(device_mesh: DeviceMesh | None, plan: Plan | None) -> DeviceMesh:
    """Return the mesh that a plan is applied to, by default the mesh of the enclosing block.

    An automatic plan is applied only to a mesh for which it is proven.
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    if mesh is None:
        raise LayoutError("parallelize_module: pass device_mesh, or call it inside `with mesh:`")
    check_device_mesh("parallelize_module", mesh)
    if not isinstance(plan, AutoPlan):
        return mesh
    # `whole` has the reasons why parameters are not sharded.
    if not plan and plan.whole:
        raise PlanError(
            f"this automatic plan does not have entries: {plan.why_empty}. Pass another plan, "
            "{path: style}, or leave the module unchanged"
        )
    if plan.proven_for != mesh.shape:
        raise PlanError(
            f"this automatic plan is proven for {plan.proven_for}, but the mesh is {mesh.shape}. "
            "Make a plan for this mesh with auto_plan(model, mesh, *example_inputs), or pass "
            "dict(plan) to apply it unproven"
        )
    return mesh


def _forbid_fused_kernels(root: nn.Module) -> None:
    """Make torch's encoder layers call modules that have styles.

    Their fused kernel reads the parameters without calling these modules. A layer without styled
    modules may use its fused kernel again.
    """
    for module in root.modules():
        attributes = vars(module)
        switch = _fused_kernel_switch(module)
        if switch is not None and any(lowered_of(child) for child in module.modules()):
            attributes.setdefault(_WAS_FUSED, attributes[switch])
            attributes[switch] = False
        elif switch is not None and _WAS_FUSED in attributes:
            attributes[switch] = attributes.pop(_WAS_FUSED)


def _fused_kernel_switch(module: nn.Module) -> str | None:
    """Return the attribute that allows the module's fused kernel; None for other modules."""
    for kind, name in _ALLOWS_FUSED_KERNEL.items():
        if isinstance(module, kind):
            return name
    return None


@check_types(module=nn.Module)
def unparallelize_module(module: nn.Module) -> nn.Module:
    """Give a module plain unsharded parameters (and gradients) on every rank again; return it.

    All ranks of the mesh must call it. Shared parameters stay shared; the module can be made
    parallel again.

    Args:
        module: the module, changed in place. A module that is not parallel stays as it is.

    Returns:
        `module`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     linear = parallelize_module(nn.Linear(4, 8), mesh, "colwise")
        ...     type(unparallelize_module(linear).weight)
        <class 'torch.nn.parameter.Parameter'>
    """
    # Data parallelism (`fully_shard`, `replicate`) owns its modules' parameters. It releases them
    # for the block, so that they are sharded by the styles only, and shards them again at the end.
    with whole_parameters(releasable_owners(module)):
        plain_module(module)
    still_sharded = any(isinstance(param, DTensor) for param in module.parameters())
    refuse_save_pretrained(module, still_sharded)
    _forbid_fused_kernels(module)
    for child in module.modules():
        unhook_end_of_forward(child)
        unhook_start_of_forward(child)
    # `plain_module` has removed the forwards that shard random numbers over axes of styles. Under
    # data parallelism the samples are still sharded over other axes, so random numbers are too.
    watch_draws(module)
    return module
