"""Methods of transformers' models on a parallel one, against one process.

Covers: hf/from_pretrained.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hf_models import build_model, needs_hf, save_plain, token_batch
from shoal_dtensor import DTensor, full_tensor, get_model_state_dict
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import auto_plan, hf
from shoal_tp_styles import UnsupportedModuleError, parallelize_module

pytestmark = needs_hf
needs_psutil = pytest.mark.skipif(
    find_spec("psutil") is None, reason="psutil: run by nox -s hugging_face"
)


@on_ranks(2, timeout=200)
def test_save_pretrained_saves_the_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    single = build_model()
    home = save_plain(single, tmp_path)
    hf.from_pretrained(home, all_ranks()).save_pretrained(home / "again")
    again = AutoModelForCausalLM.from_pretrained(home / "again")
    assert all(
        torch.equal(again.state_dict()[name], value) for name, value in single.state_dict().items()
    )


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("by", ["from_pretrained", "parallelize_module"])
def test_full_tensors_are_saved_by_one_rank(by: str, tmp_path: Path) -> None:
    # the other rank waited for the whole group in its next call
    from transformers import AutoModelForCausalLM

    single = build_model()
    mesh = all_ranks()
    if by == "from_pretrained":
        model: Any = hf.from_pretrained(save_plain(single, tmp_path), mesh)
    else:
        model = parallelize_module(build_model(), mesh, auto_plan(single, mesh, token_batch()))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "whole", state_dict=state)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    for name, value in single.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [71, 33])
def test_embeddings_are_resized_under_the_plan(size: int, tied: bool, tmp_path: Path) -> None:
    single = build_model(tie_word_embeddings=tied)
    model = hf.from_pretrained(save_plain(single, tmp_path), all_ranks())
    before = model.model.layers[0].self_attn.q_proj.weight
    for each in (single, model):
        torch.manual_seed(4)  # of the new rows
        each.resize_token_embeddings(size)
    assert model.model.layers[0].self_attn.q_proj.weight is before
    assert model.config.vocab_size == size and isinstance(model.lm_head.weight, DTensor)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    tokens = token_batch() % size
    for each in (single, model):
        each(tokens, labels=tokens).loss.backward()
    torch.testing.assert_close(model(tokens).logits, single(tokens).logits)
    gradient: Any = model.model.embed_tokens.weight.grad
    whole = full_tensor(gradient)
    torch.testing.assert_close(whole, single.model.embed_tokens.weight.grad)


@needs_psutil
@on_ranks(2, timeout=200)
def test_continuous_batching_with_own_heads(tmp_path: Path) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    single = build_model(dtype=torch.float32)
    model = hf.from_pretrained(save_plain(single, tmp_path), all_ranks())
    prompts = [
        row[:length].tolist() for row, length in zip(token_batch(4, 9), (9, 3, 7, 3), strict=True)
    ]
    written = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    pages = ContinuousBatchingConfig(
        page_size=16, num_blocks=16, max_batch_tokens=16, max_memory_percent=0.01
    )
    found = model.generate_batch(
        prompts, generation_config=written, continuous_batching_config=pages
    )
    for (_, got), prompt in zip(sorted(found.items()), prompts, strict=True):
        tokens = torch.tensor([prompt])
        expected = single.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=written
        )
        assert got.generated_tokens == expected[0, len(prompt) :].tolist()


@on_ranks(2, timeout=200)
def test_continuous_batching_is_refused_where_heads_are_others(tmp_path: Path) -> None:
    model = hf.from_pretrained(save_plain(build_model("Phi3"), tmp_path), all_ranks())
    with pytest.raises(
        UnsupportedModuleError,
        match=r"k_proj must be sharded by the model's own plan.*use generate",
    ):
        model.generate_batch([[3, 4]])
