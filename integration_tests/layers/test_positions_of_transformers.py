"""Attention of transformers' models that no mode of torch observes, in a block; on real gloo ranks.

Covers: interceptions/.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_models import build_model, naming, needs_hf, token_batch
from shoal_context_parallel import (
    Documents,
    LayoutError,
    UnsupportedAttentionError,
    context_parallel,
    context_parallel_unshard,
)
from shoal_mesh import all_reduce
from shoal_mesh.testing import all_ranks, on_ranks

pytestmark = needs_hf

LENGTH = 20
_WINDOW = {"sliding_window": 5}
_TWO_KINDS = {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"], **_WINDOW}
_CHUNKS = {
    "attention_chunk_size": 6,
    "head_dim": 4,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 5,
    "layer_types": ["chunked_attention", "full_attention"],
}
# Windows and chunks computed on a rank's own positions, other implementations on its own keys.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("Mistral", _WINDOW),
    "window of some layers": ("Gemma3Text", _TWO_KINDS),
    "window, eager": ("Mistral", {"attn_implementation": "eager", **_WINDOW}),
    "window and soft cap, eager": (
        "Gemma2",
        {"head_dim": 4, "attn_implementation": "eager", **_WINDOW},
    ),
    "chunks": ("Llama4Text", _CHUNKS),
    "chunks, eager": ("Llama4Text", {"attn_implementation": "eager", **_CHUNKS}),
    "eager": ("Llama", {"attn_implementation": "eager"}),
    "learned positions, eager": ("GPT2", {"n_inner": 48, "attn_implementation": "eager"}),
    "sinks, eager": (
        "GptOss",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "attn_implementation": "eager",
            **_TWO_KINDS,
        },
    ),
    "one head of keys": ("Falcon", {"attn_implementation": "sdpa"}),
    "alibi": ("Falcon", {"alibi": True, "attn_implementation": "sdpa"}),
    "alibi, own attention": ("Bloom", {}),
    "alibi, eager": ("Falcon", {"alibi": True, "attn_implementation": "eager"}),
    "alibi of another form": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "cache and interface": ("StableLm", {"attn_implementation": "eager"}),
    "cache and interface, learned positions": ("BioGpt", {"attn_implementation": "eager"}),
    "own attention": ("GPTJ", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}),
    "another own attention": (
        "CodeGen",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4},
    ),
}


def build_with_large_weights(family: str, **changes: Any) -> Any:
    """A model in which attention matters: with its own small weights a wrong mask hardly shows."""
    model = build_model(family, **changes)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, dtype=param.dtype, generator=generator), alpha=0.3)
    return model


def compare_with_one_process(single: Any, layout: Any, method: Any, **options: Any) -> None:
    """Logits and gradients of all parameters in a block against one process."""
    tokens = token_batch(2, LENGTH)
    positions = torch.arange(LENGTH)[None]
    axis = all_ranks()
    takes_positions = "position_ids" in inspect.signature(single.forward).parameters

    def run(model: Any, tokens: Tensor, positions: Tensor) -> Any:
        named = {"position_ids": positions} if takes_positions else {}
        return model(tokens, use_cache=False, **named).logits

    expected = run(single, tokens, positions)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    module = copy.deepcopy(single)
    module.zero_grad()
    buffers = [tokens.clone(), seed, positions]
    with context_parallel(
        axis, buffers=buffers, buffer_seq_dims=[1] * 3, layout=layout, method=method, **options
    ):
        logits = run(module, buffers[0], buffers[2])
        logits.backward(buffers[1])
        (whole,) = context_parallel_unshard(axis, [logits.detach()], [1])
    torch.testing.assert_close(whole, expected.detach())
    for (name, param), other in zip(module.named_parameters(), single.parameters(), strict=True):
        gradient = torch.zeros_like(param) if param.grad is None else param.grad
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        # Norms of some families compute in float32.
        torch.testing.assert_close(
            all_reduce(gradient, (axis, 0)), wanted, rtol=1e-5, atol=1e-5, msg=naming(name)
        )


@on_ranks(4, timeout=300)
@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize("case", MODELS)
def test_attention_of_a_model_is_that_of_the_sequence(case: str, layout: str) -> None:
    family, changes = MODELS[case]
    single = build_with_large_weights(family, **changes)
    compare_with_one_process(single, layout, "ring" if layout == "contiguous" else "allgather")


@on_ranks(2, timeout=300)
def test_a_window_by_exchanging_heads() -> None:
    compare_with_one_process(
        build_with_large_weights("Mistral", **_WINDOW), "contiguous", "ulysses"
    )


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_beside_windows(implementation: str) -> None:
    single = build_with_large_weights("Mistral", attn_implementation=implementation, **_WINDOW)
    tokens = token_batch(2, LENGTH)
    ids = [0] * 8 + [1] * 12
    positions = torch.arange(LENGTH)[None]
    starts = torch.cat([torch.arange(8), torch.arange(12)])[None]
    expected = single(tokens, position_ids=starts, use_cache=False).logits
    buffers = [tokens.clone(), positions, starts.clone()]
    with context_parallel(
        all_ranks(),
        buffers=buffers,
        buffer_seq_dims=[1] * 3,
        documents=Documents.from_ids(ids),
    ):
        logits = single(buffers[0], position_ids=buffers[2], use_cache=False).logits
        (whole,) = context_parallel_unshard(all_ranks(), [logits.detach()], [1])
    torch.testing.assert_close(whole, expected.detach())


@on_ranks(2, timeout=300)
def test_labels_are_shifted_over_the_whole_sequence() -> None:
    # The last position of each range was compared with the next one that the rank happened to hold.
    single = build_with_large_weights("Llama")
    tokens = token_batch(2, LENGTH)
    positions = torch.arange(LENGTH)[None]
    expected = single(tokens, position_ids=positions, labels=tokens, use_cache=False).loss
    buffers = [tokens.clone(), positions]
    with context_parallel(all_ranks(), buffers=buffers, buffer_seq_dims=[1, 1]):
        # The mean of sums: ranks have different numbers of labels.
        loss = single(
            buffers[0],
            position_ids=buffers[1],
            labels=buffers[0],
            num_items_in_batch=2 * (LENGTH - 1),
            use_cache=False,
        ).loss
    torch.testing.assert_close(all_reduce(loss.detach(), (all_ranks(), 0)), expected.detach())


# Models that mix positions by other means, with what their error names.
MIXING: dict[str, tuple[str, dict[str, Any], str]] = {
    "states": ("Mamba", {}, "carries a state"),
    "linear attention": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
        },
        "carries a state",
    ),
    "convolutions": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "carries a state|reads neighboring positions",
    ),
    "recurrent blocks": (
        "RecurrentGemma",
        {"block_types": ["recurrent", "attention"], "lru_width": 32},
        "carries a state|reads neighboring positions",
    ),
    "a mask of its own": (
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
        "it computes attention in its own code",
    ),
}


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("case", MIXING)
def test_a_model_that_mixes_positions_by_other_means_is_refused(case: str) -> None:
    family, changes, reason = MIXING[case]
    model = build_model(family, **changes)
    tokens = token_batch(2, LENGTH)
    with (
        context_parallel(all_ranks(), buffers=[tokens], buffer_seq_dims=[1]),
        pytest.raises(UnsupportedAttentionError, match=rf"{reason}.*Use tensor parallelism"),
    ):
        model(tokens)


@on_ranks(2, timeout=300)
def test_a_model_without_positions_is_refused_and_says_how_to_pass_them() -> None:
    model = build_model("Llama", attn_implementation="eager")
    tokens = token_batch(2, LENGTH)
    with (
        context_parallel(all_ranks(), buffers=[tokens], buffer_seq_dims=[1]),
        pytest.raises(LayoutError, match=r"Pass position_ids=layout.positions\(rank\)\[None\]"),
    ):
        model(tokens)


@on_ranks(2, timeout=300)
def test_padding_of_eager_attention_is_refused_on_all_ranks() -> None:
    model = build_model("Llama", attn_implementation="eager")
    tokens = token_batch(2, LENGTH)
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, -2:] = 0
    buffers = [tokens, padding, torch.arange(LENGTH)[None]]
    with (
        context_parallel(all_ranks(), buffers=buffers, buffer_seq_dims=[1] * 3),
        pytest.raises(
            LayoutError, match=r"leave out attention_mask|see the errors that those ranks raised"
        ),
    ):
        model(tokens, attention_mask=padding, position_ids=buffers[2], use_cache=False)


@on_ranks(2, timeout=300)
def test_nothing_is_replaced_after_a_block() -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from transformers import masking_utils, modeling_utils

    registry = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    before = (registry["sdpa"], masking_utils.find_packed_sequence_indices, flex_attention.__code__)
    with context_parallel(all_ranks()), context_parallel(all_ranks()):
        assert registry["sdpa"] is not before[0]
    after = (registry["sdpa"], masking_utils.find_packed_sequence_indices, flex_attention.__code__)
    assert after == before
    assert "get_interface" not in vars(modeling_utils.ALL_ATTENTION_FUNCTIONS)
    assert "__call__" not in vars(modeling_utils.PreTrainedModel)


def test_one_rank_takes_documents_from_positions_as_without_a_block() -> None:
    from shoal_mesh import init_device_mesh
    from shoal_mesh.testing import fake_world

    single = build_with_large_weights("Llama", attn_implementation="eager")
    tokens = token_batch(2, LENGTH)
    starts = torch.cat([torch.arange(8), torch.arange(12)])[None]
    expected = single(tokens, position_ids=starts, use_cache=False).logits
    with fake_world(1), context_parallel(init_device_mesh("cpu", (1,))):
        logits = single(tokens, position_ids=starts, use_cache=False).logits
    torch.testing.assert_close(logits, expected)
