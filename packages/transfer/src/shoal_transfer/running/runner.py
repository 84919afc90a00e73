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

    A step has at most two exchanges. Twice the number of the step, plus the index of the exchange
    in the step, is therefore a different `place` for each exchange.
    """

    sender: int
    receiver: int
    place: int


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
        memory holds then. An element that a later message has overwritten changes the digest of its
        own message, so the comparison with the sender's digest finds it.

        Args:
            steps: the program of this rank.
            is_delta: whether both sides have the elements of the last run.
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
            for stage, exchange in enumerate(step.exchanges):
                place = 2 * number + stage
                flats = self._pack(exchange, step.dtype)
                # After the last exchange is packed, all elements of the source are in buffers. If
                # the last step has no exchange, the caller of `run` finishes the reading.
                is_last = step is steps[-1] and exchange is step.exchanges[-1]
                if is_last and not targets_overlap:
                    self.finish_reading()
                self._note_sent(sent, exchange, flats, place)
                if is_delta:
                    self._exchange_deltas(exchange, flats, counts)
                else:
                    self._exchange_whole(exchange, flats, step.dtype, counts)
            for target, source in step.repeats:
                target.copy_(source)
        if self._digests:
            overwritten = _overwritten(steps) if targets_overlap else []
            self._compare_digests(steps, sent, self._digests_in_memory(steps), overwritten)
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
            for stage, exchange in enumerate(step.exchanges):
                place = 2 * number + stage
                for incoming in exchange.incoming:
                    key = _MessageKey(incoming.member, self._wire.member, place)
                    arrived[key] = digest_of(incoming.read())
        return arrived

    def _exchange_whole(
        self, exchange: Exchange, flats: list[Tensor], dtype: torch.dtype, counts: Counts
    ) -> None:
        """Send all elements."""
        device = _device_of(exchange)
        sends = [torch.empty(0, dtype=dtype, device=device) for _ in range(self._wire.size)]
        # Both lists begin with an empty message for each member. The messages of this exchange
        # replace some of them below.
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
            assert outgoing.last is not None, "both sides have the elements of the last run"
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
            if bool(received[incoming.member][1]):
                incoming.write(apply_delta(payload, incoming.read().clone()))
            else:
                incoming.write(payload.view(incoming.dtype))
        for outgoing, flat in zip(exchange.outgoing, flats, strict=True):
            _keep(outgoing, flat)

    def _buffer(
        self, purpose: str, sizes: list[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Return flat tensors of these sizes in one buffer, the same at each run.

        They are adjacent in the order of members, so that an all-to-all does not copy them.
        """
        nbytes = sum(sizes) * dtype.itemsize
        key = (purpose, device)
        if key not in self._buffers or self._buffers[key].numel() < nbytes:
            self._buffers[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        buffer = self._buffers[key][:nbytes].view(dtype)
        return list(torch.split(buffer, sizes))

    def _compare_digests(
        self,
        steps: list[ProgramStep],
        sent: dict[_MessageKey, int],
        arrived: dict[_MessageKey, int],
        overwritten: list[str],
    ) -> None:
        """Raise on all ranks if some message arrived with another digest, or was overwritten."""
        of_members = self._wire.gather((sent, arrived, overwritten))
        for member, (_, _, names) in enumerate(of_members):
            if names:
                raise TransferError(
                    f"target tensors of member {member} share memory and get different elements; "
                    f"they are among {', '.join(names)}"
                )
        # the digests that all members have sent, by message
        of_senders = {key: digest for of_one, _, _ in of_members for key, digest in of_one.items()}
        wrong = []
        for _, of_receiver, _ in of_members:
            # the messages for which the receiver has another digest than the sender
            wrong += [key for key, digest in of_receiver.items() if of_senders.get(key) != digest]
        if wrong:
            earliest = min(wrong, key=lambda key: key.place)
            names = ", ".join(dict.fromkeys(steps[earliest.place // 2].names))
            raise TransferError(
                f"elements from member {earliest.sender} to member {earliest.receiver} arrived "
                f"with a different digest; the tensors are {names}"
            )


def _overwritten(steps: list[ProgramStep]) -> list[str]:
    """Return the target tensors of the steps in which a local copy or fill was overwritten."""
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
