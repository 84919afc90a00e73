"""Plans that are proven while a model is loaded.  Covers: hf/checked_plan.py, hf/small_copy.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import SIZES, build_model, naming, needs_hf, save_plain, token_batch
from shoal_dtensor import DTensor
from shoal_mesh import abstract_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import PlanWarning, hf
from shoal_models.hf.checked_plan import choose_plan
from shoal_models.hf.small_copy import NoSmallCopy, SmallCopy, small_copy
from shoal_tp_styles import PlanError, unparallelize_module

pytestmark = needs_hf

MESH = abstract_mesh((2,), ("tp",))

# Family -> a configuration whose own plan is wrong, and what would be wrong.
DO_NOT_FIT: dict[str, tuple[dict[str, Any], str]] = {
    "Phi": ({"qk_layernorm": True}, "q_layernorm.weight"),
    "Cohere": ({"use_qk_norm": True}, "does not run"),
    "Apertus": ({}, "act_fn.alpha_p"),
    "Doge": ({"head_dim": 4}, "does not run"),
    "Glm4Moe": (
        {"use_qk_norm": True, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
        "q_norm.weight",
    ),
}


@pytest.mark.parametrize("family", DO_NOT_FIT)
@on_ranks(2, timeout=300)
def test_an_own_plan_that_does_not_fit_is_replaced(family: str, tmp_path: Path) -> None:
    # The model's own plan was applied unverified: gradients of norms were wrong, or a shape was.
    changes, problem = DO_NOT_FIT[family]
    options: dict[str, Any] = {}
    if "Moe" in family:
        options["experts_implementation"] = "eager"
    single = build_model(family, **changes)
    home = save_plain(single, tmp_path)
    with pytest.warns(PlanWarning, match=f"does not fit this configuration: .*{problem}"):
        model = hf.from_pretrained(home, all_ranks(), **options)
    if options:
        single.set_experts_implementation("eager")
    logits = model(token_batch()).logits
    expected = single(token_batch()).logits
    torch.testing.assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    assert any(isinstance(param, DTensor) for param in model.parameters())
    unparallelize_module(model)
    gradients = {name: param.grad for name, param in single.named_parameters()}
    for name, param in model.named_parameters():
        # Norms and routers compute in float32.
        torch.testing.assert_close(
            param.grad, gradients[name], rtol=1e-5, atol=1e-6, msg=naming(name)
        )


@on_ranks(2, timeout=200)
def test_a_plan_of_the_user_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    home = save_plain(build_model("Phi", qk_layernorm=True), tmp_path)
    plan = {"model.layers.*.self_attn.[qkv]_proj": "colwise"}
    with pytest.raises(PlanError, match=r"the plan does not fit PhiForCausalLM on 2 ranks: "):
        hf.from_pretrained(home, all_ranks(), plan)


@on_ranks(2, timeout=200)
def test_buffers_that_a_module_above_fills(tmp_path: Path) -> None:
    # The rule of FalconH1Model was skipped, because the model itself has no tensor that is missing.
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 64}
    single = build_model(
        "FalconH1", mamba_chunk_size=8, mamba_expand=2, head_dim=4, dtype=torch.float32, **sizes
    )
    home = save_plain(single, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        model = hf.from_pretrained(home, all_ranks())
    torch.testing.assert_close(
        model.model.layers[1].mamba.mup_vector, single.model.layers[1].mamba.mup_vector
    )
    torch.testing.assert_close(model(token_batch()).logits, single(token_batch()).logits)


@on_ranks(2, timeout=200)
def test_buffers_without_a_rule_are_those_of_the_constructor(tmp_path: Path) -> None:
    # Floating-point ones were refused, and buffers of bools were all True.
    from transformers import LlamaForCausalLM

    class WithTables(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("scale", torch.arange(3.0), persistent=False)
            self.register_buffer("causal", torch.ones(4, 4).tril().bool(), persistent=False)

    home = save_plain(build_model(), tmp_path)
    model: Any = hf.from_pretrained(home, all_ranks(), model_class=WithTables)
    assert model.scale.tolist() == [0, 1, 2]
    assert torch.equal(model.causal, torch.ones(4, 4).tril().bool())


def on_meta(family: str, head: str = "ForCausalLM", **sizes: Any) -> Any:
    """A model of transformers without storage."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        return getattr(transformers, f"{family}{head}")._from_config(config, dtype=torch.float32)


def test_a_copy_of_equal_layers_has_one_and_few_parameters() -> None:
    sample = small_copy(on_meta("Llama"))
    assert isinstance(sample, SmallCopy)
    model: Any = sample.model
    assert len(model.model.layers) == 1
    assert sum(param.numel() for param in model.parameters()) < 1 << 21


LARGE: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "layers of two kinds": (
        "DeepseekV3",
        "ForCausalLM",
        {"num_hidden_layers": 5, "first_k_dense_replace": 2},
        3,
    ),
    "recurrent blocks first": ("RecurrentGemma", "ForCausalLM", {}, 3),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_copy_of_layers_of_several_kinds(case: str) -> None:
    family, head, sizes, layers = LARGE[case]
    sample = small_copy(on_meta(family, head, **sizes))
    assert isinstance(sample, SmallCopy), sample
    model: Any = sample.model
    assert len(model.model.layers) == layers


# Models whose inputs are not tokens alone, or whose one-layer copy did not run.
OTHER_INPUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whisper": ("Whisper", "ForConditionalGeneration", {}),
    "longformer": ("Longformer", "ForMaskedLM", {"attention_window": [512] * 12}),
    "wav2vec2": ("Wav2Vec2", "Model", {}),
    "vit": ("ViT", "Model", {}),
    "t5": ("T5", "ForConditionalGeneration", {}),
}


@pytest.mark.parametrize("case", OTHER_INPUTS)
def test_a_copy_runs_on_inputs_of_its_kind(case: str) -> None:
    family, head, sizes = OTHER_INPUTS[case]
    sample = small_copy(on_meta(family, head, **sizes))
    assert isinstance(sample, SmallCopy), sample


def test_a_copy_that_cannot_be_made_leaves_the_plan_unproven() -> None:
    sizes: dict[str, Any] = {**SIZES}
    model = on_meta("Llama", **sizes)

    class Strange(type(model)):  # type: ignore[misc]  # transformers is not typed
        def forward(self, pages: Any) -> Any:
            raise ZeroDivisionError("one half of nothing")

    model.__class__ = Strange
    assert isinstance(small_copy(model), NoSmallCopy)
    with pytest.warns(PlanWarning, match=r"could not be proven: .*example inputs"):
        assert choose_plan(model, MESH) == dict(model.tp_plan)
