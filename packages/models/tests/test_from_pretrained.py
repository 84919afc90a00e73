"""Models of transformers from files onto ranks.

Covers: hf/from_pretrained.py, hf/unfilled_tensors.py, hf/checkpoint_files.py.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import build_model, needs_hf, save_plain, token_batch
from shoal_dtensor import DTensor
from shoal_mesh import CommDebugMode, abstract_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import CheckpointError, hf
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    LoRA,
    PlanError,
    RowwiseParallel,
    adapter_parameters,
)

pytestmark = needs_hf

# Architecture -> what its configuration needs: tied and packed weights, experts that files hold one
# by one, no plan of its own, a buffer that no file has.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "many files": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "packed": ("Phi3", {}),
    "experts": ("Mixtral", {"num_local_experts": 3, "dtype": torch.float32}),
    "automatic plan": ("GPT2", {"n_inner": 48}),
}


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("case", CASES)
def test_a_model_is_that_of_one_process(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    single = build_model(family, **changes)
    home = save_plain(
        single, tmp_path, max_shard_size="20KB" if case in ("many files", "experts") else "5GB"
    )
    mesh = all_ranks()
    with CommDebugMode() as mode:
        model, loaded = hf.from_pretrained(home, mesh, output_loading_info=True)
    assert case == "automatic plan" or mode.get_total_counts() == 0, (
        "nothing is sent, only simulated"
    )
    assert not loaded.missing and not loaded.unexpected and not model.training
    assert model.dtype == single.dtype
    torch.testing.assert_close(model(token_batch()).logits, single(token_batch()).logits)
    tied = single.get_output_embeddings().weight is single.get_input_embeddings().weight
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    sharded = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor))
    own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    assert sharded and loaded.bytes_read == single.dtype.itemsize * own, (
        "every rank reads its own part, once"
    )


@on_ranks(2, timeout=200)
def test_what_a_path_may_be_and_what_is_changed(tmp_path: Path) -> None:
    single = build_model()
    home = save_plain(single, tmp_path, max_shard_size="20KB")
    expected = single.float()(token_batch()).logits
    model = hf.from_pretrained(
        home / "model.safetensors.index.json", all_ranks(), dtype=torch.float32
    )
    torch.testing.assert_close(model(token_batch()).logits, expected)
    model = hf.from_pretrained(
        home,
        all_ranks(),
        {"lm_head": "colwise_rep"},
        dtype="float32",
        num_hidden_layers=1,
        strict=False,
    )
    assert len(model.model.layers) == 1 and not isinstance(model.model.embed_tokens.weight, DTensor)


@on_ranks(2, timeout=200)
def test_missing_parameters_are_initialized_as_on_one_device(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification as Classifier

    home = save_plain(build_model(), tmp_path)
    with pytest.raises(
        PlanError, match=r"missing keys \['score.weight'\] and unexpected keys \['lm_head.weight'\]"
    ):
        hf.from_pretrained(home, all_ranks(), model_class=Classifier)
    torch.manual_seed(3)
    model, loaded = hf.from_pretrained(
        home, all_ranks(), model_class=Classifier, strict=False, output_loading_info=True
    )
    assert (loaded.missing, loaded.unexpected) == (["score.weight"], ["lm_head.weight"])
    torch.manual_seed(3)
    single = Classifier.from_pretrained(home)
    torch.testing.assert_close(model(token_batch()).logits, single(token_batch()).logits)


def rewrite(
    home: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Other tensors in the file of a directory that all ranks read."""
    from safetensors.torch import load_file, save_file

    file = home / "model.safetensors"
    if torch.distributed.get_rank() == 0:
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
    torch.distributed.barrier()


@on_ranks(4, timeout=200)
def test_adapters_and_shared_weights_that_are_missing_have_values(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    attention = "model.layers.*.self_attn"
    plan: dict[str, Any] = {
        "model.embed_tokens": "embedding_rowwise",
        f"{attention}.q_proj": LoRA(base=ColwiseParallel(), rank=2),
        f"{attention}.[kv]_proj": "colwise",
        f"{attention}.o_proj": LoRA(base=RowwiseParallel(), rank=2),
    }
    single = build_model(tie_word_embeddings=True)
    home = save_plain(single, tmp_path)
    rewrite(home, lambda held: {name: each for name, each in held.items() if "embed" not in name})
    torch.manual_seed(3)
    model: Any = hf.from_pretrained(home, all_ranks(), plan, strict=False)
    torch.manual_seed(3)
    plain = LlamaForCausalLM.from_pretrained(home)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model(token_batch()).logits, plain(token_batch()).logits)
    adapters: Any = adapter_parameters(model)
    for name, adapter in adapters:
        largest = adapter.to_local().abs().max()
        assert largest == 0 if name.endswith("B") else 0 < largest < 1, name


class Head(torch.nn.Module):
    """Parameters of which transformers knows nothing."""

    def __init__(self, rule: bool) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(3))
        self.shift = torch.nn.Parameter(torch.empty(3))
        if rule:
            self.reset_parameters = lambda: [
                torch.nn.init.constant_(each, 2.0) for each in self.parameters()
            ]


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("rule", [True, False])
def test_missing_parameters_follow_the_rule_of_their_module_or_are_named(
    rule: bool, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    class WithHead(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.head = Head(rule)

    home = save_plain(build_model(), tmp_path)
    rewrite(home, lambda held: held | {"head.shift": torch.ones(3)})
    if rule:
        model: Any = hf.from_pretrained(home, all_ranks(), model_class=WithHead, strict=False)
        assert (model.head.scale == 2).all() and (model.head.shift == 1).all()
        return
    with pytest.raises(
        PlanError,
        match=r"do not have \['head.scale'\], .* reset_parameters of the modules",
    ):
        hf.from_pretrained(home, all_ranks(), model_class=WithHead, strict=False)


@on_ranks(2, timeout=200)
@pytest.mark.parametrize(
    "how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"do_sample": True}]
)
def test_generation_is_that_of_one_process(how: dict[str, Any], tmp_path: Path) -> None:
    single, small = build_model(), build_model(num_hidden_layers=1)
    home, draft = save_plain(single, tmp_path), save_plain(small, tmp_path / "draft")
    module, assistant = (hf.from_pretrained(each, all_ranks()) for each in (home, draft))

    def written(model: Any, rows: int, **options: Any) -> Any:
        torch.manual_seed(5)  # of the request
        tokens = token_batch(rows)
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, **options
        )

    how = {"do_sample": False, **how}
    assert torch.equal(written(module, 2, **how), written(single, 2, **how))
    if how == {"do_sample": False}:
        expected = written(single, 1, **how)
        for more in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(written(module, 1, **more, **how), expected)


@on_ranks(2, timeout=200)
def test_a_prefix_is_computed_once_and_used_again(tmp_path: Path) -> None:
    from transformers import DynamicCache

    single = build_model()
    module = hf.from_pretrained(save_plain(single, tmp_path), all_ranks())
    prefix, found = token_batch(1), list[list[torch.Tensor]]()
    requests = [
        torch.cat([prefix, token_batch(1) + shift], 1) % single.config.vocab_size
        for shift in (1, 2)
    ]
    for model in (single, module):
        cache = DynamicCache()
        with torch.no_grad():
            model(prefix, past_key_values=cache)
        found.append([])
        for request in requests:
            how: Any = {
                "attention_mask": torch.ones_like(request),
                "max_new_tokens": 6,
                "do_sample": False,
            }
            out = model.generate(request, past_key_values=copy.deepcopy(cache), **how)
            assert torch.equal(out, model.generate(request, **how))
            found[-1].append(out)
        heads = single.config.num_key_value_heads // (1 if model is single else 2)
        assert cache.layers[0].keys.shape[1:3] == (heads, prefix.shape[1]), (
            "of local heads, and not written to"
        )
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@on_ranks(2, timeout=200)
def test_a_cache_of_all_heads_is_named_as_the_cause(tmp_path: Path) -> None:
    from transformers import DynamicCache

    single, cache = build_model(), DynamicCache()
    module = hf.from_pretrained(save_plain(single, tmp_path), all_ranks())
    single(token_batch(), past_key_values=cache)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match") as caught:
        module(token_batch(), past_key_values=cache)
    (note,) = caught.value.__notes__
    assert (
        "k_proj (Linear, ColwiseParallel): weight (16, 32), on this rank (8, 32)" in note
        and "A cache that was made before the model was parallelized has all heads" in note
    )


@on_ranks(2, timeout=200)
def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    home = save_plain(build_model(), tmp_path)
    mesh = all_ranks()
    with pytest.raises(
        CheckpointError,
        match=r"'org/name' does not exist; expected a directory with config.json .*Hub",
    ):
        hf.from_pretrained("org/name", mesh)
    with pytest.raises(LayoutError, match=r"interop.mesh_from_torch"):
        hf.from_pretrained(home, "tp")
    with pytest.raises(LayoutError, match="several axes, none of them named 'tp'"):
        hf.from_pretrained(home, abstract_mesh((1, 2), ("a", "b")))
    with pytest.raises(PlanError, match="pass model_class="):
        hf.from_pretrained(home, mesh, architectures=["NoSuchModel"])
    own = tmp_path / str(mesh.get_local_rank())
    shutil.copytree(home, own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(PlanError, match="quantized weights"):
        hf.from_pretrained(own, mesh)
    (own / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has weights but no config.json"):
        hf.from_pretrained(own, mesh)
