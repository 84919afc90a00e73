"""Automatic plans for common transformer shapes, derived from the module tree.

`ModelBlocks` has recipes for each block of a model. With a mesh and example inputs the recipes are
tried in turn, and the first one that computes the results of the plain model is used. The plan is a
dictionary of styles that the user can read and edit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoal_dtensor.internal import check_types, holds_tensors
from shoal_mesh import DeviceMesh
from shoal_tp_styles import LatentProjection, ParallelStyle, UnmatchedPlanWarning
from shoal_tp_styles.internal import (
    HOW_TO_QUANTIZE,
    AutoPlan,
    progress,
    resolve,
    sharded_parameters,
    try_plan,
)

from .recipes import Entries, ModelBlocks, read_above


@check_types(model=nn.Module)
def auto_plan(
    model: nn.Module, mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any
) -> AutoPlan:
    """Derive styles by path from a model; layers of one kind share a path with a wildcard.

    For each block (an attention, a feed-forward, experts, the vocabulary) there are recipes: the
    model's own `tp_plan`; column-wise and row-wise projections by their usual names and shapes,
    with the norms, biases, sinks and counts of heads between them; experts of any kind; and sharded
    weights with a gathered output, a recipe that is right if inputs are replicated. Without a mesh
    the first recipe of each block is returned.

    Names do not prove a plan: a model may reshape by its own number of heads, or normalize sharded
    queries. With a mesh and example inputs, recipes are run on simulated ranks and compared with
    the plain model, and the first recipe with the same results is used. Parameters that stay whole
    are in `whole`, with the reason; an `UnmatchedPlanWarning` is issued if every module stays
    whole. `parallelize_module` accepts an automatic plan only if it is proven.

    Args:
        model: a model that is not parallel; it is not changed.
        mesh: a mesh with one axis; an `abstract_mesh` is enough.
        args: example inputs of global shape. The plan of a large model can be proven on a small
            configuration of the model.
        kwargs: keyword arguments among the example inputs.

    Example:
        >>> import torch
        >>> from shoal_mesh import abstract_mesh
        >>> mlp = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> plan = auto_plan(mlp, abstract_mesh((4,)), torch.randn(3, 10))
        >>> print(format_plan(plan), plan.proven_for)
        {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
        } (4,)
    """
    blocks = ModelBlocks(model)
    options = blocks.recipes()
    first: Entries = {}
    for recipes in options.values():
        first |= recipes[0]
    plan = AutoPlan(first)
    if mesh is None:
        return plan
    dropped: dict[str, str] = {}
    if _unproven(model, first, mesh, args, kwargs=kwargs):
        plan = AutoPlan()
        # Each block is tried together with the blocks that are proven already.
        for block in progress(options.values(), "proving the blocks of a plan"):
            for entries in block:
                problem = _unproven(model, {**plan, **entries}, mesh, args, kwargs=kwargs)
                if not problem:
                    plan.update(entries)
                    break
                for path in entries:
                    dropped.setdefault(path, problem)
    plan.dropped = dropped
    plan.whole = dict(_whole_parameters(blocks, plan, dropped))
    plan.proven_for = tuple(mesh.shape) if plan else None
    if not plan and plan.whole:
        warnings.warn(f"auto_plan: {plan.why_empty}", UnmatchedPlanWarning, stacklevel=3)
    return plan


def _unproven(
    model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh, args: Any, kwargs: Any
) -> str:
    """Return the reason why a plan is not proven; empty if the plan is proven."""
    trial = try_plan(model, dict(styles), mesh, args, kwargs=kwargs)
    return "; ".join((*trial.wrong, *trial.unproven))


def _whole_parameters(
    blocks: ModelBlocks, plan: Entries, dropped: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield parameters of several dims that no entry shards, by wildcard path, with the reason."""
    model = blocks.model
    sharded = {id(param) for param in sharded_parameters(resolve(blocks.model, plan))}
    for path, module in model.named_modules():
        general = blocks.general[path]
        style = plan.get(general)
        first_problem = "" if style is not None else dropped.get(general, "")
        for name, param in module._parameters.items():
            if param is None or param.ndim <= 1 or id(param) in sharded:
                continue
            parent = model.get_submodule(path.rpartition(".")[0])
            if blocks.is_small(general, param.numel()):
                reason = "it is small: gathering its output costs more than replicating it"
            elif style is None and path and read_above(path, parent):
                class_name = type(parent).__name__
                reason = f"the code of {class_name} reads it directly, so it stays whole"
            else:
                reason = _reason(module, style, first_problem)
            yield f"{general}.{name}".lstrip("."), reason


def _reason(module: nn.Module, style: ParallelStyle | None, first_problem: str) -> str:
    if any(map(holds_tensors, module._parameters.values())):
        return f"it is a tensor subclass that holds other tensors. {HOW_TO_QUANTIZE}"
    if isinstance(style, LatentProjection):
        return "every rank computes the whole latent, because its heads read all of it"
    if first_problem:
        return f"every recipe computes a different result; the first: {first_problem[:200]}"
    return (
        f"the forward of {type(module).__name__} reads it directly; write a ParallelStyle to "
        "shard it"
    )


@check_types(plan=Mapping)
def format_plan(plan: Mapping[str, ParallelStyle]) -> str:
    """Format a plan as Python text.

    Args:
        plan: styles by path.

    Example:
        >>> from shoal_tp_styles import ColwiseParallel
        >>> print(format_plan({"head": ColwiseParallel()}))
        {
            "head": ColwiseParallel(),
        }
    """
    lines = [f'    "{path}": {style!r},' for path, style in plan.items()]
    return "\n".join(["{", *lines, "}"])
