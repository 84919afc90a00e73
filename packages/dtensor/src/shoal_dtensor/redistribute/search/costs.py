"""What each edge of the search costs, in seconds: one function per kind of edge, the only place of its formula.

The search asks for thousands of these.  So axes are bits of a mask, what two shardings of one dim have in common is
looked up, and whatever follows from a state alone is kept with it.  `edges` makes steps of the few that are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations
from math import inf, prod
from typing import TYPE_CHECKING, NamedTuple

from ..step_cost import Links, sent_among
from .tokens import Dims, Tokens, mask_of, shared

if TYPE_CHECKING:
    from .space import Space


# axes of the old sharding inside what both have in common, such axes of the new one, fraction of the new shard held
Pair = tuple[int, int, float]


class Sharding(NamedTuple):
    """The sharding of one dim, and what is to be said of it beside the goal.

    Attributes:
        number: a small one, of its own.
        mask, placed: its axes; the same, 16 bits further left for each dim.
        width: elements of the longest shard; even: whether all are that long.
        leaving: axes that take part in a collective on any way to the goal.
        away: the axes that shard another dim there.
        held: fraction of the goal's shard that every rank has, where even.
    """

    number: int
    mask: int
    placed: int
    width: int
    even: bool
    leaving: int
    away: int
    held: float


class State:
    """A state of the search and what is known about it.

    Attributes:
        dims, pending, converted: shardings; axes still to be reduced; whether values are partial as in the destination.
        numbers: the shardings as small numbers, one for each dim.
        masks, placed: axes that shard each dim; the same in one number, 16 bits for each dim.
        used: axes that shard any dim.
        waiting: the axes in `pending`.
        box: bytes of the largest box.
        even: whether all boxes are that large.
        leaving: axes that take part in a collective on any way to the goal, unless they become partial.
        away: for each dim the axes that shard another one in the goal.
        held: fraction of the goal's box that every rank has, where `even`.
        volumes, latency, least, more, through: bounds, see `bounds`; filled in by the search.
        reached: seconds of the fastest way here so far.
    """

    __slots__ = (
        "away", "box", "converted", "dims", "even", "held", "latency", "least", "leaving", "masks", "more", "numbers",
        "pending", "placed", "reached", "through", "used", "volumes", "waiting",
    )  # fmt: skip

    def __init__(
        self, dims: Dims, pending: tuple[int, ...], converted: bool, itemsize: int, shardings: list[Sharding]
    ) -> None:
        self.dims: Dims = dims
        self.pending: tuple[int, ...] = pending
        self.converted: bool = converted
        numbers, masks, placed, widths, even, leaving, away, held = zip(*shardings, strict=True) if dims else _NO_DIMS
        self.numbers: tuple[int, ...] = numbers
        self.masks: tuple[int, ...] = masks
        self.box: int = itemsize * prod(widths)
        self.used: int = sum(masks)  # an axis shards one dim only
        self.placed: int = sum(placed)
        self.even: bool = all(even)
        self.leaving: int = sum(leaving)
        self.away: tuple[int, ...] = tuple(filter(None, away))
        self.held: float = prod(held)
        self.waiting: int = mask_of([3 * a for a in pending])
        self.least: float = -1.0
        self.more: float = -1.0
        self.through: float = -1.0
        self.volumes: list[float] = []
        self.latency: float = 0.0
        self.reached: float = inf


class Reshard(NamedTuple):
    """The direct way from one sharding to another: local slices, then at most one collective.

    Attributes:
        seconds: of both.
        axes: of the collective, as bits; 0 if there is none.
        kind: of the collective; "" if there is none.
        received: bytes of the busiest rank.
        sliced: the state between the two; None if nothing is sliced.
    """

    seconds: float
    axes: int
    kind: str
    received: int
    sliced: State | None


_NO_DIMS: tuple[tuple[()], ...] = ((),) * len(Sharding._fields)
_NOTHING = Reshard(0.0, 0, "", 0, None)


class Costs:
    """Seconds of the edges of a space, and its states."""

    __slots__ = (
        "_bandwidth", "_pairs", "_ranks", "_shardings", "_states", "_wanted", "copy", "departures", "latency", "space",
    )  # fmt: skip

    def __init__(self, space: Space) -> None:
        self.space: Space = space
        self._wanted: int = mask_of([t for tokens in space.goal for t in tokens])
        self._shardings: list[dict[Tokens, Sharding]] = [{} for _ in space.start]
        self._pairs: list[dict[int, Pair]] = [{} for _ in space.start]
        self._states: dict[tuple[Dims, tuple[int, ...], bool], State] = {}
        self.latency: list[float]
        self.latency, self._bandwidth, self._ranks = _groups(space.links)
        self.departures: dict[int, tuple[float, float]] = {}
        self.copy: Callable[[float], float] = space.links.copy

    def state(self, dims: Dims, pending: tuple[int, ...], converted: bool) -> State:
        """The state, always the same object."""
        key = dims, pending, converted
        state = self._states.get(key)
        if state is None:
            shardings = [known.get(dims[d]) or self._sharding(d, dims[d]) for d, known in enumerate(self._shardings)]
            state = self._states[key] = State(dims, pending, converted, self.space.itemsize, shardings)
        return state

    def _sharding(self, dim: int, tokens: Tokens) -> Sharding:
        known = self._shardings[dim]
        goal, mask = self.space.goal[dim], mask_of(tokens)
        leaving = mask_of(tokens[shared(tokens, goal) :])
        width, even = self.space.width(dim, tokens)
        held = self.space.common(dim, tokens, goal) if leaving and even else 1.0
        away = mask & self._wanted & ~mask_of(goal)
        sharding = known[tokens] = Sharding(len(known), mask, mask << 16 * dim, width, even, leaving, away, held)
        return sharding

    def reshard(self, before: State, after: State) -> Reshard:
        """S(i) -> S(j): what can be sliced is sliced first, then mostly one collective over all axes that change."""
        involved = coming = changed = 0
        held = 1.0
        taken = before.used | before.waiting
        for dim, (old, new) in enumerate(zip(before.numbers, after.numbers, strict=True)):
            if old != new:
                leaving, entering, fraction = self._pairs[dim].get(old << 16 | new) or self.pair(dim, before, after)
                if not leaving and entering & ~taken:
                    sliced = self.sliced(before, after.dims, taken)
                    if sliced is not before:
                        rest = self.reshard(sliced, after)
                        return Reshard(rest[0] + self.slice(sliced), rest[1], rest[2], rest[3], sliced)
                involved |= leaving | entering
                coming |= entering
                held *= fraction
                changed |= 1 << dim
        if not changed:
            return _NOTHING
        received = after.box - int(after.box * held)
        if coming:
            return self._exchange(before, after, changed, involved, received)
        # Shards of dim 0 arrive one after the other as they belong; of any other dim they are copied into place.
        copied = self.copy(after.box) if changed != 1 else 0.0
        seconds = self.latency[involved] + received / self._bandwidth[involved] + copied
        return Reshard(seconds, involved, "AllGather", received, None)

    def departure(self, leaving: int) -> tuple[float, float]:
        """Seconds that any hop takes at least in which axes leave dims, and those for each byte held afterwards.

        They all take part, and a rank had no more than one part in as many as there are ranks along them.

        Args:
            leaving: the axes, as bits of `State.placed`.
        """
        axes, rest = 0, leaving
        while rest:
            axes |= rest & 0xFFFF
            rest >>= 16
        known = self.departures[leaving] = self.latency[axes], (1 - 1 / self._ranks[axes]) / self._bandwidth[axes]
        return known

    def sliced(self, before: State, goal: Dims, taken: int) -> State:
        """The state after dims have been sharded towards `goal` by axes that are not taken."""
        result = list(before.dims)
        for dim, new in enumerate(goal):
            old = result[dim]
            if new[: len(old)] == old:
                end = len(old)
                while end < len(new) and not taken >> new[end] // 3 & 1:
                    end += 1
                result[dim] = new[:end]
        return self.state(tuple(result), before.pending, before.converted)

    def slice(self, after: State) -> float:
        """R -> S: the new shard is copied."""
        return self.copy(after.box)

    def _exchange(self, before: State, after: State, changed: int, involved: int, received: int) -> Reshard:
        """An exchange among the ranks that hold different shards, or among all that want different ones."""
        held, wanted = before.box, after.box
        latency, bandwidth = self.latency, self._bandwidth
        seconds = latency[involved] + received / bandwidth[involved]
        near = involved & before.used
        if near != involved:
            ranks = self._ranks
            sent = sent_among(ranks[near], ranks[near & ~after.used], held, received)
            nearer = latency[near] + sent / bandwidth[near]
            if nearer <= seconds:
                involved, received, seconds = near, sent, nearer
        elif changed.bit_count() == 2 and self.transposed(before.dims, after.dims) is not None:
            return Reshard(seconds + self.copy(held + wanted), involved, "AllToAll", received, None)
        copied = 0 if changed == 1 else min(received, held) + wanted  # rows of dim 0 are in memory as they travel
        return Reshard(seconds + self.copy(copied), involved, "Exchange", received, None)

    def transposed(self, old: Dims, new: Dims) -> tuple[int, int] | None:
        """(from, to) if the innermost axes of one dim become the innermost of the other that changes, all even."""
        first, second = (dim for dim, tokens in enumerate(old) if tokens != new[dim])
        for a, b in ((first, second), (second, first)):
            moved = old[a][len(new[a]) :]
            if moved and old[a] == new[a] + moved and new[b] == old[b] + moved:
                even = self.space.even(old, (a, b)) and self.space.even(new, (a, b))
                return (a, b) if even else None
        return None

    def all_reduce(self, state: State) -> tuple[float, int]:
        """P -> R: seconds and received bytes of a reduction over all pending axes."""
        ways = self._ranks[state.waiting]
        received = 2 * self.space.widening * state.box * (ways - 1) // ways
        return self.latency[state.waiting] + received / self._bandwidth[state.waiting], received

    def reduce_scatter(self, before: State, after: State) -> tuple[float, int, int]:
        """P -> S: seconds, received bytes and bytes packed for a reduction over the axes that are pending no more."""
        axes = after.used & ~before.used
        ways, wide, box = self._ranks[axes], self.space.widening, before.box
        changed = [dim for dim, old in enumerate(before.numbers) if old != after.numbers[dim]]
        received = wide * (box * (ways - 1) // ways if self.space.even(after.dims, changed) else after.box * (ways - 1))
        packed = wide * box if changed != [0] else 0
        return self.latency[axes] + received / self._bandwidth[axes] + self.copy(packed), received, packed

    def conversion(self, before: State) -> State | None:
        """The state after values have become partial as in the destination, locally; None if that takes more.

        Axes that become partial must be innermost: then the shards of their ranks fill the coarser shard, and the rest
        of it is what the reduction ignores.  Of a coarser shard only what the goal's replicated axes leave is kept:

            mesh (2, 2), 8 columns: R, S(1) -> S(1), P         rank      (0, 0)    (0, 1)    (1, 0)    (1, 1)
            it has columns                                               0 1 2 3   4 5 6 7   0 1 2 3   4 5 6 7
            it has to hold columns, to be added over axis 1              0 1 2 3   0 1 2 3   4 5 6 7   4 5 6 7
            so it holds                                                  0 1 2 3   0 0 0 0   0 0 0 0   4 5 6 7
        """
        becoming = mask_of([3 * a for a in self.space.becoming])
        if before.pending and (before.waiting & becoming or not self.space.mixing):
            return None
        if not becoming:
            return self.state(before.dims, before.pending, True)
        coarse = _coarser(before.dims, becoming)
        if coarse is None:
            return None
        taken = before.used | before.waiting
        return self.sliced(self.state(coarse, before.pending, True), self.space.goal, taken)

    def joined(self, before: State) -> Iterator[State]:
        """States in which sharded axes are partial too, locally, so that one collective reduces them with the pending.

        mesh (2, 2), P, S(1) -> S(0), S(0) of a small tensor: one reduce-scatter over both axes instead of one and an
        all-to-all: half the latency for twice the bytes.  Axes that were reduced before stay so.
        """
        joining = before.used & ~mask_of([3 * a for a in self.space.pending]) if self.space.joining else 0
        axes = [a for a in range(joining.bit_length()) if joining >> a & 1]
        for n in range(1, len(axes) + 1):
            for chosen in combinations(axes, n):
                coarse = _coarser(before.dims, mask_of([3 * a for a in chosen]))
                if coarse is not None:
                    yield self.state(coarse, tuple(sorted((*before.pending, *chosen))), before.converted)

    def join(self, after: State) -> float:
        """S -> P: the new local tensor is written."""
        return self.copy(after.box)

    def convert(self, after: State) -> float:
        """R or S -> P, P(sum) <-> P(avg): each local step writes the new local tensor."""
        return self.space.conversions * self.copy(after.box)

    def pair(self, dim: int, before: State, after: State) -> Pair:
        """What the shardings of a dim have in common."""
        key = before.numbers[dim] << 16 | after.numbers[dim]
        pair = self._pairs[dim].get(key)
        if pair is None:
            old, new = before.dims[dim], after.dims[dim]
            same = shared(old, new)
            fraction = 1.0 if new[: len(old)] == old else self.space.common(dim, old, new)
            pair = self._pairs[dim][key] = mask_of(old[same:]), mask_of(new[same:]), fraction
        return pair


def _coarser(dims: Dims, axes: int) -> Dims | None:
    """The shardings without some axes; None if one of them is not innermost."""
    coarse = []
    for tokens in dims:
        outer = tuple([t for t in tokens if not axes >> t // 3 & 1])
        if tokens[: len(outer)] != outer:
            return None
        coarse.append(outer)
    return tuple(coarse)


@lru_cache(maxsize=256)
def _groups(links: Links) -> tuple[list[float], list[float], list[int]]:
    """Latency, bandwidth and number of ranks of the group over every set of axes."""
    latency, bandwidth, ranks = [0.0], [inf], [1]
    for axis, size in enumerate(links.sizes):
        latency += [max(links.latency[axis], other) for other in latency]
        bandwidth += [min(links.bandwidth[axis], other) for other in bandwidth]
        ranks += [size * other for other in ranks]
    return latency, bandwidth, ranks
