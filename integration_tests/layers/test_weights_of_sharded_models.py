"""Weights of models that are sharded over data and tensor axes, written as files and copied to other ranks.

Covers: shoal_models/weights/saving.py, shoal_models/hf/copy_weights.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_models import needs_hf
from shoal_data_parallel import fully_shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import hf, save_sharded
from shoal_models.weights.saving import describe
from shoal_tp_styles import parallelize_module


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
    values = {name: each for file in Path(where[0]).glob("*.safetensors") for name, each in load_file(file).items()}
    assert all(torch.equal(each, expected[name]) for name, each in values.items())


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6)).double()


def assert_equal(target: Any, expected: Any) -> None:
    """What every rank holds is its part of the expected values."""
    held: dict[str, Any] = {}
    describe(target, held)
    state = expected.state_dict()
    assert held.keys() == state.keys()
    for name, boxes in held.items():
        for box, shard in boxes:
            assert torch.equal(shard, state[name][tuple(slice(*bounds) for bounds in box)]), name


@on_ranks(4, timeout=200)
def test_ranks_that_train_and_others_that_serve() -> None:
    trains = dist.get_rank() < 3
    grid = init_device_mesh("cpu", (1, 4), mesh_dim_names=("d", "t"))
    source = fully_shard(parallelize_module(build(0), grid["t"], {"0": "colwise", "2": "rowwise"}), grid["d"])
    target = None if trains else build(1)  # one rank serves alone
    hf.copy_weights(source, target)
    if target is not None:
        assert_equal(target, build(0))
    other = parallelize_module(build(2), grid["t"], {"0": "rowwise_rep", "2": "colwise_rep"})
    hf.copy_weights(None if trains else build(3), other)
    assert_equal(other, build(3))
