"""Styles by the names in the `tp_plan`s of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal_dtensor import Partial, Replicate
from shoal_dtensor.errors import PlanError
from shoal_mesh.internal import near_miss

from ..errors import StyleNameError
from ..styles.activation import LatentProjection, OwnParameters, SequenceParallel
from ..styles.expert import ExpertParallel, ExpertTensorParallel, IdentityExpert
from ..styles.linear import ColwiseParallel, PackedColwiseParallel, RowwiseParallel
from ..styles.prepare import PrepareModuleOutput
from ..styles.style import ParallelStyle

STYLE_NAMES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "local_colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "local_rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "packed_colwise": lambda: PackedColwiseParallel(blocks=2),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    "all_reduce": lambda: PrepareModuleOutput(
        output_layouts=Partial(), desired_output_layouts=Replicate()
    ),
    "gather": lambda: PrepareModuleOutput(
        output_layouts=Partial(), desired_output_layouts=Replicate()
    ),
    "moe_identity_expert": IdentityExpert,
    # These names leave the module unchanged. A router under them is replicated: every rank computes
    # its choices for all tokens.
    **dict.fromkeys(("ep_router", "replicate", "replicated"), lambda: None),
}

_OF_PARAMETERS = (
    "it applies to parameters of experts; for a module write a style (docs/how-to/write-a-style.md)"
)
_FUSED = (
    "kernels that fuse the exchange of tokens are not supported; use moe_tp_experts or "
    "ep_dispatch_experts"
)
REFUSED: dict[str, str] = {
    "megamoe_experts": _FUSED,
    "megamoe_router": _FUSED,
    **dict.fromkeys(("grouped_gemm", "packed_rowwise"), _OF_PARAMETERS),
}
WITH_CONTEXT = frozenset({"moe_tp_experts", "ep_dispatch_experts", "local_params", "mla_kv_a_proj"})
"""Names whose style depends on the module's parameters, or on the model's configuration."""

# By the style name of a single parameter: the dim that is sharded.
_DIMS = {"colwise": -2, "local_colwise": -2, "rowwise": -1, "local_rowwise": -1}
# The style names of single parameters that are not sharded.
_WHOLE = {"replicate", "replicated"}


def style_in_context(name: str | None, parameters: Mapping[str, str], config: Any) -> ParallelStyle:
    """Return the style that a name of `WITH_CONTEXT` has in a plan.

    The style depends on the styles of `parameters` of the module.
    """
    if name == "mla_kv_a_proj":
        return _latent_projection(config)
    packed = any(style.startswith("packed") for style in parameters.values())
    if name == "ep_dispatch_experts" or "grouped_gemm" in parameters.values():
        return ExpertParallel(input_layouts=Replicate())
    if name == "moe_tp_experts" or packed:
        return ExpertTensorParallel()
    unknown = set(parameters.values()) - _DIMS.keys() - _WHOLE
    if unknown:
        raise PlanError(
            f"styles {sorted(unknown)} of parameters; known are {', '.join(_DIMS)} and replicate"
        )
    dims = {param: _DIMS[style] for param, style in parameters.items() if style in _DIMS}
    return OwnParameters(dims=dims)


def _latent_projection(config: Any) -> LatentProjection:
    """Return the style of a latent projection, with the rotary features of the configuration."""
    has_text_config = hasattr(config, "get_text_config")
    text_config = config.get_text_config() if has_text_config else config
    rotary = getattr(text_config, "qk_rope_head_dim", None)
    if not isinstance(rotary, int):
        raise PlanError(
            "style 'mla_kv_a_proj': the model's config does not have qk_rope_head_dim; use "
            "LatentProjection(rotary=...)"
        )
    return LatentProjection(rotary=rotary)


def style_named(name: str) -> ParallelStyle | None:
    """Return the style of a Hugging Face name; None for names that leave a module unchanged.

    Raises:
        StyleNameError: if the name is unknown; the message lists the known names.
        PlanError: if the name stands for a style that is not supported.

    Example:
        >>> style_named("rowwise")
        RowwiseParallel()
    """
    if name in REFUSED:
        raise PlanError(f"style {name!r}: {REFUSED[name]}")
    if name in WITH_CONTEXT:
        return style_in_context(name, {}, None)
    if name not in STYLE_NAMES:
        known = sorted(STYLE_NAMES.keys() | WITH_CONTEXT)
        raise StyleNameError(
            f"unknown style {name!r}{near_miss(name, known)}; known are {', '.join(known)}"
        )
    return STYLE_NAMES[name]()
