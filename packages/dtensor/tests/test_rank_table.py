"""Text, colours and HTML of the same table.

Covers: layout/spec_text.py and text in api/explain.py.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

from shoal_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    Spec,
    distribute_tensor,
    draw_sharding,
    visualize_sharding,
)
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.layout.spec_text import color_of_rank, rank_table
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.errors import MissingExtraError
from shoal_mesh.testing import fake_world, observed, on_ranks

MESH = abstract_mesh((2, 2), ("data", "tensor"))
UNEVEN = Spec(MESH, (Shard(0), Shard(1)), (3, 4))


def test_uneven_and_empty_shards() -> None:
    table = rank_table(Spec(MESH, (Shard(0), Shard(0)), (3, 4)))
    assert (table.rows, table.columns, table.cells) == (
        ["0:1", "1:2", "2:3"],
        ["0:4"],
        [["0"], ["1"], ["2"]],
    )
    assert "3:" not in draw_sharding(UNEVEN)


def test_a_rank_has_the_same_colour_in_all_pictures() -> None:
    reordered = Spec(MESH, (Shard(0), Shard(0)), (4, 4), shard_order=((0, (1, 0)),))
    table = rank_table(reordered)
    assert [cells[0] for cells in table.cells] == ["0", "2", "1", "3"]
    assert [table.color(cells[0]) for cells in table.cells] == [
        color_of_rank(rank) for rank in (0, 2, 1, 3)
    ]
    assert len({color_of_rank(rank) for rank in range(8)}) == 8
    for step in (2, 4, 8, 16, 64):
        firsts = [color_of_rank(step * block) for block in range(4)]
        assert all(one != other for one, other in pairwise(firsts))


def test_a_colour_for_each_set_of_ranks() -> None:
    table = rank_table(UNEVEN)
    assert len({table.color(cell) for line in table.cells for cell in line}) == 4
    assert table.color("") == "none"


def test_notebooks_show_the_global_shape_and_the_table() -> None:
    with fake_world(2):
        tensor = distribute_tensor(torch.ones(5, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        html = tensor._repr_html_()
    assert "f32[5@(0)=[3, 2], 4]" in html and "<th>0:3</th>" in html and ">1</td>" in html
    assert "summands" in Spec(MESH, (Partial(), Replicate()), (4,))._repr_html_()
    assert "<table>" not in Spec(MESH, (Shard(0), Replicate()), (4, 4, 4))._repr_html_()


@on_ranks(2)
def test_what_a_notebook_shows_takes_no_collective() -> None:
    mesh = init_device_mesh("cpu", (2,))
    summed = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    sharded = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    with observed() as events:
        assert repr(mesh) and mesh._repr_html_()
        for tensor in (summed, sharded):
            assert repr(tensor) and tensor._repr_html_()
    assert not events


def test_rich_prints_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with fake_world(2):
        tensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        visualize_sharding(tensor, header="weight", use_rich=True)
        printed = capsys.readouterr().out
        assert "weight" in printed and "\x1b[" in printed
        monkeypatch.setitem(sys.modules, "rich.console", None)
        with pytest.raises(MissingExtraError, match="pip install rich"):
            visualize_sharding(tensor, use_rich=True)


def test_three_dims_are_refused() -> None:
    with pytest.raises(PlacementError, match="one or two dims"):
        draw_sharding(Spec(MESH, (Replicate(), Replicate()), (2, 2, 2)))
