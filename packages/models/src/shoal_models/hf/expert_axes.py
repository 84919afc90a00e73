"""Expert parallelism of a `DistributedConfig`: the ranks of the experts, and of their tokens.

`ep_size` ranks hold all experts. They are neighbors on the axes "fsdp" and "tp", and there are
`efsdp` such groups of ranks. For example, with fsdp_size=4 and tp_size=2:

    ep_size=2   the experts are divided among the 2 ranks of "tp", which have the same tokens; each
                rank computes its experts, and one reduction adds the outputs
    ep_size=4   the axis "fsdp" is divided into efsdp=2 and ep=2; the experts are divided among the
                2 ranks of "ep", and their hidden features among the 2 ranks of "tp"; all-to-alls
                over "ep" send the tokens to their experts, and back
    ep_size=8   the same, with efsdp=1 and ep=4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal_dtensor import Replicate
from shoal_dtensor.errors import PlanError
from shoal_mesh import DeviceMesh
from shoal_tp_styles import ExpertParallel, ExpertTensorParallel, parallelize_module
from shoal_tp_styles.internal import Plan

from .checked_plan import choose_plan
from .distributed_config import check_rules, pattern_of

# The styles of transformers for experts, and for a parameter of experts.
_OF_MODULE = "ep_dispatch_experts"
_OF_PARAMETER = "grouped_gemm"
EXPERTS_REMEDY = (
    "Change rules with tp_plan and ep_plan of the DistributedConfig, or leave out ep_size to get a "
    "plan that fits"
)
"""The remedy for a plan with experts that does not fit."""


@dataclass(frozen=True, slots=True)
class ExpertAxes:
    """The axes of experts that are divided among more ranks than those of "tp".

    Attributes:
        mesh: all ranks, with the axes "dp_replicate", "efsdp", "ep" and "tp".
        rules: the names of the modules of experts; `*` matches one part of a name.
    """

    mesh: DeviceMesh
    rules: tuple[str, ...]

    @property
    def data(self) -> DeviceMesh:
        """The axes of the ranks that have the same experts: replicas and shards, or shards."""
        has_replicas = self.mesh.size(0) > 1
        return self.mesh["dp_replicate", "efsdp"] if has_replicas else self.mesh["efsdp"]

    def modules_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of experts of a model, by name."""
        return _modules_that_match(self.rules, model)


def expert_rules_of(config: Any, model: Any) -> dict[str, str]:
    """Return the rules of a model's `ep_plan`, changed by those of a configuration.

    The rules are empty if the configuration has no expert parallelism.

    Raises:
        PlanError: if there are no rules, if a rule of the configuration names no module and no
            parameter, or if its implementation sends tokens in another way.
    """
    if (getattr(config, "ep_size", None) or 1) == 1:
        return {}
    _check_implementation(config)
    rules_of_model = dict(getattr(model, "ep_plan", None) or {})
    changes = config.ep_plan or {}
    check_rules("ep_plan", changes, model, rules_of_model)
    rules = {**rules_of_model, **changes}
    if not _modules_that_match(_rules_of_experts(rules), model):
        raise PlanError(
            f"DistributedConfig: ep_size={config.ep_size}, but no rule of the ep_plan names "
            f"experts of {type(model).__name__} with the style {_OF_MODULE!r} or {_OF_PARAMETER!r}, got "
            f"{rules}; pass ep_plan={{...}} with the names of its experts, or leave out ep_size"
        )
    return rules


def expert_axes_of(config: Any, mesh: DeviceMesh, rules: Mapping[str, str]) -> ExpertAxes | None:
    """Return the axes of the experts; None if the axis "tp" divides the experts, or no axis does.

    Args:
        config: a `DistributedConfig` of transformers.
        mesh: its mesh.
        rules: the rules of the experts.
    """
    tensor_ranks = mesh.size(mesh.axis_index("tp"))
    if not rules or config.ep_size == tensor_ranks:
        return None
    ranks = config.ep_size // tensor_ranks
    copies = mesh.size(mesh.axis_index("fsdp")) // ranks
    divided = mesh.unflatten("fsdp", (copies, ranks), ("efsdp", "ep"))
    return ExpertAxes(divided, _rules_of_experts(rules))


def plan_of_tensor_axis(
    plan: Plan, rules: Mapping[str, str], axes: ExpertAxes | None, model: nn.Module
) -> Plan:
    """Return the plan of the axis "tp", in which rules of experts replace the plan's rules.

    If the experts have axes of their own, the plan has no rules for them.
    """
    # a style alone is one for the whole model
    rules_of_plan = plan if isinstance(plan, Mapping) else {"": plan}
    merged: dict[str, Any] = {**rules_of_plan, **rules}
    if axes is None:
        return merged
    experts = tuple(axes.modules_of(model))
    prefixes = tuple(f"{name}." for name in experts)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]

    def is_of_experts(rule: str) -> bool:
        matched = [*filter(pattern_of(rule).fullmatch, names)]
        return bool(matched) and all(n in experts or n.startswith(prefixes) for n in matched)

    return {rule: style for rule, style in merged.items() if not is_of_experts(rule)}


def parallelize_experts(model: Any, axes: ExpertAxes) -> None:
    """Divide experts among the ranks of their axes, in place.

    It is proven on a small copy of the model that the experts can be divided, and their hidden
    features.

    Raises:
        PlanError: if the experts cannot be divided, or outputs would be wrong.
    """
    expert_mesh = axes.mesh["ep"]
    all_tokens = dict.fromkeys(axes.rules, ExpertParallel(input_layouts=Replicate()))
    choose_plan(model, expert_mesh, all_tokens, remedy=EXPERTS_REMEDY)
    style = ExpertParallel()
    tensor_mesh = axes.mesh["tp"]
    if tensor_mesh.size() > 1:
        features = dict.fromkeys(axes.rules, ExpertTensorParallel())
        choose_plan(model, tensor_mesh, features, remedy=EXPERTS_REMEDY)
        style = style.on(("ep", "tp"))
        expert_mesh = axes.mesh["ep", "tp"]
    parallelize_module(model, expert_mesh, dict.fromkeys(axes.rules, style), src_data_rank=None)


def _check_implementation(config: Any) -> None:
    # ranks with the same tokens add outputs, and other ranks exchange tokens
    fitting = "all_reduce" if config.ep_size == config.tp_size else "all_to_all"
    if config.ep_implementation not in ("auto", fitting):
        raise PlanError(
            f"DistributedConfig: ep_implementation={config.ep_implementation!r} with "
            f"ep_size={config.ep_size} and tp_size={config.tp_size}; expected 'auto' or "
            f"{fitting!r}"
        )


def _rules_of_experts(rules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names in rules that are those of modules of experts, without repetition."""
    of_modules = [rule for rule, style in rules.items() if style == _OF_MODULE]
    of_parameters = [rule for rule, style in rules.items() if style == _OF_PARAMETER]
    parents: Iterable[str] = (rule.rpartition(".")[0] for rule in of_parameters)
    return tuple(dict.fromkeys([*of_modules, *parents]))


def _modules_that_match(rules: Iterable[str], model: nn.Module) -> dict[str, nn.Module]:
    patterns = [pattern_of(rule) for rule in rules]

    def matches(name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in patterns)

    return {name: module for name, module in model.named_modules() if matches(name)}
