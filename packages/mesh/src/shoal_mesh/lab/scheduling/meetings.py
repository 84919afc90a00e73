"""Records of the scheduler: tickets, meetings, open requests and answers.

A rank posts a call and gets a ticket for it. The calls of all members of a collective form a
meeting, which is complete when all have arrived. A request, such as to wait for a ticket, is open
until the scheduler has an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from .posted_calls import PostedCall, misfit
from .store_request import StoreRequest


class RankTask(NamedTuple):
    """A thread of a rank.

    Attributes:
        rank: the global rank.
        thread: 0 for the main thread; other threads take no turns.
    """

    rank: int
    thread: int = 0


@dataclass(slots=True, eq=False)
class Meeting:
    """A collective or a message, with the calls that have arrived.

    Attributes:
        calls: the calls, by index in the group; a message has the sender as 0, the receiver as 1.
        tickets: the tickets of the calls, by the same index.
        is_complete: whether all members have arrived.
        totals: the reductions of an `all_reduce`, if ranks are processes and one has computed them.
        reducer: the task that computes these reductions, or None.
    """

    calls: dict[int, PostedCall] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    is_complete: bool = False
    totals: Any = None
    reducer: RankTask | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A posted call of one rank.

    Attributes:
        number: the number that the rank gave the call.
        task: the thread that posted it.
        call: the call.
        payload: its tensors: themselves if ranks are threads, a `Packet` if ranks are processes.
        meeting: the meeting that the call is part of; None for a message without its other end.
        waiter: the thread that waits for the call.
    """

    number: int
    task: RankTask
    call: PostedCall
    payload: Any
    meeting: Meeting | None = None
    waiter: RankTask | None = None

    @property
    def is_complete(self) -> bool:
        """True if the calls of all members have arrived."""
        return self.meeting is not None and self.meeting.is_complete


class Answer(NamedTuple):
    """The answer to an open request.

    Attributes:
        task: the thread that waits for it.
        value: a Ticket that is complete, a bool, the value of a store, or None.
        error: the exception to raise instead.
    """

    task: RankTask
    value: Any = None
    error: BaseException | None = None


class OpenRequest(NamedTuple):
    """An open request of a task: a ticket to wait for or to poll, or a request to the stores.

    Attributes:
        kind: `wait`, `poll` or `store`.
        ticket: the ticket to wait for or to poll.
        store: the request to the stores.
    """

    kind: str
    ticket: Ticket | None = None
    store: StoreRequest | None = None


def misfit_of(meeting: Meeting) -> str:
    """Describe tensors of a complete meeting that do not fit each other, or return ''."""
    send = meeting.calls[0]
    if send.kind != "send":
        return misfit(meeting.calls)
    receive = meeting.calls[1]
    for sent, received in zip(send.inputs, receive.outputs, strict=True):
        if (sent.numel, sent.dtype) != (received.numel, received.dtype):
            return (
                f"rank {receive.rank} expects {received} from rank {send.rank}, which sends {sent}"
            )
    return ""


_TICKETS = count()


def next_number() -> int:
    """Return a number for a ticket that no other ticket of this process has."""
    return next(_TICKETS)
