"""Tiny models of transformers, and files of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["SIZES", "build_model", "naming", "needs_hf", "save_plain", "token_batch"]

needs_hf = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("safetensors") is None,
    reason="transformers or safetensors is not installed",
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 67,  # uneven on two and on four ranks
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_model(family: str = "Llama", **changes: Any) -> Any:
    """A causal language model with the same random weights on every rank."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=changes.get("dtype", torch.float64)).eval()


def save_plain(model: Any, home: Path, **options: Any) -> Path:
    """Files of a plain model, written by rank 0 in a directory that all ranks get."""
    where = [str(home / "model")]
    dist.broadcast_object_list(where)
    if dist.get_rank() == 0:
        model.save_pretrained(where[0], **options)
    dist.barrier()
    return Path(where[0])


def token_batch(rows: int = 2, length: int = 7) -> torch.Tensor:
    """Tokens of the vocabulary, the same on every rank."""
    return torch.randint(3, 67, (rows, length), generator=torch.Generator().manual_seed(1))


def naming(name: str) -> Callable[[str], str]:
    """A `msg` of `torch.testing.assert_close` that names the tensor that differs."""
    return lambda message: f"{name}: {message}"
