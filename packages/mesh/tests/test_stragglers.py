"""Covers: stragglers.py."""

from __future__ import annotations

import time

import pytest
import torch

from shoal_mesh import all_reduce, init_device_mesh, purpose, stragglers
from shoal_mesh.errors import NoGroupError
from shoal_mesh.internal import start_packed
from shoal_mesh.observers import stragglers as recording
from shoal_mesh.observers.stragglers import Call, StragglerTable
from shoal_mesh.testing import on_ranks

ROUNDS, EXTRA = 3, 0.05


@on_ranks(4)
def test_the_rank_that_computes_longer_is_the_straggler() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    slow = mesh.get_rank() == 2
    with stragglers() as table, purpose("the step"):
        for _ in range(ROUNDS):
            time.sleep(EXTRA * (1 + slow))
            all_reduce(torch.ones(4), (mesh, "tp"))
            all_reduce(torch.ones(4), (mesh, "dp"), "max")
    assert table.straggler == 2, str(table)
    held = table.ranks[2].held_up
    assert held > 0.6 * ROUNDS * EXTRA
    assert held > 5 * max(table.ranks[rank].held_up for rank in (0, 1, 3))
    assert table.ranks[3].waited > 0.6 * ROUNDS * EXTRA  # along tp, for rank 2
    assert table.ranks[0].waited > 0.6 * ROUNDS * EXTRA  # along dp, for rank 2
    assert [times.nbytes for times in table.ranks] == [2 * ROUNDS * 16] * 4
    call = table.held_up[0]
    assert call.rank == 2
    assert call.what.startswith(
        "all_reduce sum float32 (4,) along tp, for the step (test_stragglers.py:"
    )
    assert "straggler: rank 2" in str(table) and call.what in str(table)


@on_ranks(2)
def test_waiting_for_what_was_started_before_is_seen() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("single", "packed"):
        with stragglers() as table:
            time.sleep(EXTRA * mesh.get_rank())
            if kind == "single":
                all_reduce(torch.ones(4), (mesh, 0), async_op=True).then(torch.neg).wait()
            else:
                start_packed("all_reduce", [torch.ones(4)], (mesh, 0)).wait()
        assert table.straggler == 1, str(table)
        assert table.ranks[0].waited > 0.6 * EXTRA, (kind, str(table))


@on_ranks(2)
def test_clocks_of_several_machines_are_related() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank, clock = mesh.get_rank(), time.perf_counter
    # longer than the operating system keeps a rank from a busy core
    lag = 10 * EXTRA
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "machine", lambda: rank + 1)
        patch.setattr(time, "perf_counter", lambda: clock() + 100 * rank)
        with stragglers() as table:
            time.sleep(lag * rank)
            all_reduce(torch.ones(4), (mesh, 0))
    assert table.seconds < 50
    assert table.straggler == 1
    assert lag / 2 < table.ranks[0].waited < 50


@on_ranks(2)
def test_an_error_inside_is_not_hidden_by_the_merge() -> None:
    with pytest.raises(ZeroDivisionError), stragglers() as table:
        _ = 1 // (init_device_mesh("cpu", (2,)).get_rank() * 0)
    assert table.calls == []


def test_it_needs_ranks() -> None:
    with pytest.raises(NoGroupError, match="default process group"), stragglers():
        pass
    assert (
        "no rank held the others up" in str(StragglerTable()) and StragglerTable().straggler is None
    )


def _call(rank: int, group: str, started: float, end: float, *waits: tuple[float, float]) -> Call:
    return Call(f"all_reduce along {group}", group, 16, started, [*waits, (started, end)], rank)


def test_a_rank_that_was_held_up_itself_holds_nobody_up() -> None:
    table = StragglerTable()
    first = [_call(0, "dp", 9, 10), _call(0, "tp", 11, 12)]
    second = [_call(1, "dp", 1, 10), _call(1, "tp", 11, 12)]  # waits for 0 along dp
    # the third waits for both along tp
    table.fill([first, second, [_call(2, "tp", 1, 12)]], [12, 12, 12])
    assert table.straggler == 0
    assert [times.held_up for times in table.ranks] == [8, 0, 0]
    assert [times.waited for times in table.ranks] == [0, 8, 10]
    assert [times.moved for times in table.ranks] == [2, 2, 1]
    assert [times.computed for times in table.ranks] == [10, 2, 1]
    (call,) = table.held_up
    assert (call.rank, call.held_up, call.computed, call.others) == (0, 8, 9, 1)


def test_work_beside_a_collective_is_no_waiting() -> None:
    table = StragglerTable()
    early, late = _call(0, "dp", 0, 0.5, (6, 9)), _call(1, "dp", 8, 8.5, (8.5, 9))
    table.fill([[early], [late]], [9, 9])
    assert (early.waited, early.moved) == (2.5, 1.0)
    assert (late.waited, late.moved) == (0, 1.0)


def test_a_notebook_shows_a_row_for_each_rank() -> None:
    table = StragglerTable()
    table.fill([[_call(0, "<dp>", 9, 10)], [_call(1, "<dp>", 1, 10)]], [12, 12])
    html = table._repr_html_()
    assert "straggler: rank 0" in html and "all_reduce along &lt;dp&gt;" in html
    row = "<td>1</td><td>3000.00</td><td>8000.00</td><td>1000.00</td><td>16</td><td>0.00</td>"
    assert row in html
    assert repr(table) == str(table)
