"""Mappings from transformers' weight conversions give the tensors that `save_pretrained` writes.

Covers: learn/conversions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from index_tensors import apply_mapping
from shoal_transfer import (
    LoaderComputesError,
    WeightMapping,
    describe,
    learn_conversion,
    learn_mapping,
)

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "moe_intermediate_size": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = ["llama", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt2"]


def build(model_type: str, device: str = "meta") -> Any:
    config = transformers.AutoConfig.for_model(model_type, **SMALL)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", MODELS)
def test_the_mapping_gives_the_files(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(model_type, "cpu")
    mapping = learn_conversion(model)
    mapping.check()
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    # the bits of float32 as numbers, which the comparison moves
    values = {
        name: tensor.detach().contiguous().view(torch.int32).long()
        for name, tensor in model.state_dict().items()
    }
    found = apply_mapping(mapping, values)
    assert files.keys() <= found.keys()
    for name, tensor in files.items():
        assert torch.equal(found[name], tensor.view(torch.int32).long()), name


def test_a_mapping_to_the_files_composes_with_a_loader_of_files() -> None:
    model = build("mixtral")
    to_files = learn_conversion(model)

    class ServerOfOneExpert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = torch.nn.Parameter(torch.empty(16, 6, device="meta"))

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                if name.endswith("layers.1.block_sparse_moe.experts.3.w2.weight"):
                    self.down.data.copy_(tensor[:, 6:])

    server = ServerOfOneExpert()
    files = {name: torch.empty(shape, device="meta") for name, shape in to_files.targets.items()}
    mapping = to_files.then(learn_mapping(server, server.load_weights, files))
    assert mapping.witness == "transformers' conversion, then recorded loader"
    (part,) = mapping.assignments
    assert part.source == "model.layers.1.mlp.experts.down_proj"
    assert part.source_region == (range(3, 4), range(16), range(6, 12))
    assert part.dims == (1, 2)


def test_a_manifest_names_the_tensors() -> None:
    model = build("qwen3_moe")
    assert learn_conversion(model, describe(model)) == learn_conversion(model)


@pytest.mark.parametrize("model_type", ["mixtral"])
def test_a_conversion_that_computes_is_refused(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    convert: Callable[..., Any] = core_model_loading.SplitModulelist.convert

    def scaled(*args: Any, **kwargs: Any) -> Any:
        converted = convert(*args, **kwargs)
        return {name: _scaled(value) for name, value in converted.items()}

    def _scaled(value: Any) -> Any:
        return [one * 2 for one in value] if isinstance(value, list) else value * 2

    monkeypatch.setattr(core_model_loading.SplitModulelist, "convert", scaled)
    with pytest.raises(LoaderComputesError, match=r"experts.*aten::mul"):
        learn_conversion(build(model_type))


def test_the_mapping_is_data() -> None:
    mapping = learn_conversion(build("mixtral"))
    assert WeightMapping.from_json(mapping.to_json()) == mapping
