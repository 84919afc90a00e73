"""Models of transformers, trained over data and tensor axes as on one device.

Covers: shoal_data_parallel/{fully_shard,replicate}.py, shoal_models/planning/auto.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_models import build_model, needs_hf, token_batch
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import clip_grad_norm_, full_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import auto_plan
from shoal_tp_styles import parallelize_module

pytestmark = needs_hf
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "head_dim": 4,
    },
}


def parallel(model: Any, how: str, mesh: DeviceMesh) -> Any:
    """The model with its own or a proven plan along "tensor", and data-parallel along "data"."""
    if mesh["tensor"].size() > 1:
        plan = auto_plan(copy.deepcopy(model).eval(), mesh["tensor"], input_ids=token_batch())
        parallelize_module(model, mesh["tensor"], plan)
    if how == "replicate":
        return replicate(model, mesh["data"])
    for layer in model.model.layers:
        fully_shard(layer, mesh["data"])
    return fully_shard(model, mesh["data"])


def loss_of(model: Any, tokens: Tensor) -> Any:
    logits = model(input_ids=tokens, use_cache=False).logits
    whole = full_tensor(logits)
    return nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("how", "shape"), [("fully_shard", (4, 1)), ("fully_shard", (2, 2)), ("replicate", (4, 1))]
)
@on_ranks(4, timeout=200)
def test_a_model_trains_as_on_one_device(how: str, shape: tuple[int, int], family: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    single = build_model(family, **FAMILIES[family])
    # the library's grouped product takes no float64
    single.config._experts_implementation = "eager"
    single.train()
    model = parallel(copy.deepcopy(single), how, mesh)
    plain, own = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (single, model))
    tokens = token_batch(8)
    for _ in range(2):
        expected = loss_of(single, tokens)
        loss = loss_of(model, tokens.chunk(shape[0])[mesh.get_local_rank("data")])
        expected.backward()
        loss.backward()
        torch.testing.assert_close(
            all_reduce(loss.detach(), (mesh, "data"), "avg"), expected.detach()
        )
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
        for optimizer in (plain, own):
            optimizer.step()
            optimizer.zero_grad()
