"""A Hugging Face Llama with random weights, parallel by its own `tp_plan`.  Covers: names.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from shoal_dtensor import DTensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import parallelize_module

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def told(name: str) -> Callable[[str], str]:
    """A failure's message with the name of what differs."""
    return lambda message: f"{name}: {message}"


@needs_transformers
@on_ranks(4, timeout=200)
def test_llama_by_its_own_plan() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]  # not a requirement

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=67,
        max_position_embeddings=64,
    )
    single: Any = LlamaForCausalLM(config).double().eval()
    module: Any = copy.deepcopy(single)
    parallelize_module(module, init_device_mesh("cpu", (4,)), dict(single.tp_plan), on_unmatched="error")
    tokens = torch.randint(67, (2, 7))
    torch.testing.assert_close(module(tokens).logits, single(tokens).logits)
    written = [model.generate(tokens, max_new_tokens=8, do_sample=False) for model in (module, single)]
    assert torch.equal(*written)
    for model in (module, single):
        model(tokens, labels=tokens).loss.backward()
    expected = dict(single.named_parameters())
    for name, param in module.named_parameters():
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        torch.testing.assert_close(grad, expected[name].grad, msg=told(name))
