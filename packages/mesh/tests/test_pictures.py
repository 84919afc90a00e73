"""Covers: observers/pictures.py: what pictures show of records, and the error without matplotlib."""

from __future__ import annotations

import sys

import pytest
import torch

from shoal_mesh import CommDebugMode, MemoryTrace, all_gather, all_reduce, draw_memory, init_device_mesh
from shoal_mesh.errors import MissingExtraError
from shoal_mesh.testing import fake_world


def test_collectives_are_bars_in_a_row_for_their_axes() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with CommDebugMode() as debug:
            for axis in ("tp", "tp", "dp"):
                all_reduce(torch.ones(8), (mesh, axis))
            all_gather(torch.ones(8), (mesh, "tp"))
        ax = debug.picture()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["tp", "dp"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["3 x all_reduce", "1 x all_gather_into_tensor"]
    assert len(ax.patches) == 4


def test_memory_is_a_line_for_each_rank() -> None:
    with MemoryTrace() as memory:
        kept = torch.ones(2**18)
    assert kept.numel() == 2**18
    ax = draw_memory({"rank 0": memory.samples, "rank 1": memory.samples})
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["rank 0, peak 1.0 MiB", "rank 1, peak 1.0 MiB"]
    assert len(memory.picture().lines) == 1


def test_an_empty_trace_is_an_empty_picture() -> None:
    assert not CommDebugMode().picture().patches


def test_matplotlib_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="pip install matplotlib"):
        CommDebugMode().picture()
