"""Tiny mixtures of experts of transformers, in float64."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_models import build_model

__all__ = ["EAGER", "FAMILIES", "mixture"]

# The library's grouped product takes no float64.
EAGER: dict[str, Any] = {"experts_implementation": "eager"}
# six experts on four ranks: (2, 2, 1, 1)
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 4,
        "moe_intermediate_size": 12,
    },
}


def mixture(family: str = "Mixtral", **changes: Any) -> Any:
    """A mixture of experts whose routers do not send all tokens to the same experts."""
    single = build_model(family, **{**FAMILIES[family], **changes})
    single.set_experts_implementation("eager")
    for param in single.parameters():
        if not param.any():
            nn.init.normal_(param, std=0.5)
    return single
