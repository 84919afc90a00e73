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
from shoal_tp_styles import ExpertParallel, ExpertTensorParallel, ParallelStyle, parallelize_module
from shoal_tp_styles.internal import Plan

from .checked_plan import choose_plan
from .distributed_config import check_rules, pattern_of

# The names of transformers' styles for a module of experts, and for a parameter of such a module.
_STYLE_OF_EXPERTS = "ep_dispatch_experts"
_STYLE_OF_PARAMETER = "grouped_gemm"
# The end of the error for a plan with experts that does not fit.
EXPERTS_REMEDY = (
    "Change rules with tp_plan and ep_plan of the DistributedConfig, or leave out ep_size to get a "
    "plan that fits"
)


@dataclass(frozen=True, slots=True)
class ExpertAxes:
    """The axes of experts that are divided among more ranks than those of "tp".

    Attributes:
        mesh: all ranks, with the axes "dp_replicate", "efsdp", "ep" and "tp".
        patterns: the names of the modules of experts; `*` matches one part of a name.
    """

    mesh: DeviceMesh
    patterns: tuple[str, ...]

    @property
    def data(self) -> DeviceMesh:
        """The axes of the ranks that have the same experts: "dp_replicate" and "efsdp".

        Without replicas it is "efsdp" alone. The parameters of experts are sharded over "efsdp".
        """
        has_replicas = self.mesh.size(0) > 1
        return self.mesh["dp_replicate", "efsdp"] if has_replicas else self.mesh["efsdp"]

    def modules_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of experts of a model, by name."""
        return _modules_that_match(self.patterns, model)


def expert_rules_of(config: Any, model: Any) -> dict[str, str]:
    """Return the rules of a model's `ep_plan`, changed by the rules of a configuration.

    A rule maps the name of a module or a parameter to the name of a style. There are no rules if
    the configuration has no expert parallelism.

    Args:
        config: a `DistributedConfig` of transformers.
        model: a model of transformers.

    Raises:
        PlanError: if the configuration has expert parallelism and no rule names experts, if one of
            its rules names no module and no parameter, or if its `ep_implementation` does not fit
            its sizes.
    """
    # Older releases of transformers have no `ep_size`.
    ep_size = getattr(config, "ep_size", None) or 1
    if ep_size == 1:
        return {}
    _check_implementation(config)
    rules_of_model = dict(getattr(model, "ep_plan", None) or {})
    changes = config.ep_plan or {}
    check_rules("ep_plan", changes, model, rules_of_model)
    rules = {**rules_of_model, **changes}
    if not _modules_that_match(_patterns_of_experts(rules), model):
        raise PlanError(
            f"DistributedConfig: ep_size={config.ep_size}, but no rule of the ep_plan names "
            f"experts of {type(model).__name__} with the style {_STYLE_OF_EXPERTS!r} or "
            f"{_STYLE_OF_PARAMETER!r}, got {rules}; pass ep_plan={{...}} with the names of its "
            "experts, or leave out ep_size"
        )
    return rules


def expert_axes_of(config: Any, mesh: DeviceMesh, rules: Mapping[str, str]) -> ExpertAxes | None:
    """Return the axes of the experts; None if "tp" alone divides the experts, or no axis does.

    Args:
        config: a `DistributedConfig` of transformers.
        mesh: its mesh.
        rules: the rules of `expert_rules_of`.
    """
    tensor_ranks = mesh.size(mesh.axis_index("tp"))
    if not rules or config.ep_size == tensor_ranks:
        return None
    # Example: ep_size=4, fsdp_size=4, tp_size=2 -> ep is 2 and efsdp is 2.
    ep = config.ep_size // tensor_ranks
    efsdp = mesh.size(mesh.axis_index("fsdp")) // ep
    mesh_of_experts = mesh.unflatten("fsdp", (efsdp, ep), ("efsdp", "ep"))
    return ExpertAxes(mesh_of_experts, _patterns_of_experts(rules))


def plan_of_tensor_axis(
    plan: Plan, rules: Mapping[str, str], axes: ExpertAxes | None, model: nn.Module
) -> Plan:
    """Return the plan of the axis "tp", in which rules of experts replace rules of the plan.

    Args:
        plan: styles by path, or one style for the whole model.
        rules: the rules of `expert_rules_of`.
        axes: the axes of the experts, if they have axes of their own. The plan then has no rules
            for experts.
        model: the model.
    """
    rules_of_plan = plan if isinstance(plan, Mapping) else {"": plan}
    merged: dict[str, Any] = {**rules_of_plan, **rules}
    if axes is None:
        return merged
    experts = tuple(axes.modules_of(model))
    prefixes = tuple(f"{expert}." for expert in experts)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]

    def concerns_experts_only(path: str) -> bool:
        matched = [*filter(pattern_of(path).fullmatch, names)]
        in_experts = [name in experts or name.startswith(prefixes) for name in matched]
        # A path that matches nothing is left to `parallelize_module`.
        return bool(matched) and all(in_experts)

    return {path: style for path, style in merged.items() if not concerns_experts_only(path)}


def parallelize_experts(model: Any, axes: ExpertAxes) -> None:
    """Divide experts among the ranks of their axes, in place.

    Two plans are proven on a small copy of the model: one that divides the experts, and one that
    divides their hidden features.

    Raises:
        PlanError: if the experts cannot be divided, or outputs would be wrong.
    """
    expert_mesh = axes.mesh["ep"]
    tensor_mesh = axes.mesh["tp"]
    # The ranks of a proof all have the same tokens. In training each rank of "ep" has its own.
    with_same_tokens = ExpertParallel(input_layouts=Replicate())
    _prove(with_same_tokens, model, expert_mesh, axes)
    style = ExpertParallel()
    if tensor_mesh.size() > 1:
        _prove(ExpertTensorParallel(), model, tensor_mesh, axes)
        style = style.on(("ep", "tp"))
        expert_mesh = axes.mesh["ep", "tp"]
    plan = dict.fromkeys(axes.patterns, style)
    parallelize_module(model, expert_mesh, plan, src_data_rank=None)


def _prove(style: ParallelStyle, model: Any, mesh: DeviceMesh, axes: ExpertAxes) -> None:
    """Raise PlanError if the experts of a model cannot have a style on an axis."""
    choose_plan(model, mesh, dict.fromkeys(axes.patterns, style), remedy=EXPERTS_REMEDY)


def _check_implementation(config: Any) -> None:
    """Refuse an `ep_implementation` that does not fit the sizes of a configuration."""
    # The ranks of "tp" have the same tokens and add their outputs. If more ranks divide the
    # experts, ranks with other tokens exchange them.
    fitting = "all_reduce" if config.ep_size == config.tp_size else "all_to_all"
    if config.ep_implementation not in ("auto", fitting):
        raise PlanError(
            f"DistributedConfig: ep_implementation={config.ep_implementation!r} with "
            f"ep_size={config.ep_size} and tp_size={config.tp_size}; expected 'auto' or "
            f"{fitting!r}"
        )


def _patterns_of_experts(rules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of modules of experts in rules, without repetition.

    Example:
        >>> _patterns_of_experts({"layers.*.experts.gate_up_proj": "grouped_gemm", "norm": "other"})
        ('layers.*.experts',)
    """
    of_modules = [name for name, style in rules.items() if style == _STYLE_OF_EXPERTS]
    of_parameters = [name for name, style in rules.items() if style == _STYLE_OF_PARAMETER]
    parents = [name.rpartition(".")[0] for name in of_parameters]
    return tuple(dict.fromkeys([*of_modules, *parents]))


def _modules_that_match(patterns: Iterable[str], model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose name one of the patterns matches, by name."""
    expressions = [pattern_of(pattern) for pattern in patterns]

    def matches(name: str) -> bool:
        return any(expression.fullmatch(name) for expression in expressions)

    return {name: module for name, module in model.named_modules() if matches(name)}
