"""`parallelize_module` applies a plan; `unparallelize_module` undoes it."""

from __future__ import annotations

import warnings
from typing import Literal, TypeVar

from torch import nn

from shoal_dtensor.errors import LayoutError, PlanError
from shoal_dtensor.internal import (
    check_device_mesh,
    check_styled,
    complete_forms,
    given_back,
    takes,
    unwatch_draws,
    watch_draws,
)
from shoal_mesh import DeviceMesh, current_mesh

from ..apply.apply import plain_module
from ..errors import UnmatchedPlanWarning
from ..lowering.lowered import trace_blocks
from .resolve import AutoPlan, Plan, resolve

Module = TypeVar("Module", bound=nn.Module)


@takes(module=nn.Module)
def parallelize_module(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    on_unmatched: Literal["warn", "error"] = "warn",
    lower: bool = True,
) -> Module:
    """The module, made parallel in place.

    Args:
        module: the root that the plan's paths start from.
        device_mesh: the mesh; that of the enclosing `with mesh:` if left out.  With several axes the styles name
            theirs: `ColwiseParallel().on("tp")`.
        parallelize_plan: one style for the module itself, or styles by module path, with wildcards and
            `""` for the module itself.  A style may be given by its Hugging Face name.
        src_data_rank: rank along the axis whose parameters are broadcast; None keeps every rank's shard of
            its own values, without communication.
        on_unmatched: whether a path that matches no module warns or raises.
        lower: run known module types as local computation with explicit collectives; False runs everything through
            DTensor dispatch (slower; needed for second derivatives).

    Raises:
        LayoutError: if there is no mesh, or it has several axes and a style names none.
        PlanError: if a path matches nothing (`on_unmatched="error"`), two styles shard one module, or a module already
            has the style: `unparallelize_module` comes first.  Or the plan is automatic and not proven for the mesh.
            Nothing has been changed then.
        TiedWeightError: if modules that share a parameter ask for different placements.
        TypeError: if the plan is neither a style nor a mapping of them, or the module no module (`StyleTypeError`).

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
    mesh = _mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module: no plan is given; the module stays as it is", UnmatchedPlanWarning, stacklevel=3
        )
        return module
    _refuse_unproven(parallelize_plan, mesh)
    resolved = resolve(module, parallelize_plan)
    for problem in resolved.unmatched:
        if on_unmatched == "error":
            raise PlanError(problem)
        warnings.warn(problem, UnmatchedPlanWarning, stacklevel=3)
    unwatch_draws(module)
    resolved.apply(mesh, src_data_rank=src_data_rank, lower=lower)
    complete_forms(mesh, module)
    watch_draws(module)
    trace_blocks(module)
    return module


def _mesh(given: DeviceMesh | None) -> DeviceMesh:
    mesh = given if given is not None else current_mesh()
    if mesh is None:
        raise LayoutError("parallelize_module: no device_mesh is given and no `with mesh:` encloses the call")
    check_device_mesh("parallelize_module", mesh)
    return mesh


def _refuse_unproven(plan: Plan, mesh: DeviceMesh) -> None:
    if isinstance(plan, AutoPlan) and plan.proven_for != mesh.shape:
        raise PlanError(
            f"an automatic plan is applied to a mesh on which it is proven: this one is proven for "
            f"{plan.proven_for}, the mesh is {mesh.shape}. Use auto_plan(model, mesh, *example_inputs), or dict(plan) "
            "once you have read the plan and vouch for it"
        )


@takes(module=nn.Module)
def unparallelize_module(module: nn.Module) -> nn.Module:
    """The module with plain unsharded parameters (and gradients) on every rank, as before `parallelize_module`.

    All ranks of the mesh must call it.  Shared parameters stay shared; the module can be made parallel again.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     linear = parallelize_module(nn.Linear(4, 8), init_device_mesh("cpu", (1,)), "colwise")
        ...     type(unparallelize_module(linear).weight)
        <class 'torch.nn.parameter.Parameter'>
    """
    with given_back(check_styled(module)):
        plain = plain_module(module)
    watch_draws(plain)  # it may be data-parallel
    return plain
