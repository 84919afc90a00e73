"""Covers: hf/distributed_config.py: a DistributedConfig of transformers in place of a mesh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_models import build_model, needs_hf, save_plain, token_batch
from shoal_dtensor import DTensor, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks
from shoal_models import hf
from shoal_tp_styles import LayoutError, PlanError

pytestmark = needs_hf


def config(**options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**options)


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
    with pytest.raises(LayoutError, match="another call"):
        hf.from_pretrained(home, config(tp_size=1, fsdp_size=2))


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
        with pytest.raises(PlanError, match="pp_size=4 is no axis"):
            hf.mesh_of(config(pp_size=4, tp_size=2))
        with pytest.raises(PlanError, match="ExpertParallel"):
            hf.mesh_of(config(tp_size=8, ep_size=8))
        with pytest.raises(PlanError, match="SequenceParallel"):
            hf.mesh_of(config(tp_size=8, enable_sequence_parallel=True))
