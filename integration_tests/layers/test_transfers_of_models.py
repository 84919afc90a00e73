"""Weights of architectures from FSDP over tensor parallelism to tensor parallelism on more ranks.

Covers: shoal_transfer as a whole, with shoal_data_parallel, shoal_tp_styles and shoal_models.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration_tests.architectures import build, inputs_of

from hf_models import needs_hf
from shoal_data_parallel import fully_shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import load_sharded, save_sharded
from shoal_tp_styles import UnmatchedPlanWarning, parallelize_module
from shoal_transfer import WeightTransfer, describe, plan_transfer
from shoal_transfer.internal import weights_of

pytestmark = needs_hf

QUICK = ["llama", "mixtral", "gpt2"]
OTHERS = """
    bloom cohere2 deepseek_v3 falcon gemma2 gpt_neox gpt_oss granitemoe mistral mpt olmo2 opt phi3
    qwen2_moe qwen3 qwen3_moe starcoder2 stablelm
"""


def parallel(name: str, mesh: Any) -> Any:
    """A model of an architecture under its own plan."""
    model: Any = build(name)
    with warnings.catch_warnings():
        # plans name projections that a configuration may lack
        warnings.simplefilter("ignore", UnmatchedPlanWarning)
        return parallelize_module(model, mesh, model.tp_plan)


def assert_served(name: str) -> None:
    """After three syncs with steps between, the server has the bytes of one that loaded files."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    line = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tp"))
    trainer = fully_shard(parallel(name, grid["tp"]), grid["data"])
    server = parallel(name, line["tp"])
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    plan = plan_transfer(describe(trainer), describe(server))
    transfer = WeightTransfer(plan, source=trainer, target=server, deltas=True)
    torch.manual_seed(1)
    inputs = inputs_of(name, 3, 7)
    for version in (1, 2, 3):
        trainer(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        transfer.run(version)
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    save_sharded(trainer, where[0])
    fresh = parallel(name, line["tp"])
    load_sharded(fresh, sorted(Path(where[0]).glob("*.safetensors")))
    pairs = zip(weights_of(server), weights_of(fresh), strict=True)
    for served, loaded in pairs:
        boxes = zip(served.boxes(), loaded.boxes(), strict=True)
        for one, other in boxes:
            assert torch.equal(one.view, other.view), served.name
    with torch.no_grad():
        torch.testing.assert_close(server(**inputs).logits, trainer(**inputs).logits)
    usual = plan.gather_and_broadcast().total
    assert plan.traffic().total < usual


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("name", QUICK)
def test_a_server_of_more_tensor_ranks(name: str) -> None:
    assert_served(name)


@pytest.mark.slow
@on_ranks(4, timeout=200)
@pytest.mark.parametrize("name", OTHERS.split())
def test_a_server_of_other_architectures(name: str) -> None:
    assert_served(name)
