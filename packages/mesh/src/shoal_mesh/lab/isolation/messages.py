"""Messages between ranks that are processes and the coordinator in their parent."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..scheduling.posted_calls import PostedCall
from ..scheduling.store_request import StoreRequest
from .arena import Packet

# Kinds of replies. INPUTS: the tensors of the members. REDUCE: the same, for the rank that has to
# reduce them for all. TOTALS: the reductions. VALUE: another value, or an error.
INPUTS, REDUCE, TOTALS, VALUE = range(4)


class Hello(NamedTuple):
    """The first message of a connection: each thread of a rank has its own."""

    rank: int
    thread: int


class Post(NamedTuple):
    """A call that a rank posts; it is answered only if the rank has several threads."""

    number: int
    call: PostedCall
    packet: Packet
    is_answered: bool


class WaitRequest(NamedTuple):
    """A request to wait for a call, or with `is_poll` a question whether it is complete.

    Attributes:
        number: the number of the call.
        is_poll: whether the answer is sent without waiting for the call.
        threads: the number of threads of the rank beside the one that asks.
    """

    number: int
    is_poll: bool
    threads: int


class Ask(NamedTuple):
    """A request to the stores."""

    request: StoreRequest
    threads: int


class Totals(NamedTuple):
    """The reductions of an `all_reduce`, from the rank that computes them."""

    number: int
    packet: Packet


class Read(NamedTuple):
    """Calls whose tensors a rank has read."""

    numbers: tuple[int, ...]


class Leave(NamedTuple):
    """The end of a rank."""

    reason: str
    failed: bool


class Reply(NamedTuple):
    """The answer to a request.

    Attributes:
        kind: `INPUTS`, `REDUCE`, `TOTALS` or `VALUE`.
        value: packets by member, a packet, or the value.
        freed: extents of this rank that all others have read.
        error: the exception to raise instead.
        source: for a message, the rank that has sent it.
    """

    kind: int
    value: Any = None
    freed: tuple[int, ...] = ()
    error: BaseException | None = None
    source: int | None = None
