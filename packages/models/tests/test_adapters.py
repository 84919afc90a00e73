"""Adapters of peft on a parallel model, against one process.

Covers: hf/adapters.py, hf/sliced_adapters.py.

Run by `nox -s hugging_face`, where peft is installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import (
    assert_same_values,
    build_model,
    naming,
    needs_hf,
    needs_peft,
    save_plain,
    shared_directory,
    token_batch,
)
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import full_tensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import hf
from shoal_models.errors import CheckpointError
from shoal_tp_styles import UnsupportedModuleError, parallelize_module

pytestmark = [needs_hf, needs_peft]
TARGETS = ["q_proj", "o_proj", "down_proj"]


def adapted(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(
        model.train(), LoraConfig(r=4, lora_alpha=8, **{"target_modules": TARGETS, **options})
    )


def train(model: Any) -> None:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True
    )
    torch.manual_seed(9)
    for _ in range(3):
        model(input_ids=token_batch(), labels=token_batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("how", [fully_shard, replicate])
@on_ranks(2, timeout=200)
def test_a_copy_of_tied_embeddings_is_trained_as_in_one_process(how: Any, is_tied: bool) -> None:
    single = adapted(
        build_model(tie_word_embeddings=True),
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=is_tied,
    )
    module = how(copy.deepcopy(single), all_ranks())
    for model in (single, module):
        model(input_ids=token_batch(), labels=token_batch()).loss.backward()
    gradients = {name: param.grad for name, param in single.named_parameters()}
    for name, param in module.named_parameters():
        expected = gradients[name]
        assert (param.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(full_tensor(param.grad), expected, msg=naming(name))


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("first", ["mesh", "peft"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_is_that_of_one_process(first: str, dropout: float) -> None:
    plain = build_model()
    plan = dict(plain.tp_plan)
    single = adapted(copy.deepcopy(plain), lora_dropout=dropout)
    if first == "mesh":
        module = adapted(
            parallelize_module(copy.deepcopy(plain), all_ranks(), plan), lora_dropout=dropout
        )
    else:
        module = adapted(copy.deepcopy(plain), lora_dropout=dropout)
        plan = {
            key + ".base_layer" * key.endswith(tuple(TARGETS)): style for key, style in plan.items()
        }
        parallelize_module(module.base_model.model, all_ranks(), plan)
    hf.parallelize_adapters(module)
    train(single)
    train(module)
    assert_same_values(module, single, atol=1e-10)
    single.eval(), module.eval()
    expected = single(token_batch()).logits
    assert (expected - plain(token_batch()).logits).abs().max() > 1e-3
    torch.testing.assert_close(module(token_batch()).logits, expected)


@on_ranks(2, timeout=200)
def test_saved_loaded_and_merged(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = build_model()
    home = save_plain(plain, tmp_path)
    module = hf.parallelize_adapters(adapted(hf.from_pretrained(home, all_ranks())))
    train(module)
    expected = module.eval()(token_batch()).logits
    hf.save_adapters(module, home / "adapter")
    for base in (copy.deepcopy(plain), hf.from_pretrained(home, all_ranks())):
        loaded = hf.parallelize_adapters(PeftModel.from_pretrained(base, home / "adapter")).eval()
        torch.testing.assert_close(loaded(token_batch()).logits, expected)
    with hf.merging_adapters():
        module.merge_adapter()
        torch.testing.assert_close(module(token_batch()).logits, expected)
        module.unmerge_adapter()
        torch.testing.assert_close(module(token_batch()).logits, expected)
        merged = module.merge_and_unload()
    hf.save_sharded(merged, home / "merged")
    again = AutoModelForCausalLM.from_pretrained(home / "merged")
    torch.testing.assert_close(again(token_batch()).logits, expected)


@on_ranks(2, timeout=200)
def test_other_adapters_are_refused() -> None:
    plain = build_model()
    module = adapted(
        parallelize_module(plain, all_ranks(), dict(plain.tp_plan)), target_modules=["embed_tokens"]
    )
    with pytest.raises(
        UnsupportedModuleError, match=r"LoRA .without DoRA. and IA3 of Linear layers"
    ):
        hf.parallelize_adapters(module)


def with_peft(model: Any, kind: str) -> Any:
    """Add IA3 or prefix tuning, with values that are the same on all ranks."""
    import peft

    config: Any = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        feedforward_modules=["up_proj", "down_proj"],
    )
    if kind != "scales":
        config = peft.PrefixTuningConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=3,
            prefix_projection=kind == "projected prefix",
            encoder_hidden_size=8,
        )
    torch.manual_seed(3)
    tuned = peft.get_peft_model(model.train(), config)
    if kind == "scales":
        for name, param in tuned.named_parameters():
            if param.requires_grad:
                torch.manual_seed(len(name))
                torch.nn.init.uniform_(param, 0.5, 1.5)
    return tuned


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("first", ["mesh", "peft"])
@pytest.mark.parametrize("kind", ["scales", "prefix", "projected prefix"])
def test_sliced_adapters_are_those_of_one_process(kind: str, first: str, tmp_path: Path) -> None:
    """Sizes of prefixes or scales and of the rank's heads or features did not match."""
    plain = build_model()
    plan = dict(plain.tp_plan)
    single = with_peft(copy.deepcopy(plain), kind)
    if first == "mesh":
        module = with_peft(parallelize_module(copy.deepcopy(plain), all_ranks(), plan), kind)
    else:
        module = with_peft(copy.deepcopy(plain), kind)
        base = module.get_base_model()
        scaled = {path for path, each in base.named_modules() if hasattr(each, "base_layer")}
        names = tuple({path.rpartition(".")[2] for path in scaled} | {"-"})
        plan = {key + ".base_layer" * key.endswith(names): style for key, style in plan.items()}
        parallelize_module(base, all_ranks(), plan)
    assert hf.parallelize_adapters(hf.parallelize_adapters(module)) is module
    train(single)
    train(module)
    assert_same_values(module, single, atol=1e-10)
    single.eval(), module.eval()
    expected = single(token_batch()).logits
    assert (expected - plain.eval()(token_batch()).logits).abs().max() > 1e-3
    torch.testing.assert_close(module(token_batch()).logits, expected)
    torch.testing.assert_close(copy.deepcopy(module)(token_batch()).logits, expected)
    folder = shared_directory(tmp_path)
    hf.save_adapters(module, folder)
    with torch.no_grad():
        for param in module.parameters():
            if param.requires_grad:
                param.zero_()
    if kind == "projected prefix":
        with pytest.raises(CheckpointError, match="the prompt that a projection computed"):
            hf.load_adapters(module, folder)
        return
    hf.load_adapters(module, folder)
    torch.testing.assert_close(module(token_batch()).logits, expected)


@on_ranks(2, timeout=200)
def test_a_prefix_of_heads_in_another_layout_is_refused() -> None:
    plain = build_model()
    plan = {key: style for key, style in plain.tp_plan.items() if not key.endswith("k_proj")}
    module = with_peft(parallelize_module(plain, all_ranks(), plan), "prefix")
    with pytest.raises(UnsupportedModuleError, match="prefix tuning needs key heads"):
        hf.parallelize_adapters(module)
