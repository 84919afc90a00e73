"""Use of transformers' `DistributedConfig`: its sizes make a mesh, and its rules change a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch.distributed as dist

from shoal_dtensor.errors import LayoutError, PlanError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.internal import accelerator
from shoal_tp_styles.internal import Plan

_AXES = ("dp_replicate", "fsdp", "tp")


def is_distributed_config(value: object) -> bool:
    """Tell whether a value is a DistributedConfig of transformers."""
    return all(hasattr(value, f"{axis}_size") for axis in _AXES)


def mesh_of(config: Any) -> DeviceMesh:
    """Return the mesh of all ranks that a `DistributedConfig` of transformers describes.

    The axes are "dp_replicate", "fsdp" and "tp"; an axis may have a single rank. Each rank of the
    first two axes reads its own rows of a batch: `mesh["dp_replicate", "fsdp"].flatten()` counts
    them. Experts are divided among ranks of "fsdp" and "tp", so `ep_size` adds no axis. With
    `pp_size` the first axis is "pp", whose ranks hold stages of the model.

    Args:
        config: a `transformers.distributed.DistributedConfig`.

    Raises:
        LayoutError: if the value is not a `DistributedConfig`, or if the product of its sizes is
            not the number of ranks.
        PlanError: if it has sequence parallelism, which is configured elsewhere; the message names
            the place. Also if `ep_size` is not a multiple of `tp_size` that divides
            `fsdp_size * tp_size`, or if stages are combined with data axes.

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
    if getattr(config, "enable_sequence_parallel", False):
        raise PlanError(
            "DistributedConfig: enable_sequence_parallel has no effect in transformers; pass a "
            "plan= with SequenceParallel"
        )
    stages = getattr(config, "pp_size", None) or 1
    _check_stages(config, stages)
    axes = ("pp", *_AXES) if stages > 1 else _AXES
    sizes = tuple(getattr(config, f"{axis}_size") or 1 for axis in axes)
    ranks = dist.get_world_size()
    if prod(sizes) != ranks:
        named = " * ".join(f"{axis}_size={n}" for axis, n in zip(axes, sizes, strict=True))
        raise LayoutError(f"DistributedConfig: {named} is not the number of ranks, {ranks}")
    _check_expert_ranks(config)
    return init_device_mesh(accelerator() or "cpu", sizes, mesh_dim_names=axes)


def _check_stages(config: Any, stages: int) -> None:
    rows = (config.dp_replicate_size or 1) * (config.fsdp_size or 1)
    if stages > 1 and rows > 1:
        raise PlanError(
            f"DistributedConfig: pp_size={stages} cannot be combined with dp_replicate_size * "
            f"fsdp_size={rows}, as in transformers; combine it with tp_size, or use "
            "torch.distributed.pipelining with fully_shard on each stage"
        )


def _check_expert_ranks(config: Any) -> None:
    experts = getattr(config, "ep_size", None) or 1
    tensor = config.tp_size or 1
    both = tensor * (config.fsdp_size or 1)
    if experts > 1 and (experts % tensor or both % experts):
        raise PlanError(
            f"DistributedConfig: ep_size={experts} must be a multiple of tp_size={tensor} and "
            f"divide fsdp_size * tp_size={both}"
        )


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
    check_rules("tp_plan", rules, model, model.tp_plan)
    # A rule of the configuration replaces the model's rule of the same name. The model may have no
    # plan, and then the rules are the whole plan.
    return {**(model.tp_plan or {}), **rules} if rules else {}


def check_rules(
    kind: str, rules: Mapping[str, str], model: Any, rules_of_model: Mapping[str, str] | None
) -> None:
    """Raise PlanError if a rule of a configuration names no module and no parameter.

    Args:
        kind: the attribute of the configuration.
        rules: its rules.
        model: the model.
        rules_of_model: the model's own rules, examples of names for the message.
    """
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    # Example: the rule "layers.*.q" names the module "layers.0.q".
    unmatched = [rule for rule in rules if not any(map(pattern_of(rule).fullmatch, names))]
    if unmatched:
        known = [*(rules_of_model or names)][:3]
        raise PlanError(
            f"DistributedConfig: the rules {unmatched} of {kind} name no module of "
            f"{type(model).__name__}; names are whole, such as {known}"
        )


def pattern_of(rule: str) -> re.Pattern[str]:
    """Return the pattern of the names that a rule matches; `*` matches one part of a name."""
    return re.compile(re.escape(rule).replace(r"\*", "[^.]+"))
