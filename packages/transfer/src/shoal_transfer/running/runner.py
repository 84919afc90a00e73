"""The runner of a program: packs, sends, receives and compares digests, step by step.

A step fills views with values, copies inside the process, and exchanges messages. Then it copies
elements that have arrived to further places in this process. At the end all ranks compare the
digests of the elements that were sent and that arrived.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransferError
from .messages import Incoming, Outgoing, apply_delta, as_integers, digest_of, encode_delta
from .program import Exchange, ProgramStep
from .wires import Wire


@dataclass(slots=True)
class Counts:
    """Bytes that this rank has sent, and bytes that it would have sent without deltas."""

    sent: int = 0
    whole: int = 0


class _MessageKey(NamedTuple):
    """One message of a run.

    Attributes:
        sender: the member that sends it.
        receiver: the member that receives it.
        place: a number for each exchange of the run, see `_place_of`.
    """

    sender: int
    receiver: int
    place: int


class _RunnerReport(NamedTuple):
    """The facts about a run that one member sends to all members.

    Attributes:
        sent: digests of the messages that the member has sent.
        arrived: digests of the messages to the member, computed from its memory at the end.
        overwritten: names of target tensors in which a local copy or fill was overwritten.
    """

    sent: dict[_MessageKey, int]
    arrived: dict[_MessageKey, int]
    overwritten: list[str]


class Runner:
    """Runs programs over a wire; buffers are kept from one run to the next.

    Args:
        wire: the link between the members.
        digests: whether digests are compared at the end of a run.
        deltas: whether the elements that were sent are kept, for a delta at the next run.
    """

    def __init__(self, wire: Wire, *, digests: bool, deltas: bool) -> None:
        self._wire = wire
        self._digests = digests
        self._deltas = deltas
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._reads_are_over = threading.Event()
        self._reads_are_over.set()

    def begin_reading(self) -> None:
        """Note that the source's weights are being read."""
        self._reads_are_over.clear()

    def finish_reading(self) -> None:
        """Note that the source's weights have been read."""
        self._reads_are_over.set()

    def wait_for_reads(self) -> None:
        """Wait until the source's weights have been read."""
        self._reads_are_over.wait()

    @torch.no_grad()
    def run(
        self, steps: list[ProgramStep], is_delta: bool, *, targets_overlap: bool = False
    ) -> Counts:
        """Run a program.

        A receiver computes its digests when everything is written, from the elements that its
        memory holds then. If a later message has overwritten elements of an earlier one, the digest
        of the earlier message differs from the sender's digest, so the comparison finds it.

        Args:
            steps: the program of this rank.
            is_delta: whether only elements that have changed since the last run are sent. Both
                sides must have the elements of the last run.
            targets_overlap: whether target tensors of this rank share memory. Elements that are
                copied and filled inside this process are then compared at the end, too.

        Raises:
            TransferError: the elements that arrived differ from the elements that were sent.
        """
        counts = Counts()
        sent = dict[_MessageKey, int]()
        for number, step in enumerate(steps):
            for view, value in step.fills:
                view.fill_(value)
            for target, source in step.copies:
                target.copy_(source)
            for index, exchange in enumerate(step.exchanges):
                place = _place_of(number, index)
                flats = self._pack(exchange, step.dtype)
                # After the last exchange is packed, all elements of the source are in buffers. But
                # if targets overlap, the comparison at the end reads the source again. In this
                # case, and if the last step has no exchange, the caller of `run` finishes the
                # reading.
                is_last = step is steps[-1] and exchange is step.exchanges[-1]
                if is_last and not targets_overlap:
                    self.finish_reading()
                self._note_sent(sent, exchange, flats, place)
                if is_delta:
                    self._exchange_deltas(exchange, flats, counts)
                else:
                    self._exchange_whole(exchange, flats, step.dtype, counts)
            # The sources are elements that have just arrived.
            for target, source in step.repeats:
                target.copy_(source)
        if self._digests:
            overwritten = _overwritten(steps) if targets_overlap else []
            arrived = self._digests_in_memory(steps)
            self._compare_digests(steps, _RunnerReport(sent, arrived, overwritten))
        return counts

    def _pack(self, exchange: Exchange, dtype: torch.dtype) -> list[Tensor]:
        """Return the elements of each outgoing message, as slices of one buffer."""
        sizes = [outgoing.elements for outgoing in exchange.outgoing]
        flats = self._buffer("sends", sizes, dtype, _device_of(exchange))
        for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
            outgoing.pack(flat)
        return flats

    def _note_sent(
        self, sent: dict[_MessageKey, int], exchange: Exchange, flats: list[Tensor], place: int
    ) -> None:
        if not self._digests:
            return
        for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
            sent[_MessageKey(self._wire.member, outgoing.member, place)] = digest_of(flat)

    def _digests_in_memory(self, steps: list[ProgramStep]) -> dict[_MessageKey, int]:
        """Return digests of all elements that arrived, as the memory holds them now."""
        arrived = dict[_MessageKey, int]()
        for number, step in enumerate(steps):
            for index, exchange in enumerate(step.exchanges):
                place = _place_of(number, index)
                for incoming in exchange.incoming:
                    key = _MessageKey(incoming.member, self._wire.member, place)
                    arrived[key] = digest_of(incoming.read())
        return arrived

    def _exchange_whole(
        self, exchange: Exchange, flats: list[Tensor], dtype: torch.dtype, counts: Counts
    ) -> None:
        """Send all elements."""
        device = _device_of(exchange)
        # Both lists begin with the same empty message for each member: nothing is written to it.
        # The messages of this exchange replace some of them below.
        sends = [torch.empty(0, dtype=dtype, device=device) for _ in range(self._wire.size)]
        receives = list(sends)
        for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
            sends[outgoing.member] = flat
            counts.sent += flat.nbytes
            counts.whole += flat.nbytes
        sizes = [incoming.elements for incoming in exchange.incoming]
        arrivals = self._buffer("receives", sizes, dtype, device)
        for incoming, arrival in zip(exchange.incoming, arrivals, strict=True):
            receives[incoming.member] = arrival
        self._wire.exchange(sends, receives)
        for incoming in exchange.incoming:
            incoming.write(receives[incoming.member])
        if self._deltas:
            for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
                _keep(outgoing, flat)

    def _exchange_deltas(self, exchange: Exchange, flats: list[Tensor], counts: Counts) -> None:
        """Send the changed elements, or all elements if they are fewer bytes.

        A first exchange sends the size of each message, and whether it is a delta.
        """
        device = _device_of(exchange)
        payloads = [
            torch.empty(0, dtype=torch.uint8, device=device) for _ in range(self._wire.size)
        ]
        headers = [torch.zeros(2, dtype=torch.int64, device=device) for _ in payloads]
        for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
            assert outgoing.last is not None, "the last run kept the elements that it sent"
            encoded = encode_delta(flat, outgoing.last)
            payloads[outgoing.member] = flat.view(torch.uint8) if encoded is None else encoded
            header = [payloads[outgoing.member].numel(), int(encoded is not None)]
            headers[outgoing.member] = torch.tensor(header, device=device)
            counts.sent += payloads[outgoing.member].numel()
            counts.whole += flat.nbytes
        received = [torch.zeros(2, dtype=torch.int64, device=device) for _ in payloads]
        self._wire.exchange(headers, received)
        sizes = [int(header[0]) for header in received]
        arrivals = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._wire.exchange(payloads, arrivals)
        for incoming in exchange.incoming:
            payload = arrivals[incoming.member]
            is_encoded = bool(received[incoming.member][1])
            if is_encoded:
                # The memory still holds the elements of the last run, which the delta changes. They
                # are cloned, because `read` may return a view of the memory.
                last = incoming.read().clone()
                incoming.write(apply_delta(payload, last))
            else:
                incoming.write(payload.view(incoming.dtype))
        for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
            _keep(outgoing, flat)

    def _buffer(
        self, purpose: str, sizes: list[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Return flat tensors of these sizes in one buffer, the same at each run.

        They are adjacent in the order of `sizes`. The messages of an exchange are listed by member,
        so an all-to-all sends the buffer without a copy.
        """
        nbytes = sum(sizes) * dtype.itemsize
        key = (purpose, device)
        if key not in self._buffers or self._buffers[key].numel() < nbytes:
            self._buffers[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        buffer = self._buffers[key][:nbytes].view(dtype)
        return list(torch.split(buffer, sizes))

    def _compare_digests(self, steps: list[ProgramStep], own_report: _RunnerReport) -> None:
        """Raise on all ranks if some message arrived with another digest, or was overwritten."""
        reports: list[_RunnerReport] = self._wire.gather(own_report)
        for member, report in enumerate(reports):
            if report.overwritten:
                raise TransferError(
                    f"target tensors of member {member} share memory and get different elements; "
                    f"they are among {', '.join(report.overwritten)}"
                )
        digest_of_sender = dict[_MessageKey, int]()
        for report in reports:
            digest_of_sender.update(report.sent)
        wrong = list[_MessageKey]()
        for report in reports:
            for key, digest in report.arrived.items():
                if digest_of_sender.get(key) != digest:
                    wrong.append(key)
        if wrong:
            earliest = min(wrong, key=lambda key: key.place)
            # A program has a step for each round of the plan, so step `n` is the same round on all
            # ranks.
            step = steps[_step_of(earliest.place)]
            names = ", ".join(dict.fromkeys(step.names))
            raise TransferError(
                f"elements from member {earliest.sender} to member {earliest.receiver} arrived "
                f"with a different digest; the tensors are {names}"
            )


def _place_of(step: int, exchange: int) -> int:
    """Return a number that differs for all exchanges of a run.

    A step has at most two exchanges. For example, exchange 1 of step 3 has place 7.
    """
    return 2 * step + exchange


def _step_of(place: int) -> int:
    """Return the step of an exchange."""
    return place // 2


def _overwritten(steps: list[ProgramStep]) -> list[str]:
    """Return the target tensors of the steps in which a local copy or fill was overwritten.

    Sources must have the elements that were copied, so this runs before the reading is finished.
    """
    names = dict[str, None]()
    for step in steps:
        pairs = [*step.copies, *step.repeats]
        for view, value in step.fills:
            pairs.append((view, torch.full_like(view, value)))
        for target, source in pairs:
            expected = source.to(target.dtype).reshape(-1)
            if not torch.equal(as_integers(target.reshape(-1)), as_integers(expected)):
                names.update(dict.fromkeys(step.names))
    return list(names)


def _keep(outgoing: Outgoing, flat: Tensor) -> None:
    """Keep the elements that the receiver has now, for a delta at the next run."""
    if outgoing.last is None:
        outgoing.last = flat.clone()
    else:
        outgoing.last.copy_(flat)


def _device_of(exchange: Exchange) -> torch.device:
    messages: list[Outgoing | Incoming] = [*exchange.outgoing, *exchange.incoming]
    return messages[0].blocks[0].device if messages else torch.device("cpu")
