"""Holdings of ranks, against the values in their memory.

Covers: manifest/describe.py, manifest/weights.py, manifest/entries.py, manifest/local_boxes.py,
manifest/records.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_shard_api import Shard as LocalShard, init_from_local_shards
from shoal_tp_styles import Heads, PackedColwiseParallel, parallelize_module
from shoal_transfer import (
    Manifest,
    ManifestError,
    describe,
    describe_files,
    describe_rank,
    merge_manifests,
)
from shoal_transfer.manifest.weights import memories_of, weights_of


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6))


def assert_describes(manifest: Manifest, model: Any, expected: dict[str, Tensor]) -> None:
    """Each holding of this rank addresses, in local memory, the elements of its box."""
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert {name: record.shape for name, record in manifest.tensors.items()} == {
        name: tuple(value.shape) for name, value in expected.items()
    }
    memories = memories_of(weights_of(model))
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, record in manifest.tensors.items():
        for holding in record.holdings:
            if holding.rank != rank:
                continue
            memory = memories[record.parts[holding.part]]
            sizes = [stop - start for start, stop in holding.box]
            offset = int(memory.storage_offset()) + holding.offset
            held = memory.as_strided(sizes, holding.strides, offset)
            assert torch.equal(held, expected[name][tuple(slice(*b) for b in holding.box)]), name


SPLIT = PackedColwiseParallel(blocks={"q": Heads(4, 2), "k": Heads(1, 1), "v": Heads(1, 1)})


@on_ranks(4, timeout=200)
@pytest.mark.parametrize(
    "plan",
    [
        {"0": "colwise", "2": "rowwise"},
        {"0": PackedColwiseParallel(blocks=2)},
        {"0": SPLIT},
        {"2": "rowwise"},
    ],
)
def test_styles(plan: Any) -> None:
    model = parallelize_module(build(), all_ranks(), plan)
    manifest = describe(model, all_ranks())
    assert_describes(manifest, model, build().state_dict())
    assert manifest.hosts.keys() == {0, 1, 2, 3}


@on_ranks(4, timeout=200)
@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(0)],
        [Shard(1), Replicate()],
        [StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
    ],
)
def test_dtensors_of_two_axes_with_uneven_and_empty_shards(placements: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    values = {"w": torch.arange(15.0).reshape(5, 3), "b": torch.arange(1.0)[:, None]}
    state = {name: distribute_tensor(value, mesh, placements) for name, value in values.items()}
    assert_describes(describe(state, mesh), state, values)


@on_ranks(2, timeout=200)
def test_sharded_tensors_and_tied_names_of_a_state_dict() -> None:
    value = torch.arange(10.0).reshape(5, 2)
    rank = dist.get_rank()
    rows = value[:3] if rank == 0 else value[3:]
    shard = LocalShard.from_tensor_and_offsets(rows.clone(), [3 * rank, 0], rank)
    sharded = init_from_local_shards([shard], 5, 2)
    plain = torch.arange(6.0)
    state: dict[str, Tensor] = {"table": sharded, "one": plain, "two": plain.view(6)}
    manifest = describe(state)
    assert manifest.tensors["one"].aliases == ("two",)
    assert manifest.record("two").name == "one"
    assert_describes(manifest, state, {"table": value, "one": plain})


@on_ranks(2, timeout=200)
def test_stages_of_a_pipeline_have_their_own_names() -> None:
    stage = build()
    layers = {r"^(\d+)": str(dist.get_rank()) + r".\1"}
    manifest = describe(stage, rename=layers)
    assert {*manifest.tensors} == {
        f"{s}.{n}.{k}" for s in "01" for n in "02" for k in ("weight", "bias")
    }
    assert [one.rank for one in manifest.tensors["1.0.weight"].holdings] == [1]
    assert manifest.tensors["1.0.weight"].parts == ("0.weight",)


@on_ranks(2, timeout=200)
def test_tensors_of_each_rank_by_themselves() -> None:
    model = nn.Linear(2, 3 + dist.get_rank(), bias=False)
    manifest = describe(model, per_rank=True, world="server")
    assert manifest.shapes == {"weight@0": (3, 2), "weight@1": (4, 2)}
    assert manifest.world == "server"
    # a second description of the model, as a transfer makes it, must have the same names
    assert manifest.per_rank
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(ManifestError, match=r"ranks \[1\] have 'weight' as \(4, 2\)"):
        describe(model)


@on_ranks(2, timeout=200)
def test_pending_sums_and_missing_ranks_are_refused() -> None:
    mesh = all_ranks()
    pending = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ManifestError, match="redistribute partial tensors first"):
        describe({"w": pending})
    halves = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    with pytest.raises(ManifestError, match=r"hold only a part of 'w' \(4,\)"):
        describe(halves, alone)


def test_tied_weights_have_the_name_that_files_have() -> None:
    model: Any = nn.ModuleDict({"head": nn.Linear(2, 3, bias=False), "emb": nn.Embedding(3, 2)})
    model["emb"].weight = model["head"].weight
    model.all_tied_weights_keys = {"head.weight": "emb.weight"}
    manifest = describe(model)
    assert manifest.tensors["emb.weight"].aliases == ("head.weight",)
    with pytest.raises(ManifestError, match="does not have a tensor 'other'"):
        manifest.record("other")


def test_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    manifest = describe_files([tmp_path / "m.safetensors"], world="base")
    assert (manifest.world, [*manifest.hosts]) == ("base", [0])
    record = manifest.tensors["w"]
    assert (record.shape, record.dtype, record.nbytes) == ((2, 3), "bfloat16", 12)
    assert record.holdings[0].strides == (3, 1)
    (tmp_path / "not").write_bytes(b"x" * 20)
    with pytest.raises(ManifestError, match="is not a safetensors file"):
        describe_files([tmp_path / "not"])


def test_names_of_a_model_are_changed() -> None:
    rename = {"weight": "w"}
    manifest = describe(nn.Linear(2, 2), rename=rename)
    assert [*manifest.tensors] == ["w", "bias"]
    assert manifest.rename == rename
    assert not manifest.per_rank
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_layouts_are_shared_and_versions_checked() -> None:
    manifest = describe(nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3)))
    value = json.loads(manifest.to_json())
    assert (len(value["layouts"]), len(value["tensors"])) == (1, 3)
    with pytest.raises(ManifestError, match="version 2 of a manifest"):
        Manifest.from_json(json.dumps(value | {"version": 2}))
    with pytest.raises(ManifestError, match="expected JSON of format"):
        Manifest.from_json("{}")
    with pytest.raises(ManifestError, match="not a manifest: JSONDecodeError"):
        Manifest.from_json("weights")
    del value["hosts"]
    with pytest.raises(ManifestError, match="not a manifest: KeyError: 'hosts'"):
        Manifest.from_json(json.dumps(value))
    value = json.loads(manifest.to_json())
    value["layouts"][0][0][1] = [[0, 9], [0, 2]]
    with pytest.raises(ManifestError, match=r"rank 0 has a box outside of it, \(\(0, 9\)"):
        Manifest.from_json(json.dumps(value))
    with pytest.raises(ManifestError, match="cannot be merged"):
        merge_manifests([manifest, describe_rank(nn.Linear(1, 1), world="other")])
