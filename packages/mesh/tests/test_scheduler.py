"""Covers: lab/scheduling/: meetings, stores, orders and deadlocks, without ranks."""

from __future__ import annotations

from typing import Any

import torch

from shoal_mesh.errors import DeadlockError, MeshError
from shoal_mesh.lab.scheduling.meetings import Answer, RankTask, Ticket
from shoal_mesh.lab.scheduling.posted_calls import ANY, GroupKey, Meta, PostedCall
from shoal_mesh.lab.scheduling.scheduler import Scheduler
from shoal_mesh.lab.scheduling.store_request import StoreRequest

META = Meta((2,), torch.float32)


def call_of(rank: int, kind: str = "barrier", size: int = 2, **facts: Any) -> PostedCall:
    return PostedCall(kind, GroupKey("0", tuple(range(size))), rank, **facts)


def post(scheduler: Scheduler, task: RankTask, call: PostedCall) -> Ticket:
    ticket = Ticket(0, task, call, None)
    scheduler.post(ticket)
    return ticket


def started(size: int, **options: Any) -> Scheduler:
    scheduler = Scheduler(size, **options)
    assert len(scheduler.take_answers()) == min(size, options.get("width") or size)
    return scheduler


def ranks_of(answers: list[Answer]) -> list[int]:
    return [answer.task.rank for answer in answers]


def test_all_members_are_answered_when_the_last_one_has_come() -> None:
    scheduler = started(2)
    scheduler.wait(RankTask(0), post(scheduler, RankTask(0), call_of(0)))
    assert scheduler.take_answers() == [], "rank 1 has not arrived"
    scheduler.wait(RankTask(1), post(scheduler, RankTask(1), call_of(1)))
    assert sorted(ranks_of(scheduler.take_answers())) == [0, 1]


def test_a_forced_order_that_is_not_legal_fails_all_ranks() -> None:
    scheduler = Scheduler(3, width=1, order=[2, 2])
    assert ranks_of(scheduler.take_answers()) == [2]
    scheduler.wait(RankTask(2), post(scheduler, RankTask(2), call_of(2, size=3)))
    answers = scheduler.take_answers()
    assert sorted(ranks_of(answers)) == [0, 1, 2]
    assert all(isinstance(answer.error, MeshError) for answer in answers)


def test_a_value_of_a_store_waits_until_all_main_threads_wait() -> None:
    scheduler = started(2)
    scheduler.store(RankTask(1), StoreRequest("set", ("key",), (b"1",)))
    assert scheduler.take_answers() == [], "rank 0 may set it first"
    scheduler.store(RankTask(0), StoreRequest("get", ("key",)))
    answers = scheduler.take_answers()
    assert {answer.task.rank: answer.value for answer in answers} in (
        {1: None},
        {1: None, 0: [b"1"]},
    )


def test_a_thread_beside_the_main_one_gets_its_message_while_the_main_one_runs() -> None:
    scheduler = started(2)
    helper = RankTask(0, 1)
    receive = post(scheduler, helper, call_of(0, "recv", outputs=(META,), peer=ANY))
    scheduler.wait(helper, receive)
    assert scheduler.take_answers() == []
    send = post(scheduler, RankTask(1), call_of(1, "send", inputs=(META,), peer=0))
    assert receive.meeting is send.meeting is not None
    assert [answer.task for answer in scheduler.take_answers()] == [helper]


def test_a_store_is_decided_where_a_main_thread_waits_for_another_thread_of_its_rank() -> None:
    scheduler = started(2)
    helper = RankTask(0, 1)
    scheduler.store(helper, StoreRequest("get", ("key",)))
    assert scheduler.take_answers() == []
    scheduler.store(RankTask(1), StoreRequest("set", ("key",), (b"1",)))
    answers = scheduler.take_answers()
    answers += scheduler.take_answers()
    assert {answer.task: answer.value for answer in answers} == {RankTask(1): None, helper: [b"1"]}


def test_other_threads_delay_the_end_of_a_deadlock() -> None:
    scheduler = started(1)
    scheduler.count_threads(0, 1)
    scheduler.store(RankTask(0), StoreRequest("get", ("key",)))
    assert scheduler.take_answers() == [] and scheduler.is_stuck
    scheduler.fail_stuck()
    (answer,) = scheduler.take_answers()
    assert isinstance(answer.error, DeadlockError)
    assert "rank 0: waits for get of 'key' in a store" in str(answer.error)


def test_the_number_of_ranks_that_run_at_a_time() -> None:
    scheduler = Scheduler(4, width=2)
    first = ranks_of(scheduler.take_answers())
    assert len(first) == 2 and scheduler.take_answers() == []
    for rank in first:
        scheduler.leave(rank, "has returned")
    assert sorted([*first, *ranks_of(scheduler.take_answers())]) == [0, 1, 2, 3]


def test_operations_of_stores() -> None:
    scheduler = started(1)

    def ask(op: str, *values: Any) -> Any:
        scheduler.store(RankTask(0), StoreRequest(op, ("key",), values))
        (answer,) = scheduler.take_answers()
        return answer.value

    assert ask("add", 2) == 2 and ask("add", 3) == 5
    assert ask("get") == [b"5"] and ask("check") is True and ask("count") == 1
    assert ask("compare_set", b"4", b"6") == b"5" and ask("compare_set", b"5", b"6") == b"6"
    ask("append", b"7")
    assert ask("get") == [b"67"]
    assert ask("delete") is True and ask("delete") is False
    assert ask("compare_set", b"", b"8") == b"8" and ask("check") is True
