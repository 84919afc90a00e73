"""Covers: comm_debug.py: tables and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_mesh import (
    CommDebugMode,
    DeviceMesh,
    all_reduce,
    init_device_mesh,
)
from shoal_mesh.testing import fake_world

OPS = torch.ops._c10d_functional


@pytest.fixture
def mesh() -> Any:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Any) -> Tensor:
        ctx.along = along
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return all_reduce(g, ctx.along), None


class _Block(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.along = (mesh, "tp")

    def forward(self, x: Tensor) -> Tensor:
        reduced = _Reduced.apply(x, self.along)  # type: ignore[no-untyped-call]  # torch
        y: Tensor = self.lin(reduced)
        return y + all_reduce(y.detach(), self.along)


def test_modules_phases_and_reports(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = nn.Sequential(_Block(mesh), _Block(mesh))
    with CommDebugMode() as comm:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert comm.get_comm_counts() == {OPS.all_reduce: 4}
    assert [r.backward for r in comm.trace] == [False, False, True, True]
    assert {r.module for r in comm.trace if not r.backward} == {"Sequential.0", "Sequential.1"}
    assert set(comm.get_parameter_info()["Sequential.0.lin"]) == {"weight", "bias"}
    assert comm.get_sharding_info() == {}
    texts = [comm.generate_comm_debug_tracing_table(noise_level=level) for level in range(4)]
    assert sorted(texts, key=len) == texts
    assert "total: 4 all_reduce" in texts[0]
    assert "aten.addmm" in texts[3]
    comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "t.txt"), 2)
    assert (tmp_path / "t.txt").read_text() == texts[2]
    comm.generate_json_dump(str(tmp_path / "t.json"))
    data = json.loads((tmp_path / "t.json").read_text())
    assert data["modules"]["Sequential.1"]["forward"]["collectives"] == {"all_reduce": 1}
