"""Architectures of transformers in tiny configurations, and what a plan makes of one on real ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_mesh import init_device_mesh
from shoal_tp_styles import auto_plan, parallelize_module, unparallelize_module

__all__ = ["ARCHITECTURES", "Case", "build", "inputs_of", "plan_of", "verdict"]

CAUSAL = """
    apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl diffllama ernie4_5 exaone4 falcon gemma
    gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite helium hunyuan_v1_dense jetmoe lfm2 llama
    llama4_text mamba mistral mixtral mpt nemotron olmo olmo2 olmoe openai-gpt opt persimmon phi phi3 qwen2 qwen2_moe
    qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
"""
MASKED = """
    albert bert camembert deberta-v2 distilbert electra ernie esm modernbert mpnet nystromformer roberta roformer
"""
SEQUENCE_TO_SEQUENCE = "bart blenderbot longt5 m2m_100 marian mbart mt5 pegasus plbart switch_transformers t5 umt5"
ARCHITECTURES = {
    **dict.fromkeys(CAUSAL.split(), "AutoModelForCausalLM"),
    **dict.fromkeys(MASKED.split(), "AutoModelForMaskedLM"),
    **dict.fromkeys(SEQUENCE_TO_SEQUENCE.split(), "AutoModelForSeq2SeqLM"),
}
"""Names of architectures, with the class that builds a model of one."""

WIDTH, INNER, HEADS, VOCABULARY = 32, 48, 8, 67  # the vocabulary is uneven on two and on four ranks
# Configurations call the same size by many names; each gets those that it has.
SIZES = {
    **dict.fromkeys(("hidden_size", "embedding_size", "d_model", "dim", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), INNER),
    **dict.fromkeys(("dff", "hidden_dim", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("n_layer", "n_layers"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "num_experts", "num_local_experts", "num_key_value_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "marian": {"decoder_start_token_id": 0},
    **{name: {"decoder_start_token_id": 0} for name in ("longt5", "mt5", "switch_transformers", "t5", "umt5")},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A plan of an architecture on so many ranks.

    Attributes:
        name: of the architecture.
        plan: `own` (its `tp_plan`), `names` (`auto_plan` without a mesh), or `proven` (those of them that a run showed
            to be right).
        ways: ranks along the axis, 2 or 4.
        entries: of the plan `names`, those that `proven` keeps.
    """

    name: str
    plan: str
    ways: int
    entries: tuple[str, ...] = ()


def build(name: str) -> nn.Module:
    """A model of an architecture, in float64 and eval mode; the same weights on every rank."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    make = transformers.CONFIG_MAPPING[name]
    standard = make()
    sizes = {key: size for key, size in SIZES.items() if hasattr(standard, key) and _is_field(standard, key)}
    config = make(**{**sizes, **SPECIAL.get(name, {})})
    torch.manual_seed(0)
    auto = getattr(transformers, ARCHITECTURES[name])
    model: nn.Module = auto.from_config(config, experts_implementation="eager")  # grouped products take no float64
    return model.double().eval()


def _is_field(config: Any, key: str) -> bool:
    attribute = getattr(type(config), key, None)
    return not isinstance(attribute, property) or attribute.fset is not None


def inputs_of(name: str, batch: int, length: int) -> dict[str, Tensor]:
    """Tokens and labels."""
    tokens = torch.randint(3, VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens.roll(1, -1)}


def plan_of(model: Any, case: Case) -> dict[str, Any]:
    """The entries of a case's plan."""
    if case.plan == "own":
        return dict(model.tp_plan or {})
    plan = dict(auto_plan(model))
    return plan if case.plan == "names" else {key: plan[key] for key in case.entries}


def verdict(case: Case) -> str:
    """One rank's part: "" if logits, loss and all gradients are those of one process, else what happened."""
    single: Any = build(case.name)
    mesh = init_device_mesh("cpu", (4 // case.ways, case.ways), mesh_dim_names=("dp", "tp"))["tp"]
    torch.manual_seed(1)
    with torch.no_grad():  # other weights and tokens than those that `verify` saw, none of them zero
        for param in single.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    inputs = inputs_of(case.name, 3, 7)
    try:
        module: Any = parallelize_module(copy.deepcopy(single), mesh, plan_of(single, case), on_unmatched="error")
        got = module(**inputs)
        got.loss.backward()
    except Exception as error:  # whatever a wrong plan raises
        return f"error: {type(error).__name__}: {str(error)[:200]}"
    expected = single(**inputs)
    expected.loss.backward()
    values = {"logits": (got.logits, expected.logits), "loss": (got.loss, expected.loss)}
    grads = _gradients(unparallelize_module(module))
    values |= {f"gradient of {name}": (grads.get(name), grad) for name, grad in _gradients(single).items()}
    wrong = [name for name, pair in values.items() if not _same(*map(_global, pair))]
    return f"wrong: {', '.join(wrong)[:300]}" if wrong else ""


def _gradients(model: nn.Module) -> Mapping[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _global(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _same(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return all(each is None or not each.any() for each in (got, expected))
    if got.shape != expected.shape:
        return False
    # Some norms compute in float32, whatever the parameters are. A wrong plan is wrong in the first digits.
    return float((got - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-10
