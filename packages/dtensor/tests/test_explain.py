"""Covers: api/explain.py, redistribute/traffic.py."""

from __future__ import annotations

import html
import json
import sys
from itertools import product

import pytest
import torch

from shoal_dtensor import (
    DTensor,
    Partial,
    PartitionSpec,
    Placement,
    Replicate,
    Shard,
    Spec,
    explain,
)
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.redistribute.plan import plan
from shoal_dtensor.redistribute.traffic import least_bytes, plan_traffic
from shoal_mesh import Link, abstract_mesh, init_device_mesh
from shoal_mesh.errors import MissingExtraError
from shoal_mesh.internal import Topology
from shoal_mesh.testing import fake_world

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def spec(
    *placements: Placement, mesh: tuple[int, ...] = (4, 2), shape: tuple[int, ...] = (64, 64)
) -> Spec:
    return Spec(abstract_mesh(mesh, ("dp", "tp", "pp")[: len(mesh)]), placements, shape)


def test_words_name_the_chosen_plan_and_the_runners_up() -> None:
    why = explain(spec(P, R, shape=(4096, 4096)), spec(R, R, shape=(4096, 4096)))
    text = str(why)
    assert text.startswith("[P(sum), R] -> [R, R]: ")
    assert "must move at least" in text
    assert text.index("rejected:") < text.index(" x), ")
    assert "AllReduce over (dp) sum" in text


def test_data_can_be_written_as_json() -> None:
    why = explain(spec(S0, S0), spec(R, S1))
    data = json.loads(json.dumps(why.as_data()))
    assert data["mesh"] == {"dp": 4, "tp": 2}
    assert data["chosen"]["steps"][0]["step"] == "Exchange"
    assert data["rejected"][0]["seconds"] >= data["chosen"]["seconds"]


def test_nothing_to_do() -> None:
    assert "nothing to do" in str(explain(spec(S0, R), spec(S0, R)))


LEAST = [
    (spec(S0, mesh=(4,)), spec(R, mesh=(4,)), 64 * 64 * 4 * 3 / 4),
    (spec(S0, mesh=(4,)), spec(S1, mesh=(4,)), 64 * 16 * 4 * 3 / 4),
    (spec(P, mesh=(4,)), spec(R, mesh=(4,)), 64 * 64 * 4 * 6 / 4),
    (spec(P, mesh=(4,)), spec(S0, mesh=(4,)), 64 * 64 * 4 * 3 / 4),
    (spec(R, mesh=(4,)), spec(S0, mesh=(4,)), 0.0),
    (spec(S0, mesh=(4,)), spec(P, mesh=(4,)), 0.0),
    (spec(P, R), spec(R, R), 64 * 64 * 4 * (3 + 7) / 8),
]


@pytest.mark.parametrize(("src", "dst", "expected"), LEAST)
def test_least_bytes(src: Spec, dst: Spec, expected: float) -> None:
    assert least_bytes(src, dst) == expected


def test_no_plan_moves_less_and_resharding_moves_no_more() -> None:
    for old, new in product(product((R, S0, S1), repeat=2), repeat=2):
        src, dst = spec(*old, mesh=(2, 3), shape=(7, 5)), spec(*new, mesh=(2, 3), shape=(7, 5))
        sent = sum(plan_traffic(plan(src, dst)).values()) / 6
        assert sent == pytest.approx(least_bytes(src, dst)), (src, dst)


def test_traffic_of_a_gather() -> None:
    gather = plan(spec(S0, mesh=(2,), shape=(3,)), spec(R, mesh=(2,), shape=(3,)))
    assert plan_traffic(gather) == {(0, 1): 8, (1, 0): 4}


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install matplotlib"):
        explain(spec(S0, S0), spec(R, S1)).picture()


def test_a_search_that_stopped_early_says_what_is_proven() -> None:
    mesh = abstract_mesh((2, 2, 2, 2))
    links = Topology(tuple(Link(1e-5, 10.0**n) for n in (8, 11, 9, 10)))
    src = Spec(mesh, (S0, R, S0, S0), (64, 64, 64, 64))
    dst = src.with_(placements=(Shard(3), Shard(2), S1, Shard(2)))
    why = explain(src, dst, topology=links)
    assert 0 < why.chosen.floor <= why.chosen.seconds
    early = why.chosen.floor < why.chosen.seconds * (1 - 1e-9)
    assert ("stopped early" in str(why)) == early


def test_picture() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ax = explain(spec(S0, S0), spec(R, S1)).picture()
    assert ax.get_xlabel() == "to rank"
    assert "Exchange" in ax.get_title()
    pyplot.close("all")


def test_a_tensor_and_placements_say_what_two_specs_say() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = DTensor.from_local(torch.zeros(4, 8), mesh, [Shard(0), Shard(1)])
        dst = tensor.spec.with_(placements=(Shard(1), Shard(1)), shard_order=((1, (1, 0)),))
        expected = repr(explain(tensor.spec, dst))
        assert repr(explain(tensor, [Shard(1), Shard(1)], shard_order=((1, (1, 0)),))) == expected
        assert repr(explain(tensor, PartitionSpec(None, ("tp", "dp")))) == expected
        assert explain(tensor, dst)._repr_html_() == f"<pre>{html.escape(expected)}</pre>"
        with pytest.raises(PlacementError, match="the tensor has 2 dims"):
            explain(tensor, [Shard(2), Replicate()])
