"""`TransferPlan`: regions, messages and costs of a transfer that is proven.

All ranks compute equal plans from equal manifests. `batches` has the rounds of a run, `regions` has
the copies for an engine of the user, and `traffic` and `explain` have the costs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal_dtensor.internal import format_bytes
from shoal_mesh.internal import html_text

from ..manifest.records import Manifest
from ..mapping.weight_mapping import WeightMapping
from .copies import Copy, TensorPlan
from .routes import Route, Sides


class Batch(NamedTuple):
    """Copies of one message round: the tensors and routes of one dtype that move together."""

    dtype: str
    parts: list[tuple[TensorPlan, list[Route]]]


class Traffic(NamedTuple):
    """Bytes that a transfer moves.

    Attributes:
        total: bytes sent between ranks.
        local: bytes copied inside a rank.
        most_sent: most bytes that one rank sends.
        most_received: most bytes that one rank receives.
        between_hosts: bytes sent over links between hosts.

    Example:
        >>> Traffic(total=8, local=0, most_sent=8, most_received=8, between_hosts=0).total
        8
    """

    total: int
    local: int
    most_sent: int
    most_received: int
    between_hosts: int


class _RankPair(NamedTuple):
    """A rank that sends, with its side ("source" or "target"), and a target rank that receives."""

    side: str
    sender: int
    receiver: int


@dataclass(frozen=True, repr=False)
class TransferPlan:
    """A proven transfer: exact regions between two layouts, in the order of the target's tensors.

    Attributes:
        source: the manifest of the sender's side.
        target: the manifest of the receiver's side.
        mapping: the mapping that the plan carries out.
        tensors: the plan of each target tensor.
        max_bytes: most bytes that one rank sends and receives in one round.

    Example:
        >>> from shoal_transfer import describe, plan_transfer
        >>> manifest = describe({"w": torch.zeros(2, 3)})
        >>> plan = plan_transfer(manifest, manifest)
        >>> plan.is_verified, plan.traffic()
        (False, Traffic(total=0, local=24, most_sent=0, most_received=0, between_hosts=0))
    """

    source: Manifest
    target: Manifest
    mapping: WeightMapping
    tensors: tuple[TensorPlan, ...]
    max_bytes: int

    @property
    def is_verified(self) -> bool:
        """Tell whether the mapping has a witness: a check other than the proof of the plan."""
        return self.mapping.witness is not None

    @property
    def is_one_world(self) -> bool:
        """Tell whether equal ranks of the two sides are one process."""
        return Sides(self.source, self.target).is_one_world

    @cached_property
    def digest(self) -> str:
        """Digest of the arguments of the plan; two worlds compare it."""
        parts = (self.source.to_json(), self.target.to_json(), self.mapping.to_json())
        text = "\n".join((*parts, str(self.max_bytes)))
        return hashlib.sha256(text.encode()).hexdigest()

    def regions(self, *, sender: int | None = None, receiver: int | None = None) -> Iterator[Copy]:
        """Yield the copies of the plan with their addresses, for an engine that moves the bytes.

        Args:
            sender: a rank of the source; only copies that it sends are yielded.
            receiver: a rank of the target; only copies that it writes are yielded.

        Returns:
            The copies in order. Copies of stages 1 and 2 read elements that copies of earlier
            stages of the same tensor have written.

        Example:
            >>> from shoal_transfer import describe, plan_transfer
            >>> one = describe({"w": torch.zeros(2, 3)}, world="one")
            >>> plan = plan_transfer(one, describe({"w": torch.zeros(2, 3)}, world="other"))
            >>> [copy.receiver for copy in plan.regions(sender=0)]
            [MemoryBlock(side='target', rank=0, part='w', offset=0, strides=(3, 1))]
        """
        for tensor in self.tensors:
            table = tensor.table
            routes = table.routes
            if receiver is not None:
                routes = table.by_receiver.get(receiver, [])
            elif sender is not None:
                routes = table.by_sender.get(sender, [])
            for route in routes:
                if sender is not None and not _is_sent_by(route, tensor.instance, sender):
                    continue
                yield tensor.copy_of(route)

    def batches(self) -> list[Batch]:
        """Return the rounds in which the plan runs: the same on all ranks.

        In one round no rank sends and receives more than `max_bytes` together, except for a single
        larger element.
        """
        batches = list[Batch]()
        room = 0
        rounds_of = {}
        for tensor in self.tensors:
            table = tensor.table
            if id(table) not in rounds_of:
                rounds_of[id(table)] = table.rounds(self.max_bytes)
            for routes, most_bytes in rounds_of[id(table)]:
                dtype = table.record.dtype
                if not batches or most_bytes > room or batches[-1].dtype != dtype:
                    batches.append(Batch(dtype, []))
                    room = self.max_bytes
                batches[-1].parts.append((tensor, routes))
                room -= most_bytes
        return batches

    def traffic(self) -> Traffic:
        """Return the bytes that the plan moves."""
        pairs, local = self._count_bytes()
        sent = Counter[tuple[str, int]]()
        received = Counter[int]()
        between_hosts = 0
        for pair, nbytes in pairs.items():
            # in one world a rank that forwards is the rank that sends
            process_side = "source" if self.is_one_world else pair.side
            sent[process_side, pair.sender] += nbytes
            received[pair.receiver] += nbytes
            hosts = (self.source if pair.side == "source" else self.target).hosts
            if hosts[pair.sender] != self.target.hosts[pair.receiver]:
                between_hosts += nbytes
        most_sent = max(sent.values(), default=0)
        most_received = max(received.values(), default=0)
        return Traffic(pairs.total(), local, most_sent, most_received, between_hosts=between_hosts)

    def gather_and_broadcast(self) -> Traffic:
        """Return the bytes of the usual way: whole tensors gathered on a rank and broadcast."""
        received = sum(tensor.table.record.nbytes for tensor in self.tensors)
        gathered = 0
        for record in self.source.tensors.values():
            gathered += record.nbytes
        receivers = len(self.target.hosts)
        total = gathered + receivers * received
        return Traffic(
            total=total,
            local=0,
            most_sent=receivers * received,
            most_received=max(gathered, received),
            between_hosts=0,
        )

    def explain(self, *, pairs: int = 8) -> str:
        """Return a text: bytes per pair of ranks, the busiest link, and the cost of a broadcast.

        Args:
            pairs: number of pairs that are listed, pairs with most bytes first.

        Example:
            >>> from shoal_transfer import describe, plan_transfer
            >>> one = describe({"w": torch.zeros(2, 3)}, world="one")
            >>> other = describe({"w": torch.zeros(2, 3)}, world="other")
            >>> print(plan_transfer(one, other).explain())
            1 tensors from 1 ranks to 1 ranks: 24 B between ranks, 0 B inside ranks
            proven; mapping unverified
            busiest sender 24 B, busiest receiver 24 B, 0 B between hosts
            gather and broadcast: 48 B between ranks, busiest receiver 24 B
              source 0 -> target 0: 24 B
        """
        traffic = self.traffic()
        usual = self.gather_and_broadcast()
        witness = f"witnessed: {self.mapping.witness}" if self.is_verified else "unverified"
        total = format_bytes(traffic.total)
        local = format_bytes(traffic.local)
        sent = format_bytes(traffic.most_sent)
        received = format_bytes(traffic.most_received)
        between_hosts = format_bytes(traffic.between_hosts)
        usual_total = format_bytes(usual.total)
        usual_received = format_bytes(usual.most_received)
        ranks = f"{len(self.source.hosts)} ranks to {len(self.target.hosts)} ranks"
        tensors = f"{len(self.tensors)} tensors from {ranks}"
        busiest = f"busiest sender {sent}, busiest receiver {received}"
        usual_bytes = f"{usual_total} between ranks, busiest receiver {usual_received}"
        lines = [f"{tensors}: {total} between ranks, {local} inside ranks"]
        lines.append(f"proven; mapping {witness}")
        if self.mapping.computed:
            functions = ", ".join(dict.fromkeys(map(repr, self.mapping.computed.values())))
            lines.append(
                f"{len(self.mapping.computed)} tensors are computed on arrival: {functions}"
            )
        lines.append(f"{busiest}, {between_hosts} between hosts")
        lines.append(f"gather and broadcast: {usual_bytes}")
        by_pair, _ = self._count_bytes()
        for pair, nbytes in by_pair.most_common(pairs):
            line = f"  {pair.side} {pair.sender} -> target {pair.receiver}"
            lines.append(f"{line}: {format_bytes(nbytes)}")
        if len(by_pair) > pairs:
            lines.append(f"  and {len(by_pair) - pairs} more pairs")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return one line: the routes of a large model are millions."""
        ranks = f"{len(self.source.hosts)} ranks -> {len(self.target.hosts)} ranks"
        witness = "verified" if self.is_verified else "unverified"
        return f"TransferPlan({len(self.tensors)} tensors, {ranks}, mapping {witness})"

    def _repr_html_(self) -> str:
        """Return the text of `explain` for notebooks."""
        return html_text(self.explain())

    def _count_bytes(self) -> tuple[Counter[_RankPair], int]:
        """Return the bytes that pairs of ranks exchange, and the bytes that stay inside ranks."""
        pairs = Counter[_RankPair]()
        local = 0
        uses = Counter(id(tensor.table) for tensor in self.tensors)
        tables = {id(tensor.table): tensor.table for tensor in self.tensors}
        for number, table in tables.items():
            for route in table.routes:
                nbytes = route.elements * table.itemsize
                if route.source < 0:
                    continue
                if route.is_local:
                    local += nbytes * uses[number]
                    continue
                side = "source" if route.copied is None else "target"
                for sender, times in _turns(route, uses[number]):
                    pairs[_RankPair(side, sender, route.receiver.rank)] += nbytes * times
        return pairs, local


def _turns(route: Route, uses: int) -> Iterator[tuple[int, int]]:
    """Yield each rank that sends a route, and for how many of the table's tensors it does so."""
    period = max(len(route.senders), 1)
    for instance in range(min(uses, period)):
        holding = route.sender(instance)
        assert holding is not None, "a route between ranks has a sender"
        # Example: 8 tensors and 3 senders -> the second sender sends tensors 1, 4 and 7.
        yield holding.rank, len(range(instance, uses, period))


def _is_sent_by(route: Route, instance: int, rank: int) -> bool:
    """Return whether a rank of the source sends a route's elements."""
    if not route.senders:
        return False
    holding = route.sender(instance)
    return holding is not None and holding.rank == rank
