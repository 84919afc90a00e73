"""Routes: the parts of one target tensor, each with the ranks that can send it and the receiver.

A `RouteTable` divides the boxes of the target into parts of one assignment each, and chooses a
sender for each receiver: a rank of the receiver's host if one holds the elements, otherwise the
holder that has least to send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..manifest.records import Holding, Manifest, TensorRecord
from ..mapping.assignment import Assignment
from ..mapping.regions import (
    Region,
    count_elements,
    first_overlap,
    intersect_regions,
    region_of_box,
)
from .cells import Cell, CellIndex


@dataclass(frozen=True, slots=True)
class Route:
    """A part of an assignment that one rank receives, copies or fills.

    Attributes:
        part: the elements of the target, and of the source.
        source: number of the source tensor among the assignment's sources; -1 without a source.
        senders: the holdings that can send the part; tensors of one layout use them in turns. ()
            for a part that is filled or kept, or that is copied from target memory.
        turn: position of the sender among `senders` for the first tensor of the layout.
        receiver: the holding that is written.
        copied: the route whose target elements are copied, after they arrived; None for a part
            that comes from the source.
        is_local: whether no bytes move between ranks.
    """

    part: Assignment
    source: int
    senders: tuple[Holding, ...]
    turn: int
    receiver: Holding
    copied: Route | None = None
    is_local: bool = False

    @property
    def stage(self) -> int:
        """0: from the source; 1: forwarded by a target rank; 2: copied in a target rank."""
        if self.copied is None:
            return 0
        return 2 if self.is_local else 1

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return count_elements(self.part.region)

    def sender(self, instance: int) -> Holding | None:
        """Return the holding that is read, for the `instance`-th tensor of the layout."""
        if self.copied is not None:
            return self.copied.receiver
        if not self.senders:
            return None
        return self.senders[(self.turn + instance) % len(self.senders)]


@dataclass(slots=True)
class Loads:
    """Bytes that each rank sends and receives so far; senders with fewer bytes are preferred."""

    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class Sides(NamedTuple):
    """The manifests of the two sides of a transfer."""

    source: Manifest
    target: Manifest

    @property
    def is_one_world(self) -> bool:
        """Tell whether equal ranks of the two manifests are one process."""
        return self.source.world == self.target.world


class Round(NamedTuple):
    """Routes that run together, and the most bytes that one rank sends and receives."""

    routes: list[Route]
    most_bytes: int


class _Arrival(NamedTuple):
    """A source region that has arrived at a rank or a host, and the route that brought it."""

    region: Region
    route: Route


class RouteTable:
    """All routes of one target tensor.

    Tensors of equal layouts, for example one weight of each layer, share a table.

    Args:
        record: the target tensor.
        sources: the source tensors that `parts` read, by name.
        parts: the assignments of the target tensor.
        sides: the manifests.
        loads: bytes of the tensors planned before; the bytes of this one are added.
        most_bytes: most bytes of a route; larger parts are divided.
    """

    def __init__(
        self,
        record: TensorRecord,
        sources: Mapping[str, TensorRecord],
        parts: Sequence[Assignment],
        sides: Sides,
        loads: Loads,
        *,
        most_bytes: int,
    ) -> None:
        self.record = record
        self.sources = tuple(sources.values())
        self.parts = tuple(parts)
        self.itemsize = record.torch_dtype.itemsize
        self._sides = sides
        self._loads = loads
        self._most = max(most_bytes // self.itemsize, 1)
        self._numbers = {name: number for number, name in enumerate(sources)}
        self._cells = [CellIndex(one.shape, one.holdings) for one in self.sources]
        self._by_host = dict[int, dict[str, tuple[Holding, ...]]]()
        # by (number of the source, rank) and by (number of the source, host): what has arrived
        self._at_rank = defaultdict[tuple[int, int], list[_Arrival]](list)
        self._at_host = defaultdict[tuple[int, str], list[_Arrival]](list)
        self._held = [frozenset(one.holdings) for one in self.sources]
        self._reads_twice = _reads_twice(self.parts)
        self.routes: list[Route] = []
        for cell in CellIndex(record.shape, record.holdings).all:
            for part in parts:
                self._route_cell(cell, part)
        self.by_receiver = defaultdict[int, list[Route]](list)
        self.by_sender = defaultdict[int, list[Route]](list)
        for route in self.routes:
            self.by_receiver[route.receiver.rank].append(route)
            for rank in {holding.rank for holding in route.senders}:
                self.by_sender[rank].append(route)

    def held_by(self, number: int) -> frozenset[Holding]:
        """Return the holdings of a source tensor."""
        return self._held[number]

    def rounds(self, most_bytes: int) -> list[Round]:
        """Divide the routes, in order, into rounds in which no rank moves more than `most_bytes`.

        A rank's bytes are the bytes that it sends and receives. A single larger route has a round
        of its own.
        """
        rounds = [Round([], 0)]
        loads = defaultdict[tuple[bool, int], int](int)
        for route in self.routes:
            ends = self._ends(route)
            nbytes = route.elements * self.itemsize
            most = max((loads[end] + nbytes for end in ends), default=0)
            if most > most_bytes and rounds[-1].routes:
                rounds.append(Round([], 0))
                loads.clear()
            for end in ends:
                loads[end] += nbytes
            peak = max([rounds[-1].most_bytes, *(loads[end] for end in ends)])
            rounds[-1] = Round(rounds[-1].routes, peak)
            rounds[-1].routes.append(route)
        return rounds

    def _ends(self, route: Route) -> list[tuple[bool, int]]:
        """Return the ranks whose links a route uses, as (whether of the source, rank)."""
        sender = route.sender(0)
        if route.is_local or sender is None:
            return []
        of_source = route.copied is None and not self._sides.is_one_world
        return [(of_source, sender.rank), (False, route.receiver.rank)]

    def _route_cell(self, cell: Cell, part: Assignment) -> None:
        """Add the routes of a target cell that follow from one assignment."""
        inside = part.restricted_to(region_of_box(cell.box))
        if inside is None:
            return
        if inside.source is None:
            for receiver in cell.holders:
                self.routes.append(Route(inside, -1, (), 0, receiver=receiver, is_local=True))
            return
        number = self._numbers[inside.source]
        for source_cell in self._cells[number].meeting(inside.source_region):
            common = inside.reading_from(region_of_box(source_cell.box))
            if common is None:
                continue
            for one in _without_broadcasts(common):
                for small in _divide_assignment(one, self._most):
                    self._route_part(small, number, source_cell.holders, cell.holders)

    def _route_part(
        self,
        part: Assignment,
        number: int,
        senders: tuple[Holding, ...],
        receivers: tuple[Holding, ...],
    ) -> None:
        """Add the routes of one part to all ranks that hold its target elements."""
        if not self._reads_twice:
            # Only the receivers of this part need the same elements.
            self._at_rank.clear()
            self._at_host.clear()
        local_senders = dict[int, Holding]()
        if self._sides.is_one_world:
            local_senders = {holding.rank: holding for holding in senders}
        waiting = dict[str, list[Holding]]()
        for receiver in receivers:
            if receiver.rank in local_senders:
                local = (local_senders[receiver.rank],)
                self.routes.append(Route(part, number, local, 0, receiver=receiver, is_local=True))
            else:
                host = self._sides.target.hosts[receiver.rank]
                waiting.setdefault(host, []).append(receiver)
        for host, group in waiting.items():
            near = self._senders_on(senders, host)
            for receiver in self._in_turns(group, near):
                if near:
                    self._send(part, number, near, receiver)
                else:
                    self._send_to_host(part, number, senders, receiver)

    def _in_turns(self, group: Sequence[Holding], near: tuple[Holding, ...]) -> Sequence[Holding]:
        """Return the receivers of one host, in the order in which they get the part.

        If the part comes from another host, the first receiver gets it from there, and the others
        copy it from the first. So the first is the one that has received fewest bytes.
        """
        if near or len(group) == 1:
            return group
        return sorted(group, key=lambda one: (self._loads.received[one.rank], one.rank))

    def _send(
        self, part: Assignment, number: int, senders: tuple[Holding, ...], receiver: Holding
    ) -> None:
        """Send the elements that the receiver lacks; copy the elements that it has received."""
        for one in self._copy_known(part, number, receiver):
            self._add(one, number, senders, receiver)

    def _send_to_host(
        self, part: Assignment, number: int, senders: tuple[Holding, ...], receiver: Holding
    ) -> None:
        """Send over a slow link only the elements that no rank of the receiver's host has."""
        host = self._sides.target.hosts[receiver.rank]
        for missing in self._copy_known(part, number, receiver):
            for one, arrival in _known_and_new(missing, self._at_host[number, host]):
                if arrival is None:
                    self._add(one, number, senders, receiver)
                    continue
                route = Route(one, number, (), 0, receiver=receiver, copied=arrival)
                self.routes.append(route)
                self._loads.received[receiver.rank] += route.elements * self.itemsize
                self._at_rank[number, receiver.rank].append(_Arrival(one.source_region, route))

    def _copy_known(self, part: Assignment, number: int, receiver: Holding) -> Iterator[Assignment]:
        """Copy elements that the receiver's rank has received; yield the parts that it lacks."""
        for one, arrival in _known_and_new(part, self._at_rank[number, receiver.rank]):
            if arrival is None:
                yield one
                continue
            route = Route(one, number, (), 0, receiver=receiver, copied=arrival, is_local=True)
            self.routes.append(route)

    def _add(
        self, part: Assignment, number: int, senders: tuple[Holding, ...], receiver: Holding
    ) -> None:
        """Add a route between two ranks, from the sender that has sent least."""
        sent = self._loads.sent
        turn = min(range(len(senders)), key=lambda i: sent[senders[i].rank])
        nbytes = count_elements(part.region) * self.itemsize
        sent[senders[turn].rank] += nbytes
        self._loads.received[receiver.rank] += nbytes
        route = Route(part, number, senders, turn, receiver=receiver)
        self.routes.append(route)
        arrival = _Arrival(part.source_region, route)
        self._at_rank[number, receiver.rank].append(arrival)
        self._at_host[number, self._sides.target.hosts[receiver.rank]].append(arrival)

    def _senders_on(self, senders: tuple[Holding, ...], host: str) -> tuple[Holding, ...]:
        """Return the senders on a host."""
        if id(senders) not in self._by_host:
            grouped = dict[str, list[Holding]]()
            for holding in senders:
                grouped.setdefault(self._sides.source.hosts[holding.rank], []).append(holding)
            self._by_host[id(senders)] = {name: tuple(on) for name, on in grouped.items()}
        return self._by_host[id(senders)].get(host, ())


def _reads_twice(parts: Sequence[Assignment]) -> bool:
    """Return whether some element of a source has two places in the target."""
    by_source = defaultdict[str, list[Region]](list)
    for part in parts:
        if part.source is None:
            continue
        by_source[part.source].append(part.source_region)
        for dim, indices in zip(part.dims, part.region, strict=True):
            if dim is None and len(indices) > 1:
                return True
    return any(first_overlap(regions) is not None for regions in by_source.values())


def _without_broadcasts(part: Assignment) -> Iterator[Assignment]:
    """Yield the parts of an assignment that read each source element once."""
    for dim, source_dim in enumerate(part.dims):
        if source_dim is None and len(part.region[dim]) > 1:
            for index in part.region[dim]:
                yield from _without_broadcasts(_at(part, dim, range(index, index + 1)))
            return
    yield part


def _divide_assignment(part: Assignment, most: int) -> Iterator[Assignment]:
    """Yield the parts of an assignment with at most `most` elements each."""
    if count_elements(part.region) <= most:
        yield part
        return
    dim = next(dim for dim, indices in enumerate(part.region) if len(indices) > 1)
    indices = part.region[dim]
    of_index = count_elements(part.region) // len(indices)
    # Example: 10 rows of 6 elements, and at most 20 elements -> 3 rows at a time.
    length = max(most // of_index, 1)
    for first in range(0, len(indices), length):
        yield from _divide_assignment(_at(part, dim, indices[first : first + length]), most)


def _at(part: Assignment, dim: int, indices: range) -> Assignment:
    """Return the part of an assignment with some of its indices along one target dim."""
    region = [*part.region]
    region[dim] = indices
    restricted = part.restricted_to(tuple(region))
    assert restricted is not None, "the indices must be a subset of its own"
    return restricted


def _known_and_new(
    part: Assignment, arrivals: Sequence[_Arrival]
) -> Iterator[tuple[Assignment, Route | None]]:
    """Divide a part: elements that have arrived, with their route, and the others, with None."""
    rest = [part]
    for arrival in arrivals:
        remaining = []
        for one in rest:
            common = intersect_regions(one.source_region, arrival.region)
            if common is None:
                remaining.append(one)
            elif common == one.source_region:
                yield one, arrival.route
            elif any(indices.step > 1 for indices in (*one.source_region, *arrival.region)):
                # The difference of progressions is not a region; the elements are sent again.
                remaining.append(one)
            else:
                yield _reading(one, common), arrival.route
                remaining += [_reading(one, left) for left in _difference(one, common)]
        rest = remaining
    for one in rest:
        yield one, None


def _reading(part: Assignment, region: Region) -> Assignment:
    """Return the part of an assignment that reads a region of its source."""
    read = part.reading_from(region)
    assert read is not None, "the region must be a part of its source region"
    return read


def _difference(part: Assignment, inner: Region) -> Iterator[Region]:
    """Yield disjoint boxes of the elements of a part's source box that are not in `inner`."""
    left = [*part.source_region]
    for dim, taken in enumerate(inner):
        indices = left[dim]
        for side in (range(indices.start, taken.start), range(taken.stop, indices.stop)):
            if side:
                yield (*left[:dim], side, *left[dim + 1 :])
        left[dim] = taken
