"""Covers: runs/fingerprints.py, __main__.py: runs on other numbers of ranks agree, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sequence_parallel_mlp import PLAN, NormMLP
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Partial, Replicate, Shard, StridedShard, distribute_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.internal import tree_sum
from shoal_mesh.testing import on_ranks
from shoal_same_bits import StepFingerprints, invariant_arithmetic
from shoal_same_bits.__main__ import main
from shoal_same_bits.runs.fingerprints import first_difference, part_of_tensor
from shoal_tp_styles import StyleError, parallelize_module

NAMES = ("data", "tensor")


def run(path: Path, mesh: DeviceMesh, *, sharded: bool = False, change: str = "") -> None:
    """Three steps; before the second, one element of a parameter is changed."""
    torch.manual_seed(0)
    x = torch.randn(8, 8, 16, generator=torch.Generator().manual_seed(1)).chunk(mesh.size(0))[mesh.get_local_rank(0)]
    with invariant_arithmetic():
        model: Any = parallelize_module(NormMLP(32), mesh["tensor"], PLAN)
        model = fully_shard(model, mesh["data"]) if sharded else replicate(model, mesh["data"])
        seen = StepFingerprints(path, model, mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            if step == 1 and change:
                with torch.no_grad():
                    model.get_parameter(change).view(-1)[5] += 1e-6
            out = model(x.chunk(mesh.size(1), 1)[mesh.get_local_rank(1)])
            loss = tree_sum(out.redistribute(placements=[Replicate()]).to_local().square().flatten())
            (loss * mesh.size(0)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            seen.write(step, loss=all_reduce(loss.detach(), (mesh, "data")))
            optimizer.zero_grad()


@on_ranks(4, timeout=120)
def test_runs_on_other_meshes_have_the_same_fingerprints(tmp_path: Path) -> None:
    alone = init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("copies", *NAMES))["data", "tensor"]
    two = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", *NAMES))["data", "tensor"]
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    four = init_device_mesh("cpu", (4, 1), mesh_dim_names=NAMES)
    run(tmp_path / "alone", alone)
    same = (("two", two, False), ("both", both, True), ("four", four, True))
    for name, mesh, sharded in same:
        run(tmp_path / name, mesh, sharded=sharded)
    run(tmp_path / "other", both, change="down.bias")
    if both.get_rank() == 0:
        for name, *_ in same:
            assert first_difference(tmp_path / "alone", tmp_path / name) == "", name
        found = first_difference(tmp_path / "alone", tmp_path / "other").splitlines()
        assert found[0].startswith("step 1: ")
        assert found[1:] == [
            "  output: down (Linear)",
            "  value: loss",
            "  gradient: down.bias",
            "  parameter: norm.weight",
        ]
        assert main(["compare", *(str(tmp_path / name) for name in ("alone", "other"))]) == 1
        assert main(["compare", *(str(tmp_path / name) for name in ("alone", "both"))]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@on_ranks(4)
def test_a_fingerprint_is_that_of_the_whole_tensor(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    numbers = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    whole = numbers > 0 if dtype is torch.bool else numbers.to(dtype)
    want = part_of_tensor(whole).digest()
    layouts: list[Any] = [
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Replicate(), Shard(1)),
        (Replicate(), Replicate()),
        (StridedShard(1, split_factor=2), Shard(1)),
    ]
    layouts += [(Partial(), Shard(0))] if dtype.is_floating_point else []
    for placements in layouts:
        part = part_of_tensor(distribute_tensor(whole, mesh, placements))
        (over,) = part.meshes
        assert all_reduce(part.digest(), (over, over.axis_names)) == want, placements
    assert part_of_tensor(whole.flip(0)).digest() != want


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StyleError, match="inside invariant_arithmetic"):
        StepFingerprints(tmp_path / "a", nn.Linear(2, 2))
    for name in "ab":
        (tmp_path / name).write_text(f'{{"step": {ord(name)}, "fingerprints": {{}}}}\n')
    with pytest.raises(StyleError, match="no step in common"):
        first_difference(tmp_path / "a", tmp_path / "b")
