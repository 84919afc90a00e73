"""`parallelize_module` applies a plan; `unparallelize_module` undoes it."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from torch import nn

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.errors import LayoutError, PlanError
from shoal_dtensor.internal import (
    check_device_mesh,
    check_styled,
    complete_forms,
    given_back,
    refuse_save_pretrained,
    takes,
    unwatch_draws,
    watch_draws,
)
from shoal_mesh import DeviceMesh, current_mesh

from .._torch import hook_end_of_forward
from ..apply.apply import plain_module, shardings_of
from ..errors import UnmatchedPlanWarning
from ..lowering.lowered import lowered_of
from .resolve import AutoPlan, Plan, resolve

_NOTE = "The model is parallel:"
# What each of them asks before it takes the kernel, and asks for nothing else.
_FUSED = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}
_WAS_FUSED = "_shoal_was_fused"

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
    """Make a module parallel in place; return it.

    Args:
        module: the root that the plan's paths start from.
        device_mesh: the mesh; the mesh of the enclosing `with mesh:` if left out. With several axes
            the styles name theirs: `ColwiseParallel().on("tp")`.
        parallelize_plan: one style for the module itself, or styles by module path, with wildcards
            and `""` for the module itself. A style may be given by its Hugging Face name.
        src_data_rank: rank along the axis whose parameters are broadcast; None keeps every rank's
            shard of its own values, without communication.
        on_unmatched: whether a path that matches no module warns or raises.
        lower: run known module types as local computation with explicit collectives; False runs
            everything through DTensor dispatch (slower; needed for second derivatives).

    Returns:
        `module`.

    Raises:
        LayoutError: if there is no mesh, or it has several axes and a style names none.
        PlanError: if a path matches nothing (`on_unmatched="error"`), two styles shard one module,
            or a module already has the style: `unparallelize_module` comes first. Or the plan is
            automatic and not proven for the mesh. Nothing has been changed then.
        TiedWeightError: if the styles of modules that share a parameter have different placements,
            or one module has no style.
        TypeError: if the plan is neither a style nor a mapping of styles, or `module` is not a
            module (`StyleTypeError`).

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
    mesh = _mesh(device_mesh, parallelize_plan)
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module: no plan is given; nothing is changed",
            UnmatchedPlanWarning,
            stacklevel=3,
        )
        return module
    resolved = resolve(module, parallelize_plan)
    for problem in resolved.unmatched:
        if on_unmatched == "error":
            raise PlanError(problem)
        warnings.warn(problem, UnmatchedPlanWarning, stacklevel=3)
    unwatch_draws(module)
    resolved.apply(mesh, src_data_rank=src_data_rank, lower=lower)
    complete_forms(mesh, module)
    watch_draws(module)
    refuse_save_pretrained(module)
    _run_children(module)
    if any(lowered_of(child) for child in module.modules() if child is not module):
        hook_end_of_forward(module, _explain)
    return module


def _mesh(given: DeviceMesh | None, plan: Plan | None) -> DeviceMesh:
    """Return the mesh that a plan is applied to.

    An automatic plan is applied only to a mesh for which it is proven.
    """
    mesh = given if given is not None else current_mesh()
    if mesh is None:
        raise LayoutError(
            "parallelize_module: no device_mesh is given and no `with mesh:` encloses the call"
        )
    check_device_mesh("parallelize_module", mesh)
    if isinstance(plan, AutoPlan) and not plan and plan.whole:
        raise PlanError(
            f"an automatic plan is applied where it has entries: {plan.why_empty}. Pass a plan of "
            "your own, {path: style}, or leave the module as it is"
        )
    if isinstance(plan, AutoPlan) and plan.proven_for != mesh.shape:
        raise PlanError(
            "an automatic plan is applied to a mesh on which it is proven: this one is proven for "
            f"{plan.proven_for}, the mesh is {mesh.shape}. Use auto_plan(model, mesh, "
            "*example_inputs), or dict(plan) once you have read the plan and vouch for it"
        )
    return mesh


def _run_children(root: nn.Module) -> None:
    """Make torch's encoder layers call modules that have styles.

    Their fused kernel would only read parameters.
    """
    for module in root.modules():
        name = next((name for kind, name in _FUSED.items() if isinstance(module, kind)), "")
        own = vars(module)
        if name and any(lowered_of(child) for child in module.modules()):
            own.setdefault(_WAS_FUSED, own[name])
            own[name] = False
        elif _WAS_FUSED in own:
            own[name] = own.pop(_WAS_FUSED)


def _explain(module: nn.Module, args: Any, output: Any) -> None:
    """Add a note on the likely cause, plain local tensors, to an error that a forward raised."""
    if output is not None:
        return
    error = sys.exc_info()[1]
    explained = type(error).__module__.startswith("shoal_") or any(
        _NOTE in n for n in getattr(error, "__notes__", ())
    )
    if explained or not isinstance(
        error, RuntimeError | ValueError | TypeError | IndexError | AssertionError
    ):
        return
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        owner = frame.f_locals.get("self")
        found = [*_local_outputs(owner)] if isinstance(owner, nn.Module) else []
        if found:
            error.add_note(
                f"{_NOTE} modules of {type(owner).__name__} return a rank's part of their output, "
                "which code that "
                "counts features or heads of one device does not "
                f"expect:\n{chr(10).join(found[:4])}\n"
                "Take sizes from tensors, as x.unflatten(-1, (-1, head_dim)) does; shard a fused "
                "projection by "
                "PackedColwiseParallel and complete heads by .heads(count, size); or let a style "
                "return all of it, "
                "output_layouts=Replicate(). What was kept of a model that is not parallel (a "
                "cache) has all heads."
            )
            return


def _local_outputs(owner: nn.Module) -> Iterator[str]:
    """Yield the modules inside another whose output is a plain local shard."""
    for path, module in owner.named_modules():
        for sharding, mesh in shardings_of(module):
            left = sharding.output_port().desired
            if path and sharding.local_outputs and isinstance(left, Shard) and mesh.size() > 1:
                sharded = [(n, p) for n, p in module.named_parameters() if isinstance(p, DTensor)]
                shapes = [
                    f"{n} {tuple(p.shape)}, here {tuple(p.to_local().shape)}"
                    for n, p in sharded[:1]
                ]
                yield f"  {path} ({type(module).__name__}, {sharding.style}): {'; '.join([*shapes, f'output {left}'])}"


@takes(module=nn.Module)
def unparallelize_module(module: nn.Module) -> nn.Module:
    """Give a module plain unsharded parameters (and gradients) on every rank again; return it.

    All ranks of the mesh must call it. Shared parameters stay shared; the module can be made
    parallel again.

    Args:
        module: changed in place; a module that is not parallel stays as it is.

    Returns:
        `module`, or the plain module that it became.

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
    refuse_save_pretrained(plain, any(isinstance(param, DTensor) for param in plain.parameters()))
    _run_children(plain)
    for owner in plain.modules():
        hook_end_of_forward(owner, None)
    watch_draws(plain)  # it may be data-parallel
    return plain
