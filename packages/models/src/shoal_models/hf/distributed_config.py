"""Use of transformers' `DistributedConfig`: its sizes make a mesh, and its rules change a plan."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import torch.distributed as dist

from shoal_dtensor.errors import LayoutError, PlanError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.internal import accelerator
from shoal_tp_styles.internal import Plan

_AXES = ("dp_replicate", "fsdp", "tp")
# Sizes for which the mesh has no axis, and the way out that the error names. For stages of a
# pipeline the way out is torch.distributed.pipelining: a stage is a module, which may be parallel,
# so each stage is loaded by its own call.
_OTHER_SIZES = {
    "pp_size": "load each stage by itself: torch.distributed.pipelining takes parallel modules",
    "ep_size": "pass a mesh, and a plan= in which ExpertParallel shards the experts",
}


def is_distributed_config(value: object) -> bool:
    """Tell whether a value is a DistributedConfig of transformers."""
    return all(hasattr(value, f"{axis}_size") for axis in _AXES)


def mesh_of(config: Any) -> DeviceMesh:
    """Return the mesh of all ranks that a `DistributedConfig` of transformers describes.

    The axes are "dp_replicate", "fsdp" and "tp"; an axis may have a single rank. Each rank of the
    first two axes reads its own rows of a batch: `mesh["dp_replicate", "fsdp"].flatten()` counts
    them.

    Args:
        config: a `transformers.distributed.DistributedConfig`.

    Raises:
        LayoutError: if the value is not a `DistributedConfig`, or if the product of its sizes is
            not the number of ranks.
        PlanError: if it has stages of a pipeline, expert parallelism or sequence parallelism. They
            are configured elsewhere; the message names the place.

    Example:
        >>> from transformers.distributed import DistributedConfig  # doctest: +SKIP
        >>> config = DistributedConfig(tp_size=2, fsdp_size=4)  # doctest: +SKIP
        >>> mesh_of(config).shape  # on 8 ranks  # doctest: +SKIP
        (1, 4, 2)
    """
    if not is_distributed_config(config):
        raise LayoutError(
            "mesh_of: expected a transformers.distributed.DistributedConfig, got "
            f"{type(config).__name__}"
        )
    for name, way_out in _OTHER_SIZES.items():
        size = getattr(config, name, None) or 1
        if size > 1:
            raise PlanError(f"DistributedConfig: {name}={size} is no axis of this mesh; {way_out}")
    if getattr(config, "enable_sequence_parallel", False):
        raise PlanError(
            "DistributedConfig: enable_sequence_parallel has no effect in transformers; pass a "
            "plan= with SequenceParallel"
        )
    sizes = tuple(getattr(config, f"{axis}_size") or 1 for axis in _AXES)
    ranks = dist.get_world_size()
    if prod(sizes) != ranks:
        named = " * ".join(f"{axis}_size={n}" for axis, n in zip(_AXES, sizes, strict=True))
        raise LayoutError(f"DistributedConfig: {named} is not the number of ranks, {ranks}")
    return init_device_mesh(accelerator() or "cpu", sizes, mesh_dim_names=_AXES)


def data_axes_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the data axes of the mesh of a configuration; None if they have a single rank."""
    axes = mesh["dp_replicate", "fsdp"]
    return axes if axes.size() > 1 else None


def plan_of(config: Any, model: Any) -> Plan | None:
    """Return the model's own plan, changed by the rules of a configuration.

    The result is None if the configuration leaves the model's plan as it is (its rules are None or
    "auto"), and an empty plan if its rules are an empty dictionary.

    Raises:
        PlanError: if a rule of the configuration names no module and no parameter.
    """
    rules = config.tp_plan
    if rules is None or rules == "auto":
        return None
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    # Example: the rule "layers.*.q" names the module "layers.0.q".
    unmatched = [rule for rule in rules if not any(map(pattern_of(rule).fullmatch, names))]
    if unmatched:
        known = [*(model.tp_plan or names)][:3]
        raise PlanError(
            f"DistributedConfig: the rules {unmatched} of tp_plan name no module of "
            f"{type(model).__name__}; names are whole, such as {known}"
        )
    # A rule of the configuration replaces the model's rule of the same name. The model may have no
    # plan, and then the rules are the whole plan.
    return {**(model.tp_plan or {}), **rules} if rules else {}


def pattern_of(rule: str) -> re.Pattern[str]:
    """Return the pattern of the names that a rule matches; `*` matches one part of a name."""
    return re.compile(re.escape(rule).replace(r"\*", "[^.]+"))
