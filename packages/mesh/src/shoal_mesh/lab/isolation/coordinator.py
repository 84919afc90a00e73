"""The coordinator: the scheduler of ranks that are processes, on a thread of their parent.

Ranks connect through a socket in a folder of their pool. A rank posts its calls without waiting,
and gets an answer to each request that has to wait. The tensors are in the arena (`arena.py`). The
coordinator passes on their places, and does not read them.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from ..scheduling.meetings import Answer, Meeting, RankTask, Ticket
from ..scheduling.posted_calls import sources_of
from ..scheduling.scheduler import Scheduler
from .arena import Extent, Packet
from .messages import (
    INPUTS,
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

# collectives in which a member brings an input for each other member
_ONE_FOR_EACH = frozenset({"reduce_scatter", "all_to_all", "scatter"})
# A rank that reads at most so many bytes for an `all_reduce` computes the reductions itself. If one
# rank computes them for the others, they wait for two more messages.
_MOST_REDUCED = 1 << 20
# seconds that other threads of ranks have to end the wait of all main threads
_GRACE = 10.0


class Coordinator:
    """A thread that answers the requests of ranks until `close`.

    Args:
        path: the path of the socket, which the coordinator creates.
        size: number of ranks.
        seed: the seed of the random choices of the scheduler.
        order: the first choices, in place of random ones; ranks then run one at a time.

    Attributes:
        scheduler: the scheduler of the ranks.
    """

    def __init__(self, path: str, size: int, *, seed: int = 0, order: Sequence[int] = ()) -> None:
        width = 1 if order else None
        self.scheduler = Scheduler(
            size, seed=seed, order=order, width=width, on_complete=self._note_readers
        )
        self._listener = Listener(path, family="AF_UNIX", backlog=max(size, 16))
        # a pipe: `close` writes to it to end the thread
        self._wake_reader, self._wake_writer = os.pipe()
        # registered once: to register 64 connections for each message takes ten times as long
        self._selector = DefaultSelector()
        self._connections: dict[Connection, RankTask] = {}
        self._connection_of: dict[RankTask, Connection] = {}
        # by rank and number of the call
        self._tickets: dict[tuple[int, int], Ticket] = {}
        # the members that have not read the tensors of a meeting
        self._unread: dict[Meeting, set[int]] = {}
        # the pickled packets of all members of a meeting
        self._packed: dict[Meeting, bytes] = {}
        # tasks that wait for the reductions of a meeting
        self._held: dict[Meeting, list[RankTask]] = {}
        # the first turns of ranks that have not connected yet
        self._unsent: dict[RankTask, Reply] = {}
        # by rank: extents of its file that all readers have read
        self._freed: dict[int, list[int]] = defaultdict(list)
        self._thread = threading.Thread(
            target=self._serve_or_hang_up, name="shoal_lab", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the socket and its connections."""
        os.write(self._wake_writer, b"x")
        self._thread.join()
        for connection in list(self._connections):
            connection.close()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _serve_or_hang_up(self) -> None:
        """Serve ranks; an error ends their connections, so that none of them waits for ever."""
        try:
            self._serve()
        except BaseException:
            for connection in self._connections:
                connection.close()
            raise

    def _serve(self) -> None:
        # There is no public way to wait for a connection.
        socket: Any = self._listener._listener._socket  # type: ignore[attr-defined]  # private
        self._selector.register(self._wake_reader, EVENT_READ)
        self._selector.register(socket, EVENT_READ)
        while True:
            timeout = _GRACE if self.scheduler.is_stuck else None
            ready = [key.fileobj for key, _ in self._selector.select(timeout)]
            if self._wake_reader in ready:
                return
            # the time is over in which other threads could have ended the wait of the main threads
            if not ready:
                self.scheduler.fail_stuck()
            self.scheduler.is_stuck = False
            for source in ready:
                if source is socket:
                    self._accept()
                elif isinstance(source, Connection):
                    self._receive(source)
            self._send_answers()

    # --- requests -----------------------------------------------------------------------------

    def _accept(self) -> None:
        connection = self._listener.accept()
        hello: Hello = connection.recv()
        task = RankTask(hello.rank, hello.thread)
        self._connections[connection] = task
        self._connection_of[task] = connection
        self._selector.register(connection, EVENT_READ)
        reply = self._unsent.pop(task, None)
        if reply is not None:
            self._send(task, reply)

    def _receive(self, connection: Connection) -> None:
        task = self._connections[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._drop(connection)
            return
        match message:
            case Post():
                self._post(task, message)
            case WaitRequest():
                self._wait(task, message)
            case Ask():
                self.scheduler.count_threads(task.rank, message.threads)
                self.scheduler.store(task, message.request)
            case Totals():
                self._take_totals(task.rank, message)
            case Read():
                for number in message.numbers:
                    self._note_read(task.rank, number)
            case Leave():
                self.scheduler.leave(task.rank, message.reason, failed=message.failed)

    def _drop(self, connection: Connection) -> None:
        """Forget a connection; a main thread that has not left has died."""
        task = self._connections.pop(connection)
        self._connection_of.pop(task, None)
        self._selector.unregister(connection)
        connection.close()
        if task.thread == 0:
            self.scheduler.leave_if_present(task.rank, "has died")

    def _post(self, task: RankTask, message: Post) -> None:
        ticket = Ticket(message.number, task, message.call, message.packet)
        self._tickets[task.rank, message.number] = ticket
        self.scheduler.post(ticket)
        if message.is_answered:
            self._send(task, Reply(VALUE))

    def _wait(self, task: RankTask, message: WaitRequest) -> None:
        self.scheduler.count_threads(task.rank, message.threads)
        ticket = self._tickets[task.rank, message.number]
        if message.is_poll:
            self.scheduler.poll(task, ticket)
        else:
            self.scheduler.wait(task, ticket)

    # --- tensors that ranks have read ----------------------------------------------------------

    def _note_readers(self, meeting: Meeting) -> None:
        """Record the members that will read the tensors of a complete meeting."""
        readers = {member for member, call in meeting.calls.items() if call.outputs}
        self._unread[meeting] = readers
        if not readers:
            self._free(meeting)

    def _note_read(self, rank: int, number: int) -> None:
        """Record that a rank has read the tensors for its call; free them after the last reader."""
        ticket = self._tickets.pop((rank, number))
        meeting = ticket.meeting
        assert meeting is not None, "a call that is read has met the others"
        unread = self._unread.get(meeting)
        if unread is None:
            return
        unread -= {member for member, other in meeting.tickets.items() if other is ticket}
        if not unread:
            self._free(meeting)

    def _free(self, meeting: Meeting) -> None:
        """Have the owners of a meeting's tensors free them."""
        del self._unread[meeting]
        self._packed.pop(meeting, None)
        packets = [ticket.payload for ticket in meeting.tickets.values()]
        if meeting.totals is not None:
            packets.append(meeting.totals)
        for packet in packets:
            if isinstance(packet.data, Extent):
                self._freed[packet.data.rank].append(packet.data.offset)

    # --- answers ------------------------------------------------------------------------------

    def _send_answers(self) -> None:
        """Send the answers that are due, and the error to tasks that wait for reductions."""
        while answers := self.scheduler.take_answers():
            for answer in answers:
                self._send_answer(answer)
        failure = self.scheduler.failure
        if failure is not None:
            for tasks in self._held.values():
                for task in tasks:
                    self._send(task, Reply(VALUE, error=failure))
            self._held.clear()

    def _send_answer(self, answer: Answer) -> None:
        task = answer.task
        if answer.error is not None:
            self._send(task, Reply(VALUE, error=answer.error))
        elif not isinstance(answer.value, Ticket):
            # the first turn of a rank is given without a request
            self._send(task, Reply(VALUE, answer.value))
        elif answer.value.call.kind == "all_reduce":
            self._send_all_reduce(task, answer.value)
        elif answer.value.call.kind in _ONE_FOR_EACH:
            self._send_own_inputs(task, answer.value)
        else:
            self._send_inputs(task, answer.value, INPUTS)

    def _send_own_inputs(self, task: RankTask, ticket: Ticket) -> None:
        """Send, of the inputs of each member, only the one that the member with this ticket needs.

        A member without outputs needs none.
        """
        meeting = ticket.meeting
        assert meeting is not None, "a complete call has met the others"
        packets: dict[int, list[Packet]] = {}
        for number in range(len(ticket.call.outputs)):
            for source in sources_of(ticket.call, number):
                packet: Packet = meeting.tickets[source.member].payload
                packets.setdefault(source.member, []).append(packet.tensor(source.position))
        self._send(task, Reply(INPUTS, pickle.dumps(packets)))

    def _send_all_reduce(self, task: RankTask, ticket: Ticket) -> None:
        """Send reductions, or have the first rank that waits compute them for all ranks.

        Every rank reduces small tensors itself.
        """
        meeting = ticket.meeting
        assert meeting is not None, "a complete call has met the others"
        read_bytes = sum(other.payload.length for other in meeting.tickets.values())
        if read_bytes <= _MOST_REDUCED:
            self._send_inputs(task, ticket, INPUTS)
        elif meeting.totals is not None:
            self._send(task, Reply(TOTALS, meeting.totals))
        elif meeting.reducer is not None:
            self._held.setdefault(meeting, []).append(task)
        else:
            meeting.reducer = task
            self._send_inputs(task, ticket, REDUCE)

    def _take_totals(self, rank: int, message: Totals) -> None:
        """Send the reductions that a rank has computed to the ranks that wait for them."""
        meeting = self._tickets[rank, message.number].meeting
        assert meeting is not None, "reductions follow a meeting"
        meeting.totals = message.packet
        for task in self._held.pop(meeting, []):
            self._send(task, Reply(TOTALS, message.packet))

    def _send_inputs(self, task: RankTask, ticket: Ticket, kind: int) -> None:
        """Send the inputs of all members."""
        meeting = ticket.meeting
        assert meeting is not None, "a complete call has met the others"
        source = meeting.calls[0].rank if meeting.calls[0].kind == "send" else None
        packed = self._packed.get(meeting)
        if packed is None:
            packets: dict[int, list[Packet]] = {
                member: [other.payload] for member, other in meeting.tickets.items()
            }
            packed = pickle.dumps(packets)
            self._packed[meeting] = packed
        self._send(task, Reply(kind, packed, source=source))

    def _send(self, task: RankTask, reply: Reply) -> None:
        connection = self._connection_of.get(task)
        if connection is None:
            # the first turn of a rank that has not connected yet
            self._unsent[task] = reply
            return
        freed = tuple(self._freed.pop(task.rank, ()))
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(reply._replace(freed=freed)))
