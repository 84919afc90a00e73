"""Runs on other meshes agree, and differences are named.

Covers: runs/fingerprints.py, runs/record.py, __main__.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sequence_parallel_mlp import PLAN, NormMLP
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Partial, Replicate, Shard, StridedShard, distribute_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.internal import tree_sum
from shoal_mesh.testing import on_ranks
from shoal_same_bits import Comparison, RunRecord, compare_runs, invariant_arithmetic, record_run
from shoal_same_bits.__main__ import main
from shoal_same_bits.runs.fingerprints import part_of_tensor
from shoal_tp_styles import parallelize_module

NAMES = ("data", "tensor")


def run(path: Path, mesh: DeviceMesh, *, sharded: bool = False, change: str = "") -> None:
    """Two steps, each in a file of its number.

    Before the second, one element of a parameter is changed.
    """
    torch.manual_seed(0)
    x = torch.randn(8, 8, 16, generator=torch.Generator().manual_seed(1)).chunk(mesh.size(0))[
        mesh.get_local_rank(0)
    ]
    path.mkdir(exist_ok=True)
    with invariant_arithmetic():
        model: Any = parallelize_module(NormMLP(32), mesh["tensor"], PLAN)
        model = fully_shard(model, mesh["data"]) if sharded else replicate(model, mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            if step == 1 and change:
                with torch.no_grad():
                    model.get_parameter(change).view(-1)[5] += 1e-6
            with record_run(model, mesh["data"]) as record:
                out = model(x.chunk(mesh.size(1), 1)[mesh.get_local_rank(1)])
                loss = tree_sum(
                    out.redistribute(placements=[Replicate()]).to_local().square().flatten()
                )
                (loss * mesh.size(0)).backward()  # type: ignore[no-untyped-call]  # torch
                optimizer.step()
            if mesh.get_rank() == 0:
                record.save(path / str(step))
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
        exact = ["--tolerance", "0"]

        def found(name: str, step: int) -> Comparison:
            one, other = (RunRecord.load(tmp_path / each / str(step)) for each in ("alone", name))
            return compare_runs(one, other, 0.0)

        for name, *_ in same:
            for step in range(2):
                assert not found(name, step).first and found(name, step).compared > 12, (
                    f"{name}: {found(name, step)}"
                )
        assert (
            main(["compare", *(str(tmp_path / name / "0") for name in ("alone", "other")), *exact])
            == 0
        )
        assert (
            main(["compare", *(str(tmp_path / name / "1") for name in ("alone", "other")), *exact])
            == 1
        )
        assert [name for name, _ in found("other", 1).differing[:2]] == [
            "down.bias before",
            "output of down",
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@on_ranks(4)
def test_a_fingerprint_is_that_of_the_whole_tensor(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    numbers = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    whole = numbers > 0 if dtype is torch.bool else numbers.to(dtype)
    want = part_of_tensor(whole).sums()[1]
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
        assert all_reduce(part.sums()[1], (over, over.axis_names)) == want, placements
    assert part_of_tensor(whole.flip(0)).sums()[1] != want


@on_ranks(2)
def test_indices_are_on_the_device_of_the_values() -> None:
    """The indices of a rank that contributes nothing were on the CPU.

    Meta stands for a GPU here.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("copies",))
    tensor = distribute_tensor(torch.zeros(4, 3, device="meta"), mesh, [Replicate()])
    part = part_of_tensor(tensor)
    assert part.counted == (mesh.get_rank() == 0)
    assert {index.device for index in part.indices} == {part.local.device}
