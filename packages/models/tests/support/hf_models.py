"""Tiny models of transformers, and files of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import full_tensor
from shoal_mesh import init_device_mesh
from shoal_tp_styles import unparallelize_module

# here, so that it is imported before ranks are forked
if find_spec("transformers"):
    import transformers
    import transformers.models.llama.modeling_llama

__all__ = [
    "SIZES",
    "assert_same_parameters",
    "assert_same_values",
    "build_model",
    "naming",
    "needs_accelerate",
    "needs_hf",
    "needs_peft",
    "save_plain",
    "shared_directory",
    "tensor_axis",
    "token_batch",
]

needs_hf = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("safetensors") is None,
    reason="transformers or safetensors is not installed",
)
needs_accelerate, needs_peft = (
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name}: run by nox -s hugging_face")
    for name in ("accelerate", "peft")
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


def shared_directory(home: Path) -> Path:
    """The directory of rank 0, on every rank."""
    where = [home]
    dist.broadcast_object_list(where)
    return where[0]


@cache
def tensor_axis(ranks: int) -> Any:
    """So many neighbouring ranks of four."""
    return init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("dp", "tp"))["tp"]


def assert_same_values(module: Any, single: Any, atol: float = 1e-12) -> None:
    """Parameters are those of the model of one process."""
    expected = dict(single.named_parameters())
    for name, param in module.named_parameters():
        whole = full_tensor(param)
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=atol, msg=naming(name))


def assert_same_parameters(module: nn.Module, single: nn.Module) -> None:
    """A parallel module, made plain, has the single one's parameters, gradients and buffers.

    It has taken no step.
    """
    unparallelize_module(module)
    expected, buffers = dict(single.named_parameters()), dict(single.named_buffers())
    assert dict(module.named_parameters()).keys() == expected.keys()
    assert_same_values(module, single, atol=0)
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.grad, expected[name].grad, msg=naming(f"{name}.grad"))
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], msg=naming(name))


def token_batch(rows: int = 2, length: int = 7) -> torch.Tensor:
    """Tokens of the vocabulary, the same on every rank."""
    return torch.randint(3, 67, (rows, length), generator=torch.Generator().manual_seed(1))


def naming(name: str) -> Callable[[str], str]:
    """A `msg` of `torch.testing.assert_close` that names the tensor that differs."""
    return lambda message: f"{name}: {message}"
