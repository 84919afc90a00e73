"""The first value in which two runs differ is named.

Covers: runs/record.py, runs/fingerprints.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sequence_parallel_mlp import PLAN, NormMLP
from shoal_data_parallel import replicate
from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_same_bits import Comparison, RunRecord, compare_runs, record_run
from shoal_same_bits.__main__ import main
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, StyleError, parallelize_module


def _model() -> NormMLP:
    torch.manual_seed(0)
    return NormMLP(30).double()


def _inputs() -> Tensor:
    return torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _run(model: Any, x: Tensor, **options: Any) -> RunRecord:
    with record_run(model, **options) as run:
        model(x).square().sum().backward()
    model.zero_grad()
    return run


def _names(run: RunRecord) -> list[str]:
    return [value.name for value in run.values if "aten" not in value.name]


def test_the_first_operator_that_differs_is_named() -> None:
    model, x = _model(), _inputs()
    one = _run(model, x)
    assert str(compare_runs(one, _run(model, x), 0.0)).startswith("all values agree")

    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.where(torch.arange(30) == 7, y * 1.001, y)  # one column of thirty

    other = copy.deepcopy(model)
    other.up.__class__ = Wrong
    found = compare_runs(one, _run(other, x))
    assert found.first == "output of up" and "in up" in found.before
    assert 1e-5 < found.differing[0][1] < 1e-3
    with torch.no_grad():
        other = copy.deepcopy(model)
        other.down.weight[3, 5] += 1e-3
    found = compare_runs(one, _run(other, x))
    assert [name for name, _ in found.differing[:2]] == [
        "down.weight before",
        "aten.t.default in down",
    ]
    assert "down.weight before" in str(found)


def test_an_operator_inside_a_module_is_found() -> None:
    class Scaled(NormMLP):
        wrong = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).exp()
            return (y + (1e-3 if self.wrong else 0.0)).log()

    torch.manual_seed(0)
    model, x = Scaled(30).double(), _inputs()
    one = _run(model, x)
    model.wrong = True
    found = compare_runs(one, _run(model, x))
    assert (found.before, found.first) == ("aten.exp.default in model", "aten.add.Tensor in model")


@on_ranks(2)
def test_a_sharded_run_is_compared_with_a_single_device(folder: str) -> None:
    mesh, x, plain = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), _inputs(), _model()
    single = _run(plain, x)
    rows = x.chunk(2, 1)[mesh.get_local_rank()]
    sharded = _run(parallelize_module(copy.deepcopy(plain), mesh, PLAN), rows)
    found = compare_runs(single, sharded)
    assert not found.first, str(found)
    shared = {*_names(single)} & {*_names(sharded)}
    assert {"output of norm", "output of up", "gradient at output of up"} <= shared
    assert {"gradient of norm.weight", "down.weight after"} <= shared
    broken: Any = parallelize_module(copy.deepcopy(plain), mesh, PLAN)
    with torch.no_grad():
        broken.down.bias += 0.1  # as one that is added on both ranks
    found = compare_runs(single, _run(broken, rows))
    assert found.first == "down.bias before"
    assert [name for name, _ in found.differing][1] == "output of down", str(found)
    if mesh.get_rank() == 0:
        single.save(Path(folder) / "single")
        sharded.save(Path(folder) / "sharded")
        assert RunRecord.load(Path(folder) / "sharded") == sharded
        assert main(["compare", f"{folder}/single", f"{folder}/sharded"]) == 0
        assert main(["compare", f"{folder}/single", f"{folder}/sharded", "--tolerance", "0"]) == 1


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@on_ranks(2)
def test_rows_of_data_parallel_ranks_are_put_together() -> None:
    mesh, x, plain = (
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
        _inputs(),
        _model(),
    )
    single = _run(plain, x)
    model: Any = parallelize_module(
        copy.deepcopy(plain), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    model = replicate(model, mesh["dp"])
    with record_run(model, mesh["dp"]) as run:
        # gradients are averaged
        (model(x.chunk(2)[mesh.get_local_rank("dp")]).square().sum() * 2).backward()
    found = compare_runs(single, run)
    assert not found.first, str(found)
    assert "output of up" in _names(run) and "gradient of up.weight" in _names(run)


@pytest.mark.parametrize("hidden", [10, 3])
@pytest.mark.parametrize("local", [True, False])
@on_ranks(4)
def test_uneven_and_empty_shards_are_compared(hidden: int, local: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 6), nn.Softmax(-1)
    ).double()
    x, mesh = torch.randn(5, 6, dtype=torch.float64), init_device_mesh("cpu", (4,))
    rows = RowwiseParallel(output_layouts=Partial() if not local else None, use_local_output=local)
    plan = {"0": ColwiseParallel(use_local_output=local), "2": rows}
    single, run = _run(plain, x), _run(parallelize_module(copy.deepcopy(plain), mesh, plan), x)
    found = compare_runs(single, run)
    assert not found.first, str(found)
    assert {"output of 0", "gradient at output of 0", "output of 2", "gradient at output of 2"} <= {
        *_names(run)
    }


@on_ranks(2)
def test_operators_on_dtensors_are_compared_with_those_on_plain_tensors() -> None:
    mesh, weight = init_device_mesh("cpu", (2,)), nn.Parameter(torch.arange(12.0).view(4, 3).sin())

    class Product(nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Any) -> Any:
            return ((x @ self.weight).exp() + 1).sum()

    x = torch.arange(20.0).view(5, 4).cos()
    with record_run(plain := Product(weight)) as single:
        plain(x).backward()
    sharded = Product(nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(1)])))
    with record_run(sharded) as run:
        sharded(distribute_tensor(x, mesh, [Shard(0)])).backward()
    found = compare_runs(single, run)
    assert not found.first, str(found)
    shared = {value.name for value in single.values} & {
        value.name for value in run.values if not value.by_rank
    }
    assert {
        "aten.mm.default in model",
        "aten.exp.default in model",
        "aten.sum.default in model",
    } <= shared
    with record_run(sharded) as run:
        with torch.no_grad():
            moved = distribute_tensor(x, mesh, [Replicate()]) * 1.001
        sharded(moved)
    assert compare_runs(single, run).first == "aten.mm.default in model"
    assert isinstance(sharded.weight, DTensor)


@on_ranks(2)
def test_plain_tensors_are_compared_rank_by_rank() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = _inputs().chunk(2, 1)[mesh.get_local_rank()]
    one = _run(parallelize_module(_model(), mesh, PLAN), rows)
    again = _run(parallelize_module(_model(), mesh, PLAN), rows)
    assert not compare_runs(one, again, 0.0).first
    model: Any = parallelize_module(_model(), mesh, PLAN)
    model.up.register_forward_hook(
        lambda module, args, out: out * (1 + 1e-3 * mesh.get_local_rank())
    )
    other = _run(model, rows)
    found = compare_runs(one, other)
    assert found.first == "output of up", str(found)  # after the hook, on one rank alone
    assert [name for name, _ in found.differing][1] == "aten.relu.default in model"


def test_broken_values_and_files_are_said(tmp_path: Path) -> None:
    model, x = _model(), _inputs()
    one = _run(model, x)
    with torch.no_grad():
        model.down.bias[2] = float("nan")
    found = compare_runs(one, _run(model, x))
    assert found.differing[0] == ("down.bias before", float("inf"))
    with pytest.raises(StyleError, match="do not have values in common"):
        compare_runs(one, RunRecord())
    with pytest.raises(StyleError, match="at least 0"):
        compare_runs(one, one, -1.0)
    (tmp_path / "odd").write_text("{}\n")
    with pytest.raises(StyleError, match="was not written by"):
        RunRecord.load(tmp_path / "odd")


def test_a_notebook_shows_the_values_that_differ() -> None:
    differing = [(f"<layer {number}>", 0.5) for number in range(60)]
    html = Comparison(differing, "", compared=70, alone=2)._repr_html_()
    assert "70 values compared, 2 in one run only" in html
    assert "<td>&lt;layer 49&gt;</td><td>5.0e-01</td>" in html
    assert "and 10 more" in html and "layer 50" not in html
    agreeing = Comparison([], "", compared=3, alone=0)._repr_html_()
    assert agreeing.startswith("<pre>all values agree")
