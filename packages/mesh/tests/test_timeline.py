"""Covers: timeline.py."""

from __future__ import annotations

from shoal_mesh.observers.timeline import Call, Timeline


def _call(group: str, started: float, end: float, *waits: tuple[float, float]) -> Call:
    return Call(
        "all_reduce", (group,), group, ((4,),), "float32", 16, "sum", "", "", False, started, [*waits, (started, end)]
    )


def test_a_rank_that_was_held_up_itself_holds_nobody_up() -> None:
    timeline = Timeline()
    dp, tp = [_call("dp", 9, 10), _call("tp", 11, 12)], [_call("dp", 1, 10), _call("tp", 11, 12)]
    timeline.fill([dp, tp, [_call("tp", 1, 12)]], [12, 12, 12])  # rank 1 waits for 0 along dp, 2 for both along tp
    assert timeline.straggler == 0
    assert [times.held_up for times in timeline.ranks] == [8, 0, 0]
    assert [times.waited for times in timeline.ranks] == [0, 8, 10]
    assert [times.moved for times in timeline.ranks] == [2, 2, 1]
    assert [times.computed for times in timeline.ranks] == [10, 2, 1]
    (held,) = timeline.held_up
    assert (held.call.rank, held.seconds, held.computed, held.others) == (0, 8, 9, 1)


def test_work_beside_a_collective_is_no_waiting() -> None:
    timeline = Timeline()
    early, late = _call("dp", 0, 0.5, (6, 9)), _call("dp", 8, 8.5, (8.5, 9))
    timeline.fill([[early], [late]], [9, 9])
    assert (early.waited, early.moved) == (2.5, 1.0)
    assert (late.waited, late.moved) == (0, 1.0)
