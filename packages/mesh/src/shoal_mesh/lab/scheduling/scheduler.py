"""The scheduler of a lab: turns of ranks, meetings of collectives, and the order of both.

It is a state machine without threads, processes or clocks. The isolation of the lab (threads or
processes) reports the requests of its ranks (`post`, `wait`, `poll`, `store`, `leave`), and then
takes the answers that have become due (`take_answers`). A rank that has an open request does not
run until it has the answer.

A collective is complete when all members have posted it, in any order. Three things depend on the
order in which ranks arrive: the source of a receive from any rank, the value of a store, and an
answer to `is_completed`. They are decided when all ranks wait, so the decision is independent of
the speed of ranks. If all ranks wait and nothing can be decided, the ranks are in a deadlock.

The states of a rank, and the requests and answers between them:

    ready --- turn (take_answers) ---> running --- wait, poll, store ---> open
      ^                                   |                                 |
      |                                   +---------- leave ---> left       |
      +--- complete meeting, message, value of a store, answer to a poll ---+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from ...errors import DeadlockError, LockstepError, MeshError, PeerError
from .meetings import Answer, Meeting, OpenRequest, RankTask, Ticket, misfit_of
from .posted_calls import ANY, POINT_TO_POINT, GroupKey, PostedCall, disagreement
from .reports import RankReport, deadlock_text, mismatch_text, victim_text
from .store_request import StoreRequest

# So many polls (`is_completed`) in a row that return False, without progress of any rank, count as
# a deadlock.
MOST_VAIN_POLLS = 10_000


class MessageKey(NamedTuple):
    """The facts by which a send and a receive match.

    Attributes:
        group: the group.
        sender: index of the sender in the group; `ANY` for a receive from any rank.
        receiver: index of the receiver.
        tag: the tag.
    """

    group: GroupKey
    sender: int
    receiver: int
    tag: int


class Scheduler:
    """The state machine that decides which ranks run, and which calls meet.

    Args:
        size: number of ranks.
        seed: the seed of the random choices. A choice decides which rank continues, and is made
            each time that several ranks can.
        order: the first choices, in place of random ones.
        width: how many ranks run at a time; None for all.
        on_complete: called with each meeting that is complete.

    Attributes:
        choices: the choices so far; `order=choices` repeats the run.
        is_stuck: whether all main threads wait, and other threads of their ranks may help them.
        failure: the error with which all requests are answered from now on, or None.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        order: Sequence[int] = (),
        width: int | None = None,
        on_complete: Callable[[Meeting], None] | None = None,
    ) -> None:
        self.size = size
        self.choices: list[int] = []
        self.failure: BaseException | None = None
        self.is_stuck: bool = False
        self._random = Random(seed)
        self._order = deque(order)
        self._width = width or size
        # whether all requests that can be decided are decided together, and not one at a time
        self._decides_all = width is None and not order
        self._on_complete = on_complete or (lambda meeting: None)
        # values of all stores, by key
        self._stored: dict[str, bytes] = {}
        # collectives that are not complete, by group and number of the collective
        self._meetings: dict[tuple[GroupKey, int], Meeting] = {}
        # sends that are not received, and receives without a send
        self._messages: dict[MessageKey, deque[Ticket]] = {}
        self._receives: dict[MessageKey, deque[Ticket]] = {}
        self._open: dict[RankTask, OpenRequest] = {}
        # answers of ranks that wait for their turn; at first, every rank does
        self._ready: dict[RankTask, Answer] = {
            RankTask(rank): Answer(RankTask(rank)) for rank in range(size)
        }
        self._running: set[int] = set()
        # ranks that have ended, and the reasons in words
        self._left: dict[int, str] = {}
        # the last call of each rank
        self._last: dict[int, PostedCall] = {}
        # answers that `take_answers` returns next
        self._answers: list[Answer] = []
        self._vain_polls = 0
        # by rank, the number of its threads beside the main one
        self._other_threads: dict[int, int] = {}

    # --- requests -----------------------------------------------------------------------------

    def post(self, ticket: Ticket) -> None:
        """Add a call to the meeting of its collective, or match a message.

        Args:
            ticket: the call.
        """
        if self.failure is not None:
            return
        call = ticket.call
        self._last[ticket.task.rank] = call
        self._vain_polls = 0
        if call.kind in POINT_TO_POINT:
            self._post_message(ticket)
            return
        key = (call.group, call.number)
        meeting = self._meetings.setdefault(key, Meeting())
        ticket.meeting = meeting
        first = next(iter(meeting.calls.values()), call)
        meeting.calls[call.member] = call
        meeting.tickets[call.member] = ticket
        property_name = disagreement(first, call)
        if property_name:
            self.fail(LockstepError(*mismatch_text(property_name, [first, call], self._reports())))
            return
        if len(meeting.calls) == call.size:
            del self._meetings[key]
            self._complete(meeting)

    def _post_message(self, ticket: Ticket) -> None:
        """Match a send with a receive that names its source, or keep it."""
        call = ticket.call
        peer = ANY if call.peer is None else call.peer
        if call.kind == "send":
            key = MessageKey(call.group, call.member, peer, call.tag)
            receives = self._receives.get(key)
            if receives:
                self._pair(ticket, receives.popleft())
                return
            self._messages.setdefault(key, deque()).append(ticket)
        else:
            key = MessageKey(call.group, peer, call.member, call.tag)
            sends = self._messages.get(key)
            if sends:
                self._pair(sends.popleft(), ticket)
                return
            self._receives.setdefault(key, deque()).append(ticket)
        self._wake_threads()

    def _pair(self, send: Ticket, receive: Ticket) -> None:
        """Make the meeting of a send and a receive."""
        meeting = Meeting({0: send.call, 1: receive.call}, {0: send, 1: receive})
        send.meeting = meeting
        receive.meeting = meeting
        self._complete(meeting)

    def _complete(self, meeting: Meeting) -> None:
        """Complete a meeting, and make the ranks that wait for it ready."""
        problem = misfit_of(meeting)
        if problem:
            calls = list(meeting.calls.values())
            self.fail(LockstepError(*mismatch_text(problem, calls, self._reports())))
            return
        meeting.is_complete = True
        self._on_complete(meeting)
        if self.failure is not None:
            return
        for ticket in meeting.tickets.values():
            if ticket.waiter is not None:
                self._make_ready(ticket.waiter, ticket)

    def wait(self, task: RankTask, ticket: Ticket) -> None:
        """Open a request that is answered when a call is complete.

        Args:
            task: the thread that waits.
            ticket: the call.
        """
        self._request(task, OpenRequest("wait", ticket))

    def poll(self, task: RankTask, ticket: Ticket) -> None:
        """Open a request that is answered with whether a call is complete.

        Args:
            task: the thread that asks.
            ticket: the call.
        """
        self._request(task, OpenRequest("poll", ticket))

    def store(self, task: RankTask, request: StoreRequest) -> None:
        """Open a request to the stores of the lab.

        Args:
            task: the thread that asks.
            request: the request.
        """
        self._request(task, OpenRequest("store", None, request))

    def _request(self, task: RankTask, request: OpenRequest) -> None:
        """Open a request of a task, which ends the turn of a rank."""
        if self.failure is not None:
            self._answers.append(Answer(task, error=self.failure))
            return
        if task.thread == 0:
            self._running.discard(task.rank)
        self._open[task] = request
        ticket = request.ticket
        if request.kind == "wait" and ticket is not None:
            ticket.waiter = task
            if ticket.is_complete:
                self._make_ready(task, ticket)
                return
        if task.thread:
            # threads beside the main one run without turns, so the request is decided now
            self._decide(task)

    def leave(self, rank: int, reason: str, *, failed: bool = False) -> None:
        """Record that a rank ends.

        Args:
            rank: the global rank.
            reason: the reason in words, such as `has returned`.
            failed: whether the other ranks have to end too.
        """
        self._running.discard(rank)
        self._ready.pop(RankTask(rank), None)
        self._left[rank] = reason
        if failed and self.failure is None:
            self.fail(PeerError(*victim_text(rank, reason)))

    def leave_if_present(self, rank: int, reason: str) -> None:
        """Record that a rank has failed, unless it has left before.

        Args:
            rank: the global rank.
            reason: the reason in words.
        """
        if rank not in self._left:
            self.leave(rank, reason, failed=True)

    def count_threads(self, rank: int, threads: int) -> None:
        """Record how many threads beside the main one a rank has.

        Args:
            rank: the global rank.
            threads: their number.
        """
        self._other_threads[rank] = threads

    # --- answers ------------------------------------------------------------------------------

    def take_answers(self) -> list[Answer]:
        """Give turns, decide what depends on the order, and return the answers that are due."""
        while self.failure is None and not self._answers:
            self._give_turns()
            # If another thread of a running rank has an open request, the main thread may wait for
            # this thread, so the rank counts as waiting.
            ranks_with_waiting_threads = {task.rank for task in self._open if task.thread}
            if self._running - ranks_with_waiting_threads:
                break
            if not self._decide_when_all_wait():
                break
        answers = self._answers
        self._answers = []
        return answers

    def _make_ready(self, task: RankTask, value: object) -> None:
        """Close the request of a task with a value, which the task gets with its next turn."""
        ticket = self._open.pop(task).ticket
        if ticket is not None:
            ticket.waiter = None
        self._ready[task] = Answer(task, value)

    def _give_turns(self) -> None:
        """Give ready ranks their turns, as far as `width` allows; other threads need no turn."""
        threads = [task for task in self._ready if task.thread]
        for task in threads:
            self._answers.append(self._ready.pop(task))
        while self._ready and len(self._running) < self._width:
            free = self._width - len(self._running)
            ranks = [task.rank for task in self._ready]
            rank = ranks[0] if len(ranks) <= free else self._choose(ranks)
            if self.failure is not None:
                return
            self._running.add(rank)
            self._answers.append(self._ready.pop(RankTask(rank)))

    def _choose(self, ranks: Iterable[int]) -> int:
        """Return one of several ranks, as `order` or the seed decides."""
        candidates = sorted(set(ranks))
        if len(candidates) == 1:
            return candidates[0]
        if not self._order:
            chosen = self._random.choice(candidates)
        else:
            chosen = self._order.popleft()
            if chosen not in candidates:
                message = (
                    f"the order demands rank {chosen} as choice {len(self.choices) + 1}, where the "
                    f"ranks {candidates} can go on; orders are legal where each rank can"
                )
                self.fail(MeshError(message))
                return candidates[0]
        self.choices.append(chosen)
        return chosen

    def _decide_when_all_wait(self) -> bool:
        """Decide what depends on the order; return whether anything was decided."""
        waiting = [task for task in self._open if not task.thread]
        able = [task for task in waiting if self._can_decide(task)]
        if not able:
            able = [task for task in waiting if self._can_expire(task)]
        if not able:
            self._check_deadlock(waiting)
            return False
        while able and self.failure is None:
            rank = self._choose([task.rank for task in able])
            able = [task for task in able if task.rank != rank]
            # an earlier decision of this loop may have answered the request
            if RankTask(rank) in self._open:
                self._decide(RankTask(rank))
            if not self._decides_all:
                break
        return True

    def _check_deadlock(self, waiting: list[RankTask]) -> None:
        """Fail if no rank can continue, unless a thread beside the main ones still runs."""
        if not waiting or self._running:
            return
        threads = sum(self._other_threads.get(task.rank, 0) for task in waiting)
        blocked = sum(1 for task in self._open if task.thread)
        self.is_stuck = threads > blocked
        if not self.is_stuck:
            self.fail_stuck()

    def fail_stuck(self) -> None:
        """Fail all ranks because none can continue."""
        self.fail(DeadlockError(*deadlock_text(self._reports())))

    def _can_decide(self, task: RankTask) -> bool:
        request = self._open[task]
        if request.store is not None:
            return request.store.has_answer(self._stored)
        ticket = request.ticket
        assert ticket is not None, "a request has a ticket or a store"
        return request.kind == "poll" or bool(self._sources_of(ticket))

    def _can_expire(self, task: RankTask) -> bool:
        request = self._open[task].store
        return request is not None and request.expires

    def _decide(self, task: RankTask) -> None:
        """Answer a request that depends on the order, if it has an answer."""
        request = self._open[task]
        ticket = request.ticket
        if request.store is not None:
            self._decide_store(task, request.store)
        elif ticket is not None and request.kind == "poll":
            self._match_any(ticket)
            self._count_poll(ticket)
            if self.failure is None:
                self._make_ready(task, ticket.is_complete)
        elif ticket is not None:
            self._match_any(ticket)

    def _decide_store(self, task: RankTask, request: StoreRequest) -> None:
        if request.has_answer(self._stored):
            value = request.carry_out(self._stored)
            self._vain_polls = 0
            self._make_ready(task, value)
            self._wake_threads()
        elif not task.thread:
            self._make_ready(task, TimeoutError(request.text))

    def _wake_threads(self) -> None:
        """Answer requests of threads beside the main ones that a new value or message answers."""
        threads = [task for task in self._open if task.thread]
        for task in threads:
            # an earlier decision of this loop may have answered the request
            if task in self._open and self._can_decide(task):
                self._decide(task)

    def _count_poll(self, ticket: Ticket) -> None:
        """Count a poll that returns False, and fail after too many of them in a row."""
        if ticket.is_complete:
            self._vain_polls = 0
            return
        self._vain_polls += 1
        if self._vain_polls > MOST_VAIN_POLLS:
            self.fail_stuck()

    def _sources_of(self, receive: Ticket) -> list[int]:
        """Return the members that have sent a message which a receive from any rank can take."""
        call = receive.call
        if call.peer != ANY or receive.meeting is not None:
            return []
        key = MessageKey(call.group, ANY, call.member, call.tag)
        receives = self._receives.get(key)
        if not receives or receives[0] is not receive:
            return []
        return [
            other.sender
            for other, messages in self._messages.items()
            if messages and other._replace(sender=ANY) == key
        ]

    def _match_any(self, receive: Ticket) -> None:
        """Give a receive from any rank a message, if there is one."""
        senders = self._sources_of(receive)
        if not senders:
            return
        call = receive.call
        sender_by_rank = {call.group.ranks[sender]: sender for sender in senders}
        sender = sender_by_rank[self._choose(sender_by_rank)]
        if self.failure is not None:
            return
        key = MessageKey(call.group, ANY, call.member, call.tag)
        self._receives[key].popleft()
        send = self._messages[key._replace(sender=sender)].popleft()
        self._pair(send, receive)

    # --- failures -----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Answer all open requests, and all later ones, with an error.

        Args:
            error: the error.
        """
        if self.failure is not None:
            return
        self.failure = error
        self._answers += [Answer(task, error=error) for task in (*self._open, *self._ready)]
        self._open.clear()
        self._ready.clear()

    def _reports(self) -> list[RankReport]:
        """Return the state of each rank."""
        return [self._report(rank) for rank in range(self.size)]

    def _report(self, rank: int) -> RankReport:
        if rank in self._left:
            return RankReport(rank, self._left[rank], self._last.get(rank))
        request = self._open.get(RankTask(rank))
        if request is None:
            return RankReport(rank, "runs", self._last.get(rank))
        if request.store is not None:
            return RankReport(rank, f"waits for {request.store.text}", frames=request.store.frames)
        ticket = request.ticket
        assert ticket is not None, "a request has a ticket or a store"
        verb = "polls" if request.kind == "poll" else "waits in"
        return RankReport(rank, verb, ticket.call, missing=self._missing_ranks(ticket))

    def _missing_ranks(self, ticket: Ticket) -> tuple[int, ...]:
        """Return the global ranks that a call waits for."""
        call = ticket.call
        ranks = call.group.ranks
        if ticket.meeting is not None:
            arrived = ticket.meeting.calls
            return tuple(rank for member, rank in enumerate(ranks) if member not in arrived)
        if call.peer is None or call.peer == ANY:
            return ()
        return (ranks[call.peer],)
