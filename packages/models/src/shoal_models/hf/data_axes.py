"""Sharding of a model of transformers over the data axes of a `DistributedConfig`.

A rule of the model's `fsdp_plan`, or of the configuration's, names modules and what a forward does
with their gathered parameters:

    rule                                    the modules' parameters
    "model.layers.*": "free_full_weight"    are freed after a forward and gathered in the backward
    "model.norm": "keep_full_weight"        stay gathered until the backward has ended
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal_data_parallel import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shoal_dtensor.errors import PlanError
from shoal_mesh import DeviceMesh

from .distributed_config import pattern_of
from .expert_axes import ExpertAxes

# The styles of transformers, and whether a unit is freed after its forward.
_FREES = {"free_full_weight": True, "keep_full_weight": False}


def shard_over_data(
    model: Any, config: Any, mesh: DeviceMesh, experts: ExpertAxes | None = None
) -> None:
    """Shard a model over data axes, in place, by the FSDP plan of the model and the configuration.

    Args:
        model: a model of transformers, on any device, including meta.
        config: a `DistributedConfig` of transformers.
        mesh: the data axes: replicas and shards.
        experts: the axes of experts that are divided among more ranks than those of "tp". The
            experts are sharded over the ranks that have the same experts.

    Raises:
        PlanError: if there is no plan, if a rule of the configuration names no module, or if a
            style is unknown.
    """
    plan = _plan_of(config, model)
    options: dict[str, Any] = {}
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if config.fsdp_mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # without replicas the mesh has one axis
    data = mesh if mesh.size(0) > 1 else mesh["fsdp"]
    if experts is not None:
        _shard_experts(model, experts, mesh.size(), options)
    for name, style in _units_of(plan, model).items():
        module = model.get_submodule(name)
        fully_shard(module, data, reshard_after_forward=_FREES[style], **options)
    fully_shard(model, data, **options)
    # The ranks may generate different numbers of tokens, and all take part in every gather.
    model._is_fsdp_managed_module = True


def _shard_experts(
    model: nn.Module, experts: ExpertAxes, batches: int, options: dict[str, Any]
) -> None:
    """Shard modules of experts over the ranks that have the same experts.

    The backward of the exchange adds the gradients of the tokens of all ranks of "ep", and the
    reduction those of the other ranks. So the sum is one over all batches, whose number divides it.
    """
    for module in experts.modules_of(model).values():
        unit = fully_shard(module, experts.data, reshard_after_forward=True, **options)
        unit.set_gradient_divide_factor(batches)


def _plan_of(config: Any, model: Any) -> dict[str, str]:
    plan_of_model = dict(getattr(model, "fsdp_plan", None) or {})
    rules = config.fsdp_plan or {}
    names = [name for name, _ in model.named_modules()]
    unmatched = [rule for rule in rules if not any(map(pattern_of(rule).fullmatch, names))]
    class_name = type(model).__name__
    if unmatched:
        raise PlanError(
            f"DistributedConfig: the rules {unmatched} of fsdp_plan name no module of "
            f"{class_name}; names are whole, such as {[*plan_of_model][:3]}"
        )
    plan = {**plan_of_model, **rules}
    unknown = {style for style in plan.values() if style not in _FREES}
    if unknown:
        raise PlanError(
            f"DistributedConfig: fsdp_plan has the styles {sorted(unknown)}; expected one of "
            f"{[*_FREES]}"
        )
    if not plan:
        raise PlanError(
            f"{class_name} does not have an fsdp_plan; pass DistributedConfig(fsdp_plan={{...}}), "
            "with modules such as 'model.layers.*': 'free_full_weight'"
        )
    return plan


def _units_of(plan: dict[str, str], model: Any) -> dict[str, str]:
    """Return the styles by the names of modules, inner modules before the modules around them.

    Modules that share a parameter, such as embeddings and a head, are left to the outermost unit,
    which has the parameters of all of them.
    """
    shared = _modules_that_share(model)
    units = {}
    for name, module in model.named_modules():
        # a rule with the module's own name comes before a rule for several modules
        style = plan.get(name)
        if style is None:
            matched = [s for rule, s in plan.items() if pattern_of(rule).fullmatch(name)]
            style = matched[0] if matched else None
        if style is not None and shared.isdisjoint(module.modules()):
            units[name] = style
    return dict(sorted(units.items(), key=lambda unit: -unit[0].count(".")))


def _modules_that_share(model: nn.Module) -> set[nn.Module]:
    """Return the modules with a parameter that another module has, too."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(module)
    return {module for modules in owners.values() if len(modules) > 1 for module in modules}
