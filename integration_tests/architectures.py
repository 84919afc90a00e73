"""Tiny architectures of transformers, and their results under a plan on real ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal_mesh import init_device_mesh
from shoal_tp_styles import (
    ParallelStyle,
    UnmatchedPlanWarning,
    parallelize_module,
    unparallelize_module,
)

__all__ = ["ARCHITECTURES", "Case", "build", "inputs_of", "verdict"]

CAUSAL = """
    apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl diffllama ernie4_5 exaone4 falcon
    gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite helium hunyuan_v1_dense
    jetmoe lfm2 llama llama4_text mamba mistral mixtral mpt nemotron olmo olmo2 olmoe openai-gpt opt
    persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
    afmoe bailing_hybrid deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe falcon_h1
    falcon_mamba flex_olmo gemma3n_text glm4_moe glm4_moe_lite gpt_neo gpt_oss granitemoe
    granitemoehybrid jamba kimi_linear laguna lfm2_moe longcat_flash mamba2 mimo_v2_flash minicpm3
    minimax ministral modernbert-decoder nanochat nemotron_h olmo_hybrid phimoe qwen3_5_text
    qwen3_next recurrent_gemma vaultgemma zamba2
"""
MASKED = """
    albert bert camembert deberta-v2 distilbert electra ernie esm modernbert mpnet nystromformer
    roberta roformer
"""
SEQUENCE_TO_SEQUENCE = (
    "bart blenderbot longt5 m2m_100 marian mbart mt5 pegasus plbart switch_transformers t5 umt5"
)
SEQUENCE_TO_SEQUENCE += " mvp nllb-moe"
ARCHITECTURES = {
    **dict.fromkeys(CAUSAL.split(), "AutoModelForCausalLM"),
    **dict.fromkeys(MASKED.split(), "AutoModelForMaskedLM"),
    **dict.fromkeys(SEQUENCE_TO_SEQUENCE.split(), "AutoModelForSeq2SeqLM"),
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Names of architectures, with the class that builds a model of one."""

# the vocabulary is uneven on two and on four ranks
WIDTH, INNER, HEADS, VOCABULARY = 32, 48, 8, 67
# Configurations call the same size by many names; each gets those that it has.
SIZES = {
    **dict.fromkeys(
        ("hidden_size", "embedding_size", "d_model", "dim", "word_embed_proj_dim"), WIDTH
    ),
    **dict.fromkeys(
        ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"),
        INNER,
    ),
    **dict.fromkeys(("dff", "hidden_dim", "ffn_hidden_size"), INNER),
    **dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads"),
        HEADS,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "encoder_layers",
            "decoder_layers",
            "num_layers",
            "num_decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("n_layer", "n_layers"), 2),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "rotary_dim",
            "num_experts",
            "num_local_experts",
            "num_key_value_heads",
        ),
        4,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LATENT |= {
    "head_dim": 4,
    "num_key_value_heads": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
}
_DENSE_FIRST = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4}
_DELTA = {
    f"linear_{name}": 4
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_SELECTIVE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "marian": {"decoder_start_token_id": 0},
    **{
        name: {"decoder_start_token_id": 0}
        for name in ("longt5", "mt5", "switch_transformers", "t5", "umt5")
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT | _DENSE_FIRST),
    **dict.fromkeys(("glm4_moe_lite", "minicpm3", "longcat_flash"), _LATENT | _DENSE_FIRST),
    "dots1": _DENSE_FIRST,
    "qwen3_next": _DELTA | _MIXED | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA | _MIXED,
    "bailing_hybrid": _LATENT | _MIXED | _DENSE_FIRST,
    "kimi_linear": _LATENT | _MIXED | _DENSE_FIRST | {"linear_head_dim": 4, "linear_num_heads": 8},
    "granitemoehybrid": _SELECTIVE
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "falcon_h1": _SELECTIVE | {"mamba_d_ssm": 64},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "num_key_value_heads": 4,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": INNER,
    },
    "whisper": {
        "d_model": WIDTH,
        "num_mel_bins": 8,
        "max_source_positions": 6,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
    },
}
"""What a configuration needs beyond the sizes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan of an architecture on so many ranks.

    Attributes:
        name: of the architecture.
        plan: `own` (its `tp_plan`), `auto` (`auto_plan` with inputs), or `peer` (its `tp_plan`, by
            transformers).
        ways: ranks along the axis, 2 or 4.
        entries: of the plan `auto`.
    """

    name: str
    plan: str
    ways: int
    entries: tuple[tuple[str, ParallelStyle], ...] = ()


def build(name: str) -> nn.Module:
    """A model of an architecture, in float64 and eval mode; the same weights on every rank."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    make = transformers.CONFIG_MAPPING[name]
    standard = make()
    sizes = {
        key: size
        for key, size in SIZES.items()
        if hasattr(standard, key) and _is_field(standard, key)
    }
    config = make(**{**sizes, **SPECIAL.get(name, {})})
    torch.manual_seed(0)
    auto = getattr(transformers, ARCHITECTURES[name])
    # grouped products take no float64
    model: nn.Module = auto.from_config(config, experts_implementation="eager")
    return model.double().eval()


def _is_field(config: Any, key: str) -> bool:
    attribute = getattr(type(config), key, None)
    return not isinstance(attribute, property) or attribute.fset is not None


def inputs_of(name: str, batch: int, length: int) -> dict[str, Tensor]:
    """Tokens (or sounds) and labels."""
    tokens = torch.randint(3, VOCABULARY, (batch, length))
    if name == "whisper":
        return {
            "input_features": torch.randn(batch, 8, 12, dtype=torch.double),
            "labels": tokens.roll(1, -1),
        }
    return {"input_ids": tokens, "labels": tokens.roll(1, -1)}


def verdict(case: Case) -> str:
    """One rank's part: `right: SHARE`, its share of the bytes of parameters, else what happened.

    Right: logits, loss, all gradients, and the tokens of greedy decoding are those of one process.
    """
    single: Any = build(case.name)
    torch.manual_seed(1)
    # other weights and tokens than those that `verify` saw, none of them zero
    with torch.no_grad():
        for param in single.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    inputs = inputs_of(case.name, 3, 7)
    shape = (4 // case.ways, case.ways)
    try:
        module: Any = copy.deepcopy(single)
        if case.plan == "peer":
            _by_transformers(module, shape)
        else:
            plan = dict(case.entries) if case.plan == "auto" else single.tp_plan
            mesh = _mesh(init_device_mesh, shape)["tp"]
            # plans name projections that a configuration may lack
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnmatchedPlanWarning)
                parallelize_module(module, mesh, plan)
        share = sum(map(_held, module.parameters())) / sum(map(_held, single.parameters()))
        got = module(**inputs)
        got.loss.backward()
        tokens = _greedy(case.name, module, inputs)
    except Exception as error:  # whatever a wrong plan raises
        return f"error: {type(error).__name__}: {str(error)[:300]}"
    expected = single(**inputs)
    expected.loss.backward()
    values = {"logits": (got.logits, expected.logits), "loss": (got.loss, expected.loss)}
    grads = _gradients(module if case.plan == "peer" else unparallelize_module(module))
    values |= {
        f"gradient of {name}": (grads.get(name), grad) for name, grad in _gradients(single).items()
    }
    wrong = [name for name, pair in values.items() if not _same(*map(_global, pair))]
    if not torch.equal(tokens, _greedy(case.name, single, inputs)):
        wrong.insert(0, "greedy tokens")
    return f"wrong: {', '.join(wrong)[:300]}" if wrong else f"right: {share:.3f}"


def _by_transformers(module: Any, shape: tuple[int, int]) -> None:
    """The library's own tensor parallelism, by the plan of the model."""
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, _, _ = module._resolve_parallel_plans(DistributedConfig(tp_size=shape[1], tp_plan="auto"))
    apply_tensor_parallelism(module, _mesh(torch_mesh, shape)["tp"], plan)


@cache
def _mesh(make: Any, shape: tuple[int, int]) -> Any:
    """One mesh of a shape for all cases: every gloo group has threads that poll while it lives."""
    return make("cpu", shape, mesh_dim_names=("dp", "tp"))


def _greedy(name: str, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Some tokens, each the most likely one.

    For a model that does not generate, they are the most likely at each place.
    """
    prompt = {key: value for key, value in inputs.items() if key != "labels"}
    with torch.no_grad():
        if ARCHITECTURES[name] == "AutoModelForMaskedLM":
            logits = _global(model(**prompt).logits)
            assert logits is not None, "there are logits"
            return logits.argmax(-1)
        tokens: Tensor = model.generate(
            **prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    return tokens


def _held(param: Tensor) -> int:
    """Bytes of a parameter on this rank."""
    local = param.to_local() if hasattr(param, "to_local") else param
    return local.numel() * local.element_size()


def _gradients(model: nn.Module) -> Mapping[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _global(value: Tensor | None) -> Tensor | None:
    # also torch's own
    return value.full_tensor() if value is not None and hasattr(value, "full_tensor") else value


def _same(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return all(each is None or not each.any() for each in (got, expected))
    if got.shape != expected.shape:
        return False
    # Some norms compute in float32, whatever the parameters are. A wrong plan is wrong in the first
    # digits.
    return float((got - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-10
