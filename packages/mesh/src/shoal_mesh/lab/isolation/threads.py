"""Ranks as threads of this process, of which one runs at a time.

The rank that completes a collective writes the outputs of all members, while the others wait. So no
input is copied, and a rank that continues finds its outputs written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import DeadlockError, PeerError
from ..c10d.link import PendingCall, SchedulerLink, current_link, enter_thread
from ..c10d.values import copy_message, deliver, totals_of
from ..rank_state import RandomStates, RankState
from ..scheduling.meetings import Answer, Meeting, RankTask, Ticket, next_number
from ..scheduling.posted_calls import PostedCall
from ..scheduling.scheduler import Scheduler
from ..scheduling.store_request import StoreRequest

T = TypeVar("T")
State = RandomStates | RankState


class Conductor:
    """The turns of ranks on threads.

    Args:
        size: number of ranks.
        seed: seed of the random choices. A choice decides which rank runs next, and is made each
            time that several ranks can continue.
        order: the first choices, in place of random ones: the rank that runs next, for one choice
            after the other.

    Attributes:
        scheduler: the scheduler of the ranks.
        capture: returns the state that a rank keeps while others run.
        used_groups: the ranks of groups in which a collective or message was started.
    """

    def __init__(self, size: int, *, seed: int = 0, order: Sequence[int] = ()) -> None:
        self.scheduler = Scheduler(
            size, seed=seed, order=order, width=1, on_complete=self._complete_meeting
        )
        self.capture: Callable[[], State] = RandomStates.capture
        self._lock = threading.Lock()
        # One lock for each rank. All of the locks stay acquired. A rank waits for its turn by
        # acquiring its lock again, and `_hand_out` gives the turn by releasing the lock once. Locks
        # switch threads faster than semaphores.
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()
        self._answers: list[Answer | None] = [None] * size
        # the rank that had the last turn
        self._last_runner: int | None = None
        # Number of ranks that have not ended. It is 0 before a run begins and after it ends.
        self._unfinished_ranks = 0
        self.used_groups: set[tuple[int, ...]] = set()

    def _complete_meeting(self, meeting: Meeting) -> None:
        """Write the outputs of all members; if that raises, fail all ranks with the error."""
        try:
            _write_outputs(meeting)
        except Exception as error:
            self.scheduler.fail(error)

    def begin(self) -> None:
        """Let the first rank run."""
        self._unfinished_ranks = len(self._turns)
        # The scheduler has an answer without a value for each rank, which gives the rank its first
        # turn. As one rank runs at a time, only the answer for the first rank is due now.
        with self._lock:
            answers = self.scheduler.take_answers()
        self._hand_out(answers)

    def request(self, rank: int, enter: Callable[[RankTask], None]) -> Any:
        """Open a request of a rank, let others run, and return the answer.

        Args:
            rank: the rank.
            enter: opens the request in the scheduler.

        Raises:
            DeadlockError: if the ranks do not run, so that none of the others can come.
        """
        if self._unfinished_ranks == 0:
            raise DeadlockError(
                f"rank {rank} waits in a collective outside of a run, which no other rank joins: "
                "call the collective in the function that the ranks run"
            )
        with self._lock:
            enter(RankTask(rank))
            answers = self.scheduler.take_answers()
        keeps_turn = len(answers) == 1 and answers[0].task.rank == rank
        if keeps_turn:
            return _value_of(answers[0])
        state = self.capture()
        self._hand_out(answers)
        answer = self.await_turn(rank)
        # random generators, and the other parts of the state, belong to the process
        others_have_run = self._last_runner != rank
        if others_have_run:
            state.restore()
        self._last_runner = rank
        return _value_of(answer)

    def await_turn(self, rank: int) -> Answer:
        """Wait until a rank may run, and return the answer to its request.

        Args:
            rank: the rank.
        """
        self._turns[rank].acquire()
        answer = self._answers[rank]
        assert answer is not None, "a turn comes with an answer"
        return answer

    def start(self, rank: int, state: State) -> None:
        """Wait for the first turn of a rank, and give it its state.

        Args:
            rank: the rank.
            state: the state of its generators and its environment.
        """
        answer = self.await_turn(rank)
        self._last_runner = rank
        state.restore()
        # another rank may have failed before this rank began
        if answer.error is not None:
            raise answer.error

    def leave(self, rank: int, reason: str, *, failed: bool) -> None:
        """Record that a rank ends, and let others run.

        Args:
            rank: the rank.
            reason: the reason in words.
            failed: whether the others have to end too.
        """
        with self._lock:
            self._unfinished_ranks -= 1
            self.scheduler.leave(rank, reason, failed=failed)
            answers = self.scheduler.take_answers()
        self._hand_out(answers)

    def _hand_out(self, answers: Sequence[Answer]) -> None:
        """Give the ranks of the answers their turns."""
        for answer in answers:
            self._answers[answer.task.rank] = answer
            self._turns[answer.task.rank].release()


def _write_outputs(meeting: Meeting) -> None:
    """Write the outputs of all members, from the inputs of all members."""
    inputs: dict[int, Sequence[Tensor]] = {}
    outputs: dict[int, Sequence[Tensor]] = {}
    for member, ticket in meeting.tickets.items():
        inputs[member], outputs[member] = ticket.payload
    first = meeting.calls[0]
    if first.kind == "send":
        with torch.no_grad():
            copy_message(inputs[0], outputs[1])
        return
    totals = totals_of(first, inputs) if first.kind == "all_reduce" else ()
    for member, tensors in outputs.items():
        deliver(meeting.calls[member], tensors, inputs, totals)


def _value_of(answer: Answer) -> Any:
    """Return the value of an answer, or raise the error that the answer has in place of a value."""
    if answer.error is not None:
        raise answer.error
    return answer.value


@dataclass(eq=False, repr=False)
class ThreadLink(SchedulerLink):
    """The link of a rank on a thread.

    Attributes:
        conductor: the turns of all ranks.
    """

    conductor: Conductor

    def join(self, conductor: Conductor) -> None:
        """Take part in another run, whose collectives are counted from the start.

        Args:
            conductor: the turns of all ranks in that run.
        """
        self.conductor = conductor
        self._started.clear()

    def post(
        self, call: PostedCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> PendingCall:
        """Enter a call; see `SchedulerLink.post`."""
        ticket = Ticket(next_number(), RankTask(self.facts.rank), call, (inputs, outputs))
        self.conductor.used_groups.add(call.group.ranks)
        with self.conductor._lock:
            self.conductor.scheduler.post(ticket)
        return PendingCall(ticket.number, call, inputs, outputs, state=ticket)

    def wait(self, pending: PendingCall) -> None:
        """Let the other ranks run until a call is complete; see `SchedulerLink.wait`."""
        ticket: Ticket = pending.state
        scheduler = self.conductor.scheduler
        self.conductor.request(self.facts.rank, lambda task: scheduler.wait(task, ticket))
        settle(pending, ticket)

    def poll(self, pending: PendingCall) -> bool:
        """Return whether a call is complete; see `SchedulerLink.poll`."""
        ticket: Ticket = pending.state
        scheduler = self.conductor.scheduler
        is_complete: bool = self.conductor.request(
            self.facts.rank, lambda task: scheduler.poll(task, ticket)
        )
        return is_complete

    def ask_store(self, request: StoreRequest) -> Any:
        """Return the answer of the stores to a request; see `SchedulerLink.ask_store`."""
        scheduler = self.conductor.scheduler
        value = self.conductor.request(self.facts.rank, lambda task: scheduler.store(task, request))
        if isinstance(value, TimeoutError):
            raise value
        return value


def settle(pending: PendingCall, ticket: Ticket) -> None:
    """Record that the outputs of a call are written.

    Args:
        pending: the call.
        ticket: its ticket, which is complete.
    """
    pending.is_done = True
    pending.inputs = ()
    ticket.payload = None
    meeting = ticket.meeting
    if meeting is not None and pending.call.kind == "recv":
        pending.source = meeting.calls[0].rank


def run_on_threads(
    functions: Sequence[Callable[[], T]],
    links: Sequence[ThreadLink],
    states: Sequence[State] | None = None,
    threads: Executor | None = None,
) -> list[T]:
    """Return the results of functions that run on the ranks of a conductor.

    Args:
        functions: one for each rank.
        links: the links of the ranks, all of one conductor.
        states: the first state of each rank; the present state for all of them when left out.
        threads: an executor that runs all of the functions at a time; new threads for this call
            when left out.

    Raises:
        Exception: the exception of a rank that failed by itself, or else of one that waited.
    """
    conductor = links[0].conductor
    before = conductor.capture()
    first_states = [before] * len(links) if states is None else states

    def run(rank: int) -> T:
        outer = current_link()
        enter_thread(links[rank])
        failed = True
        reason = "has failed"
        try:
            conductor.start(rank, first_states[rank])
            result = functions[rank]()
            failed = False
            reason = "has returned"
            return result
        except BaseException as error:
            reason = f"raised {type(error).__name__}: {str(error)[:200]}"
            raise
        finally:
            enter_thread(outer)
            conductor.leave(rank, reason, failed=failed)

    pool = nullcontext(threads) if threads else ThreadPoolExecutor(len(functions))
    try:
        with pool as workers:
            futures = [workers.submit(run, rank) for rank in range(len(functions))]
            conductor.begin()
            wait(futures)
    finally:
        before.restore()
    # the exceptions of ranks that waited for a rank that failed come last
    for future in sorted(futures, key=lambda future: isinstance(future.exception(), PeerError)):
        future.result()
    return [future.result() for future in futures]
