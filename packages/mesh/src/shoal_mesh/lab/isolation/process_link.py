"""The link of a rank that is a process: it sends requests to the coordinator in the parent.

Each thread of the rank has its own connection. The tensors of calls are in the arena.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
from torch import Tensor

from ..c10d.link import PendingCall, RankFacts, SchedulerLink
from ..c10d.values import copy_message, deliver, totals_of
from ..scheduling.posted_calls import Meta, PostedCall
from ..scheduling.store_request import StoreRequest
from .arena import Arena, Packet
from .messages import (
    REDUCE,
    TOTALS,
    VALUE,
    Ask,
    Hello,
    Leave,
    Post,
    Read,
    Reply,
    Totals,
    WaitRequest,
)


class ProcessLink(SchedulerLink):
    """The link of a rank that is a process.

    Args:
        facts: the place of the rank.
        address: the path of the coordinator's socket.
        files: the paths of the files of all ranks.
    """

    def __init__(self, facts: RankFacts, address: str, files: Sequence[str]) -> None:
        super().__init__(facts)
        self._address = address
        self._arena = Arena(facts.rank, files)
        # a thread may allocate while another one frees
        self._lock = threading.Lock()
        self._numbers = count()
        self._threads = count()
        self._of_this_thread = threading.local()
        # wait for the first turn of this rank
        self._receive()

    def post(
        self, call: PostedCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> PendingCall:
        """Enter a call; see `SchedulerLink.post`."""
        with torch.no_grad(), self._lock:
            packet = self._arena.write(call.inputs, inputs)
        pending = PendingCall(next(self._numbers), call, inputs, outputs)
        # Another thread may wait for the call through its own connection, which may be faster, so
        # this thread waits until the coordinator has the call.
        is_answered = threading.active_count() > 1
        self._connection().send(Post(pending.number, call, packet, is_answered))
        if is_answered:
            self._receive()
        return pending

    def wait(self, pending: PendingCall) -> None:
        """Wait for the coordinator, and write the outputs of a call; see `SchedulerLink.wait`."""
        self._connection().send(WaitRequest(pending.number, False, _other_threads()))
        reply = self._receive()
        if reply.kind == TOTALS:
            with self._arena.read(reply.value) as totals:
                deliver(pending.call, pending.outputs, {}, [*totals.values()])
        else:
            self._read_inputs(pending, reply)
        if pending.outputs:
            self._connection().send(Read((pending.number,)))
        pending.is_done = True
        pending.inputs = ()
        pending.source = reply.source

    def _read_inputs(self, pending: PendingCall, reply: Reply) -> None:
        """Compute the outputs of a call from the inputs of the members, and write them."""
        packets: Mapping[int, list[Packet]] = pickle.loads(reply.value)
        call = pending.call
        with ExitStack() as stack:
            needed = packets if pending.outputs else {}
            inputs: dict[int, dict[int, Tensor]] = {}
            for member, packets_of_member in needed.items():
                inputs[member] = {}
                for packet in packets_of_member:
                    inputs[member] |= stack.enter_context(self._arena.read(packet))
            if call.kind == "recv":
                with torch.no_grad():
                    copy_message([*inputs[0].values()], pending.outputs)
                return
            totals = totals_of(call, inputs) if call.kind == "all_reduce" else []
            if reply.kind == REDUCE:
                self._publish(pending.number, totals)
            deliver(call, pending.outputs, inputs, totals)

    def _publish(self, number: int, totals: Sequence[Tensor]) -> None:
        """Give the reductions of an `all_reduce` to the other ranks."""
        with torch.no_grad(), self._lock:
            packet = self._arena.write(tuple(map(Meta.of, totals)), totals)
        self._connection().send(Totals(number, packet))

    def poll(self, pending: PendingCall) -> bool:
        """Return whether a call is complete; see `SchedulerLink.poll`."""
        self._connection().send(WaitRequest(pending.number, True, _other_threads()))
        return bool(self._receive().value)

    def ask_store(self, request: StoreRequest) -> Any:
        """Return the answer of the stores to a request; see `SchedulerLink.ask_store`."""
        self._connection().send(Ask(request, _other_threads()))
        value = self._receive().value
        if isinstance(value, TimeoutError):
            raise value
        return value

    def leave(self, reason: str, *, failed: bool) -> None:
        """Record that this rank ends.

        Args:
            reason: the reason in words.
            failed: whether the other ranks have to end too.
        """
        self._connection().send(Leave(reason, failed))

    def _receive(self) -> Reply:
        """Return the answer to the request of this thread, or raise its error."""
        reply: Reply = self._connection().recv()
        with self._lock:
            self._arena.free(reply.freed)
        if reply.kind == VALUE and reply.error is not None:
            raise reply.error
        return reply

    def _connection(self) -> Connection:
        """Return the connection of this thread; the first thread is the main one."""
        connection: Connection | None = getattr(self._of_this_thread, "connection", None)
        if connection is None:
            connection = Client(self._address, family="AF_UNIX")
            connection.send(Hello(self.facts.rank, next(self._threads)))
            self._of_this_thread.connection = connection
        return connection


def _other_threads() -> int:
    """Return the number of threads of this process beside the calling one."""
    return threading.active_count() - 1
