"""`choose_plan`: a plan for a model of transformers, proven on a small copy of the model.

The plan is verified on a `small_copy` of the model, on simulated ranks. A model without a small
copy keeps its plan, with a warning that it could not be proven.
"""

from __future__ import annotations

import warnings
from typing import Any

from shoal_dtensor.errors import PlanError
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_tp_styles import Verification, verify
from shoal_tp_styles.internal import MOST_RANKS, AutoPlan, Plan

from ..errors import PlanWarning
from ..planning.auto import auto_plan
from .small_copy import NoSmallCopy, SmallCopy, small_copy

REMEDY = "Leave out plan= to get a plan that fits"
"""The remedy for a plan of the user that does not fit."""


def choose_plan(
    model: Any,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    remedy: str = REMEDY,
) -> Plan:
    """Choose the plan for a model of transformers, and prove it on simulated ranks.

    Args:
        model: a model of transformers, on any device, including meta.
        mesh: a mesh with one axis.
        plan: the user's plan. If it is left out, the model's own plan is chosen if it fits, and
            otherwise an automatic plan.
        remedy: the last sentence of the error for a plan of the user that does not fit.

    Raises:
        PlanError: if the user's plan does not fit, or no automatic plan is right; the message names
            the parameters that would be wrong.

    Warns:
        PlanWarning: if the model's own plan does not fit, or if a plan could not be proven.
    """
    chosen = plan
    if chosen is None and model.tp_plan:
        chosen = dict(model.tp_plan)
    name = type(model).__name__
    sample = small_copy(model)
    if isinstance(sample, NoSmallCopy):
        if chosen is None:
            raise PlanError(
                f"{name} does not have a tp_plan, and an automatic plan cannot be proven: "
                f"{sample.reason}; pass plan={{path: style}}"
            )
        _warn_unproven(name, sample.reason)
        return chosen
    # A larger number of ranks changes the sizes of shards, not whether a plan is right.
    simulated = min(mesh.size(), MOST_RANKS)
    ranks = abstract_mesh((simulated,), mesh.mesh_dim_names)
    if chosen is None:
        return _automatic_plan(name, sample, ranks, "does not have a tp_plan")
    found = verify(sample.model, chosen, ranks, **sample.inputs)
    problem = _first_problem(found)
    if not problem:
        if found.unproven:
            _warn_unproven(name, found.unproven[0])
        return chosen
    if plan is not None:
        raise PlanError(
            f"from_pretrained: the plan does not fit {name} on {mesh.size()} ranks: {problem}. "
            f"{remedy}"
        )
    automatic = _automatic_plan(name, sample, ranks, f"has a tp_plan that does not fit: {problem}")
    warnings.warn(
        f"from_pretrained: the tp_plan of {name} does not fit this configuration: {problem}. A "
        "proven automatic plan is used instead",
        PlanWarning,
        # the line that calls from_pretrained with a mesh
        stacklevel=4,
    )
    return automatic


def _automatic_plan(name: str, sample: SmallCopy, ranks: DeviceMesh, cause: str) -> Plan:
    with warnings.catch_warnings():
        # The error below says why the plan is empty, so the warning is not needed.
        warnings.simplefilter("ignore")
        found: AutoPlan = auto_plan(sample.model, ranks, **sample.inputs)
    if not found:
        raise PlanError(
            f"{name} {cause}, and no automatic plan is correct on {ranks.size()} ranks: "
            f"{found.why_empty}; pass plan={{path: style}}"
        )
    return dict(found)


def _first_problem(found: Verification) -> str:
    """Return errors and wrong results as one line; empty if there are none."""
    problems = [*found.errors, *found.wrong]
    if not problems:
        return ""
    others = len(problems) - 1
    return f"{problems[0]} (and {others} more)" if others else problems[0]


def _warn_unproven(name: str, reason: str) -> None:
    warnings.warn(
        f"from_pretrained: the plan for {name} could not be proven: {reason}. Compare a small "
        "configuration with one process: verify(model, plan, mesh, **inputs)",
        PlanWarning,
        # the line that calls from_pretrained with a mesh
        stacklevel=5,
    )
