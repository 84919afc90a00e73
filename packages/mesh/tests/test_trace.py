"""Covers: trace.py."""

from __future__ import annotations

import time

import pytest
import torch

from shoal_mesh import all_reduce, init_device_mesh, purpose, trace
from shoal_mesh.errors import NoGroupError
from shoal_mesh.internal import all_reduce_packed
from shoal_mesh.observers import trace as recording
from shoal_mesh.observers.timeline import Timeline
from shoal_mesh.testing import on_ranks

ROUNDS, EXTRA = 3, 0.05


@on_ranks(4)
def test_the_rank_that_computes_longer_is_the_straggler() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    slow = mesh.get_rank() == 2
    with trace() as timeline, purpose("the step"):
        for _ in range(ROUNDS):
            time.sleep(EXTRA * (1 + slow))
            all_reduce(torch.ones(4), (mesh, "tp"))
            all_reduce(torch.ones(4), (mesh, "dp"), "max")
    assert timeline.straggler == 2, str(timeline)
    held = timeline.ranks[2].held_up
    assert held > 0.6 * ROUNDS * EXTRA
    assert held > 5 * max(timeline.ranks[rank].held_up for rank in (0, 1, 3))
    assert timeline.ranks[3].waited > 0.6 * ROUNDS * EXTRA  # along tp, for rank 2
    assert timeline.ranks[0].waited > 0.6 * ROUNDS * EXTRA  # along dp, for rank 2
    assert [times.nbytes for times in timeline.ranks] == [2 * ROUNDS * 16] * 4
    place = timeline.held_up[0].call
    assert (place.rank, place.op, place.axes, place.purpose) == (2, "all_reduce", ("tp",), "the step")
    assert place.line.startswith("test_trace.py:")
    text = str(timeline)
    assert "straggler: rank 2" in text and "all_reduce sum float32 (4,) along tp, for the step (test_trace.py" in text


@on_ranks(2)
def test_waiting_for_what_was_started_before_is_seen() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("single", "packed"):
        with trace() as timeline:
            time.sleep(EXTRA * mesh.get_rank())
            if kind == "single":
                all_reduce(torch.ones(4), (mesh, 0), async_op=True).then(torch.neg).wait()
            else:
                all_reduce_packed([torch.ones(4)], (mesh, 0)).wait(lambda _: None)
        assert timeline.straggler == 1, str(timeline)
        assert timeline.ranks[0].waited > 0.6 * EXTRA, (kind, str(timeline))


@on_ranks(2)
def test_clocks_of_several_machines_are_related() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank, clock = mesh.get_rank(), time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "machine", lambda: rank + 1)
        patch.setattr(time, "perf_counter", lambda: clock() + 100 * rank)
        with trace() as timeline:
            time.sleep(EXTRA * rank)
            all_reduce(torch.ones(4), (mesh, 0))
    assert timeline.seconds < 50
    assert timeline.straggler == 1
    assert EXTRA / 2 < timeline.ranks[0].waited < 50


@on_ranks(2)
def test_an_error_inside_is_not_hidden_by_the_merge() -> None:
    with pytest.raises(ZeroDivisionError), trace() as timeline:
        _ = 1 // (init_device_mesh("cpu", (2,)).get_rank() * 0)
    assert timeline.calls == []


def test_it_needs_ranks() -> None:
    with pytest.raises(NoGroupError), trace():
        pass
    assert str(Timeline()) and Timeline().straggler is None
