"""A DistributedConfig of transformers in place of a mesh.

Covers: hf/distributed_config.py, hf/data_axes.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configured_models import assert_trains_alike, config
from hf_models import (
    build_model,
    needs_hf,
    save_plain,
    token_batch,
)
from shoal_data_parallel import FSDPModule
from shoal_dtensor import DTensor, Shard
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import counts, fake_world, on_ranks
from shoal_models import hf
from shoal_tp_styles import LayoutError, PlanError, UnsupportedModuleError

pytestmark = needs_hf


@on_ranks(2, timeout=200)
def test_a_model_is_loaded_by_its_own_plan_with_changed_rules(tmp_path: Path) -> None:
    single = build_model()
    home = save_plain(single, tmp_path)
    expected = single(token_batch()).logits
    for rules in (None, "auto", {"model.layers.*.mlp.down_proj": "rowwise"}):
        model = hf.from_pretrained(home, config(tp_size=2, tp_plan=rules))
        assert model.model.layers[0].mlp.up_proj.weight.placements == (Shard(0),)
        torch.testing.assert_close(model(token_batch()).logits, expected)
    whole = hf.from_pretrained(home, config(tp_size=2, tp_plan={}))
    assert not any(isinstance(param, DTensor) for param in whole.parameters())
    torch.testing.assert_close(whole(token_batch()).logits, expected)
    with pytest.raises(PlanError, match="does not fit"):
        hf.from_pretrained(
            home, config(tp_size=2, tp_plan={"model.layers.*.mlp.up_proj": "rowwise"})
        )
    with pytest.raises(PlanError, match="name no module"):
        hf.from_pretrained(home, config(tp_size=2, tp_plan={"layers.*.mlp.up_proj": "rowwise"}))


# by name: the sizes, and how many ranks have rows of their own
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "fsdp": ({"fsdp_size": 4}, 4),
    "hsdp": ({"dp_replicate_size": 2, "fsdp_size": 2}, 4),
    "fsdp and tp": ({"fsdp_size": 2, "tp_size": 2}, 2),
    "replicas and tp": ({"dp_replicate_size": 2, "tp_size": 2}, 2),
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4, timeout=200)
def test_data_axes_train_as_one_process(kind: str, tied: bool, tmp_path: Path) -> None:
    sizes, parts = SIZES[kind]
    single = build_model(tie_word_embeddings=tied)
    home = save_plain(single, tmp_path)
    model, loaded = hf.from_pretrained(home, config(**sizes), output_loading_info=True)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.model.layers[0], FSDPModule)
    # a rank reads its own shards alone
    whole = sum(param.nbytes for param in single.parameters())
    shards = sizes.get("fsdp_size", 1) * sizes.get("tp_size", 1)
    assert loaded.bytes_read < whole / shards + 8 * 1024
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    assert_trains_alike(model, single, sizes, parts, optimizer=optimizer, home=tmp_path)
    with pytest.raises(UnsupportedModuleError, match="resize the model in one process"):
        model.resize_token_embeddings(70)


@on_ranks(2, timeout=200)
def test_rules_and_options_of_data_axes(tmp_path: Path) -> None:
    single = build_model()
    home = save_plain(single, tmp_path)
    rules = {"model.layers.*.mlp": "keep_full_weight", "lm_head": "free_full_weight"}
    model = hf.from_pretrained(home, config(fsdp_size=2, fsdp_plan=rules))
    assert isinstance(model.model.layers[1].mlp, FSDPModule)
    tokens = token_batch()
    with CommDebugMode() as counted:
        loss = model(tokens, labels=tokens).loss
    with CommDebugMode() as backward:
        loss.backward()
    # embeddings, two layers, their two MLPs, the norm and the head; the outermost unit has nothing
    assert counts(counted) == {"all_gather": 7}
    # the MLPs and the norm stay gathered
    assert counts(backward)["all_gather"] == 4
    low = hf.from_pretrained(home, config(fsdp_size=2, fsdp_mixed_precision=True))
    assert low.model.layers[0].mlp.up_proj.weight.dtype == torch.float64
    assert low(tokens).logits.dtype == torch.bfloat16
    for wrong, message in (
        ({"layers.*": "free_full_weight"}, "name no module"),
        ({"model.layers.*": "keep"}, "expected one of"),
    ):
        with pytest.raises(PlanError, match=message):
            hf.from_pretrained(home, config(fsdp_size=2, fsdp_plan=wrong))
    # ranks with other lengths generate together
    prompt = tokens[:1, : 3 + torch.distributed.get_rank()]
    how: dict[str, Any] = {"do_sample": False, "max_length": 9}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    expected = single.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    assert torch.equal(made, expected)


def test_sizes_are_the_axes_of_a_mesh() -> None:
    with fake_world(8):
        mesh = hf.mesh_of(config(dp_replicate_size=2, fsdp_size=2, tp_size=2))
        assert mesh == init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "fsdp", "tp")
        )
        with pytest.raises(LayoutError, match="is not the number of ranks, 8"):
            hf.mesh_of(config(tp_size=2))
        with pytest.raises(LayoutError, match="expected a transformers"):
            hf.mesh_of(SimpleNamespace(tp_size=2))
        assert hf.mesh_of(config(pp_size=4, tp_size=2)) == init_device_mesh(
            "cpu", (4, 1, 1, 2), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
        )
        # the experts have no axis of their own
        assert hf.mesh_of(config(fsdp_size=4, tp_size=2, ep_size=4)).shape == (1, 4, 2)
        for wrong in (3, 16):
            sizes = config(fsdp_size=4, tp_size=2)
            sizes.ep_size = wrong
            with pytest.raises(PlanError, match=f"ep_size={wrong} must be a multiple of tp_size=2"):
                hf.mesh_of(sizes)
        with pytest.raises(PlanError, match="SequenceParallel"):
            hf.mesh_of(config(tp_size=8, enable_sequence_parallel=True))
