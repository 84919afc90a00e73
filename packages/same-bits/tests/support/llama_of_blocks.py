"""A tiny Llama of transformers, and a plan of it that returns whole logits.

Eight blocks divide its sharded dims.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

# here, so that it is imported before ranks are forked
if find_spec("transformers"):
    import transformers
    import transformers.models.llama.modeling_llama

__all__ = ["GATHERED_PLAN", "build_llama", "needs_transformers"]

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATHERED_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def build_llama(dtype: torch.dtype) -> Any:
    """The model with the same random weights on every rank."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
