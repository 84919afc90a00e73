"""Covers: chrome_trace.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal_mesh import all_reduce, init_device_mesh, purpose, trace
from shoal_mesh.errors import MeshTypeError
from shoal_mesh.testing import fake_world


def test_the_file_has_a_process_per_rank(tmp_path: Path) -> None:
    with fake_world(2), trace() as timeline, purpose("loss"):
        all_reduce(torch.ones(8), (init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "dp"))
    timeline.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    spans = [e for e in events if e["ph"] == "X" and e["cat"] == "forward"]
    assert [(e["pid"], e["args"]["bytes"], e["args"]["purpose"]) for e in spans] == [(0, 32, "loss"), (1, 32, "loss")]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["dp", "dp"]
    with pytest.raises(MeshTypeError):
        timeline.write_chrome_trace(3)  # type: ignore[arg-type]  # the mistake
