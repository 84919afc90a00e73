"""Mappings learned from the loaders of inference engines, against a direct load of the files.

The engines are re-made.

Covers: learn/loaders.py, learn/conversions.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from index_tensors import apply_mapping
from served_models import TRAITS, Seat, ServedModel
from shoal_transfer import WeightMapping, learn_conversion
from shoal_transfer.learn.loaders import learn_on_rank

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 67,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
SEATS = [
    *(Seat(rank, 1) for rank in range(1)),
    *(Seat(rank, 2) for rank in range(2)),
    *(Seat(rank, 4) for rank in range(4)),
    *(Seat(rank, 8) for rank in (0, 3, 7)),
    *(Seat(rank, 2, by_number=True) for rank in range(2)),
]


def build(model_type: str, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def as_numbers(tensor: Tensor) -> Tensor:
    """The bits of float64 values."""
    return tensor.detach().contiguous().view(torch.int64)


def files_of(model: Any) -> tuple[WeightMapping, dict[str, Tensor]]:
    """The mapping to the files, and their tensors by it, as bits."""
    mapping = learn_conversion(model)
    state = {name: as_numbers(tensor) for name, tensor in model.state_dict().items()}
    return mapping, apply_mapping(mapping, state)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", TRAITS)
def test_every_rank_gets_the_bytes_of_a_direct_load(model_type: str, tied: bool) -> None:
    model = build(model_type, tied)
    to_files, files = files_of(model)
    state = {name: as_numbers(tensor) for name, tensor in model.state_dict().items()}
    for seat in SEATS:
        with torch.device("meta"):
            server = ServedModel(seat, model.config)
        shapes = {
            name: torch.empty(value.shape, dtype=torch.float64, device="meta")
            for name, value in files.items()
        }
        learned = learn_on_rank(server, server.load_weights, shapes, compute=server.compute)
        mapping = to_files.then(learned)
        assert mapping.witness == "transformers' conversion, then recorded loader"
        loaded = ServedModel(seat, model.config)
        # loaders may write to the tensors that they get
        loaded.load_weights(
            (name, value.clone().view(torch.float64)) for name, value in files.items()
        )
        found = apply_mapping(mapping, state)
        for name, pattern in mapping.computed.items():
            moved = found[name].view(torch.float64)
            found[name] = as_numbers(server.compute[pattern](moved))
        assert {f"{name}@0" for name, _ in loaded.named_parameters()} == found.keys()
        for name, value in loaded.named_parameters():
            assert torch.equal(found[f"{name}@0"], as_numbers(value)), f"{seat}: {name}"


@pytest.mark.parametrize("model_type", TRAITS)
def test_the_served_model_computes_what_transformers_computes(model_type: str) -> None:
    model = build(model_type).eval()
    model.config._experts_implementation = "eager"
    _, files = files_of(model)
    server = ServedModel(Seat(0, 1), model.config)
    server.load_weights((name, value.view(torch.float64)) for name, value in files.items())
    tokens = torch.randint(0, 67, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    # norms, routers and positions are in float32
    torch.testing.assert_close(server(tokens), expected, rtol=1e-6, atol=1e-6)
