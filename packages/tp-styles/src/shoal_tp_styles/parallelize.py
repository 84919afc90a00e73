"""`parallelize_module`: a plan, applied; `unparallelize_module`: undone."""

from __future__ import annotations

import warnings
from typing import Literal

from torch import nn

from shoal_mesh import DeviceMesh, current_mesh

from .apply import plain_module
from .errors import LayoutError, PlanError, UnmatchedPlanWarning
from .plan import Plan, axis_mesh, resolve
from .style import ParallelStyle

__all__ = ["parallelize_module", "unparallelize_module"]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    on_unmatched: Literal["warn", "error"] = "warn",
    lower: bool = True,
) -> nn.Module:
    """The module, made parallel in place.

    Args:
        module: the root that the plan's paths start from.
        device_mesh: the mesh; that of the enclosing `with mesh:` if left out.  With several axes the styles name
            theirs: `ColwiseParallel().on("tp")`.
        parallelize_plan: one style for the module itself, or styles by module path, with wildcards (`match.py`) and
            `""` for the module itself.  A style may be given by its Hugging Face name.
        src_data_rank: rank along the axis whose parameters are the truth; None keeps every rank's own part of
            its own data, without communication.
        on_unmatched: what to do about a path that matches no module.
        lower: run known module types as local computation with explicit collectives; False runs everything through
            DTensor dispatch (slower; needed for second derivatives).

    Raises:
        LayoutError: if there is no mesh, or it has several axes and a style names none.
        PlanError: if a path matches nothing (`on_unmatched="error"`) or two styles shard one module.
        TiedWeightError: if modules that share a parameter ask for different placements.
        TypeError: if the plan is something else.
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    if mesh is None:
        raise LayoutError("parallelize_module: no device_mesh is given and no `with mesh:` encloses the call")
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module: no plan is given; the module stays as it is", UnmatchedPlanWarning, stacklevel=2
        )
        return module
    resolved = resolve(module, parallelize_plan)
    for problem in resolved.unmatched:
        if on_unmatched == "error":
            raise PlanError(problem)
        warnings.warn(problem, UnmatchedPlanWarning, stacklevel=2)
    resolved.check()
    # Meshes first: naming a wrong axis must not leave a module half parallel.
    steps = [(use, axis_mesh(mesh, use.style)) for use in resolved.uses]
    for use, its_mesh in steps:
        style: ParallelStyle = use.style._with(src_data_rank=src_data_rank, lower=lower)
        style._apply(use.module, its_mesh)
    return module


def unparallelize_module(module: nn.Module) -> nn.Module:
    """The module with plain whole parameters (and gradients) on every rank, as before `parallelize_module`.

    All ranks of the mesh must call it.  Parameters that were shared still are; re-parallelize it to any degree.
    """
    return plain_module(module)
