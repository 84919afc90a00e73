"""Covers: observe/batches.py, observe/roots.py, observe/local_values.py."""

from __future__ import annotations

import torch
from torch import nn

from shoal_dtensor import DTensor, Partial, Shard
from shoal_lab.observe.batches import concatenate
from shoal_lab.observe.local_values import local_value
from shoal_lab.observe.roots import Roots, logical_name
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def test_batches_of_equal_ranks_count_once() -> None:
    first = [[{"x": torch.zeros(2, 3), "name": "a"}]]
    second = [[{"x": torch.ones(1, 3), "name": "a"}]]
    whole = concatenate([first, first, second, second])
    assert whole[0][0]["x"].shape == (3, 3)
    assert whole[0][0]["name"] == "a"


def test_scalars_and_nested_batches_keep_their_structure() -> None:
    ranks = [[[(torch.tensor(rank), [torch.full((2,), rank)])]] for rank in range(2)]
    number, (rows,) = concatenate(ranks)[0][0]
    assert number == 0
    assert rows.tolist() == [0, 0, 1, 1]


def test_no_loaders_give_no_batches() -> None:
    assert concatenate([[], []]) == []


def test_the_outermost_module_is_found_from_an_inner_one() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    roots = Roots()
    roots.add(inner)
    assert list(roots.parameters()) == ["0.0.weight", "0.0.bias"]
    assert list(roots) == [outer]
    assert roots.paths()[id(outer)] == "model"


def test_two_models_have_names_of_their_own() -> None:
    one = nn.Linear(2, 2, bias=False)
    other = nn.Linear(2, 2, bias=False)
    roots = Roots()
    roots.add(one)
    roots.add(other)
    roots.add(one)
    assert list(roots.parameters()) == ["weight", "weight #2"]


def test_names_of_wrappers_are_left_out() -> None:
    assert logical_name("module._orig_mod.0._checkpoint_wrapped_module.weight") == "0.weight"
    assert logical_name("submodule.weight") == "submodule.weight"


def test_the_places_of_a_dtensor_are_in_its_metadata() -> None:
    with fake_world(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.ones(2, 1, dtype=torch.float32)
        tensor = DTensor.from_local(
            local, mesh, [Shard(0), Shard(1)], run_check=False, shape=(4, 3), stride=(3, 1)
        )
        value = local_value(tensor)
        partial = local_value(
            DTensor.from_local(local, mesh, [Partial(), Shard(0)], run_check=False)
        )
    assert value.shape == (4, 3)
    assert value.index is not None
    assert value.index.tolist() == [[8], [11]]
    assert value.tensor.dtype == torch.float64
    assert partial.pending == (1, 3)
