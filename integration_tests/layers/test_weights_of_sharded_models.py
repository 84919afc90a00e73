"""Weights of models that are sharded over data and tensor axes.

They are written as files and copied to other ranks.

Covers: shoal_models/weights/saving.py, shoal_transfer/running/copy_weights.py.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_models import build_model, needs_hf, token_batch
from llama_of_blocks import GATHERED_PLAN
from shoal_data_parallel import fully_shard, replicate
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import hf, save_sharded
from shoal_tp_styles import StyleError, parallelize_module, unparallelize_module
from shoal_transfer.manifest.weights import weights_of


@needs_hf
@on_ranks(4, timeout=200)
def test_sharded_over_data_and_tensor_axes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    where = [str(tmp_path / "saved")]
    dist.broadcast_object_list(where)
    torch.manual_seed(0)
    single = nn.Linear(4, 10)
    expected = {name: value.clone() for name, value in single.state_dict().items()}
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    module = fully_shard(parallelize_module(single, grid["tp"], "rowwise"), grid["data"])
    saved = save_sharded(module, where[0])
    written = [torch.tensor(0) for _ in range(4)]
    dist.all_gather(written, torch.tensor(saved.bytes_written))
    assert sum(int(each) for each in written) == 4 * 50, "every element is written once"
    values = {
        name: each
        for file in Path(where[0]).glob("*.safetensors")
        for name, each in load_file(file).items()
    }
    assert all(torch.equal(each, expected[name]) for name, each in values.items())


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6)).double()


def assert_equal(target: Any, expected: Any) -> None:
    """What every rank holds is its part of the expected values."""
    state = expected.state_dict()
    weights = weights_of(target)
    assert {weight.name for weight in weights} == state.keys()
    for weight in weights:
        for held in weight.boxes():
            values = state[weight.name][tuple(slice(*bounds) for bounds in held.box)]
            assert torch.equal(held.view, values), weight.name


@on_ranks(4, timeout=200)
def test_ranks_that_train_and_others_that_serve() -> None:
    trains = dist.get_rank() < 3
    grid = init_device_mesh("cpu", (1, 4), mesh_dim_names=("d", "t"))
    source = fully_shard(
        parallelize_module(build(0), grid["t"], {"0": "colwise", "2": "rowwise"}), grid["d"]
    )
    target = None if trains else build(1)  # one rank serves alone
    hf.copy_weights(source, target)
    if target is not None:
        assert_equal(target, build(0))
    other = parallelize_module(build(2), grid["t"], {"0": "rowwise_rep", "2": "colwise_rep"})
    hf.copy_weights(None if trains else build(3), other)
    assert_equal(other, build(3))


@on_ranks(2, timeout=200)
@pytest.mark.parametrize(
    "how", [fully_shard, replicate, partial(parallelize_module, parallelize_plan=GATHERED_PLAN)]
)
def test_a_model_made_from_a_configuration(how: Any, tmp_path: Path) -> None:
    single: Any = build_model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    where = [str(tmp_path)]
    dist.broadcast_object_list(where)
    home = Path(where[0])
    model: Any = how(copy.deepcopy(single), mesh)
    hf.save_sharded(model, home / "saved")
    assert json.loads((home / "saved" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    back = hf.from_pretrained(home / "saved", mesh, {"lm_head": "colwise_rep"})
    torch.testing.assert_close(back(token_batch()).logits, single(token_batch()).logits)
    if how is not replicate:
        with pytest.raises(StyleError, match=r"transformers cannot save. Call hf.save_sharded"):
            model.save_pretrained(home / "other")
        assert not (home / "other").exists()
    if how not in (replicate, fully_shard):
        unparallelize_module(model)
        model.save_pretrained(home / f"plain {dist.get_rank()}")
