"""Covers: mixtures of experts of Hugging Face, parallel by their own plans, in float64."""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hf_models import naming, tensor_axis
from shoal_dtensor import DTensor, full_tensor
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import UnmatchedPlanWarning, parallelize_module

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPS = {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}

# Family -> what its configuration needs beyond the sizes.  Six experts on four ranks leave one
# without any.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "output_router_logits": True},
    "Qwen3Moe": {"num_experts": 6, "head_dim": 8},
    "DeepseekV3": {**LATENT, **GROUPS},
    "DeepseekV2": {**LATENT, **GROUPS},
    "GptOss": {"num_local_experts": 6, "head_dim": 8},
}


def build(family: str) -> Any:
    """A causal language model of a family, in float64."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    # the library's grouped product takes no float64
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    # routers start at zero, and route all tokens alike
    for param in model.parameters():
        if not param.any():
            torch.nn.init.normal_(param, std=0.5)
    return model


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_by_its_own_plan(family: str, experts: bool, ways: int) -> None:
    single = build(family)
    module = copy.deepcopy(single)
    plan = {**single.tp_plan, **(single.ep_plan if experts else {})}
    # plans name projections that a configuration may lack
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmatchedPlanWarning)
        parallelize_module(module, tensor_axis(ways), plan)
    tokens = torch.randint(3, 67, (2, 7))
    expected, got = (model(tokens, labels=tokens) for model in (single, module))
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)
    expected.loss.backward()
    got.loss.backward()
    sharded = 0
    singles = dict(single.named_parameters())
    for name, param in module.named_parameters():
        grad = full_tensor(param.grad)
        torch.testing.assert_close(grad, singles[name].grad, msg=naming(name))
        sharded += isinstance(param, DTensor) and "experts" in name
    assert sharded >= 2 or family == "GptOss"
