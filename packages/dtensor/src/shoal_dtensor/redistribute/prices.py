"""What it takes to get from one state to another, in seconds: the moves of `moves` without making them.

The search asks for thousands of these.  So axes are bits of a mask, what two cuts of one dim have
in common is looked up, and whatever follows from a state alone is kept with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import inf

from .pricing import Links, sent_among
from .space import Dims, Space, Tokens, shared

__all__ = ["Prices", "State", "mask_of"]

# axes of the old cut behind what both have in common, such axes of the new cut, share of the new piece that is held
Pair = tuple[int, int, float]
Known = tuple[int, int, int, bool]  # of a cut of one dim: its number, axes, longest piece, whether all are that long


class State:
    """A state of the search and what is known about it.

    Attributes:
        dims, pending: the cuts, and the axes still to be reduced.
        cuts: the cuts as small numbers, one for each dim.
        masks: axes that cut each dim.
        used: axes that cut any.
        box: bytes of the largest box.
        even: whether all boxes are that large.
        volumes, latency, least, more, through: bounds, see `bounds`; filled in by the search.
        reached: seconds of the fastest way here so far.
    """

    __slots__ = (
        "box", "cuts", "dims", "even", "latency", "least", "masks", "more", "pending", "reached", "through", "used",
        "volumes",
    )  # fmt: skip

    def __init__(self, dims: Dims, pending: tuple[int, ...], itemsize: int, cuts: list[Known]) -> None:
        self.dims, self.pending = dims, pending
        self.cuts, self.masks, self.box, self.used, self.even = [], [], itemsize, 0, True
        for number, mask, width, even in cuts:
            self.cuts.append(number)
            self.masks.append(mask)
            self.box *= width
            self.used |= mask
            self.even = self.even and even
        self.least = self.more = self.through = -1.0
        self.volumes: list[float] = []
        self.latency = 0.0
        self.reached = inf


class Prices:
    """Seconds between the states of a space."""

    __slots__ = ("_bandwidth", "_copy", "_cuts", "_latency", "_pairs", "_ranks", "_states", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        self._cuts: list[dict[Tokens, Known]] = [{} for _ in space.start]
        self._pairs: list[dict[int, Pair]] = [{} for _ in space.start]
        self._states: dict[tuple[Dims, tuple[int, ...]], State] = {}
        self._latency, self._bandwidth, self._ranks = _groups(space.links)
        self._copy = space.links.copy(1)

    def state(self, dims: Dims, pending: tuple[int, ...]) -> State:
        """The state with these cuts, always the same object."""
        found = self._states.get((dims, pending))
        if found is None:
            cuts = [known.get(dims[d]) or self._cut(d, dims[d]) for d, known in enumerate(self._cuts)]
            found = self._states[dims, pending] = State(dims, pending, self.space.itemsize, cuts)
        return found

    def _cut(self, dim: int, tokens: Tokens) -> Known:
        known = self._cuts[dim]
        found = known[tokens] = len(known), mask_of(tokens), *self.space.width(dim, tokens)
        return found

    def between(self, before: State, after: State, pending: int = 0) -> tuple[float, int]:
        """Seconds of the direct way from one sharding to another, and the axes across which data flow."""
        involved = coming = changed = 0
        share = 1.0
        taken = before.used | pending
        for dim, (old, new) in enumerate(zip(before.cuts, after.cuts, strict=True)):
            if old != new:
                pair = self._pairs[dim].get(old << 16 | new) or self.pair(dim, before, after)
                behind, ahead, held = pair
                if not behind and ahead & ~taken:
                    sliced = self._sliced(before, after, taken)
                    if sliced is not before:
                        seconds, involved = self.between(sliced, after, pending)
                        return seconds + sliced.box * self._copy, involved
                involved |= behind | ahead
                coming |= ahead
                share *= held
                changed |= 1 << dim
        if not changed:
            return 0.0, 0
        box = after.box
        received = box - int(box * share)
        if coming:
            return self._exchange(before, after, changed, involved, received)
        copied = box * self._copy if changed != 1 else 0.0
        return self._latency[involved] + received / self._bandwidth[involved] + copied, involved

    def _sliced(self, before: State, after: State, taken: int) -> State:
        """The state after everything that can be cut in place has been."""
        result = list(before.dims)
        for dim, new in enumerate(after.dims):
            old = result[dim]
            if new[: len(old)] == old:
                end = len(old)
                while end < len(new) and not taken >> new[end] // 3 & 1:
                    end += 1
                result[dim] = new[:end]
        return self.state(tuple(result), before.pending)

    def _exchange(self, before: State, after: State, changed: int, involved: int, received: int) -> tuple[float, int]:
        """An exchange among the ranks that hold different parts, or among all that want different ones."""
        held, wanted = before.box, after.box
        latency, bandwidth = self._latency, self._bandwidth
        moved, seconds = received, latency[involved] + received / bandwidth[involved]
        near = involved & before.used
        if near != involved:
            ranks = self._ranks
            sent = sent_among(ranks[near], ranks[near & ~after.used], held, received)
            nearer = latency[near] + sent / bandwidth[near]
            if nearer <= seconds:
                involved, moved, seconds = near, sent, nearer
        elif changed.bit_count() == 2 and self._swapped(before, after, changed):
            return seconds + (held + wanted) * self._copy, involved
        copied = 0 if changed == 1 else min(moved, held) + wanted
        return seconds + copied * self._copy, involved

    def _swapped(self, before: State, after: State, changed: int) -> bool:
        """Whether the innermost axes of one dim become the innermost of another, all pieces equal."""
        space, old, new = self.space, before.dims, after.dims
        dims = [dim for dim in range(len(old)) if changed >> dim & 1]
        for a, b in (dims, dims[::-1]):
            moved = old[a][len(new[a]) :]
            if moved and old[a] == new[a] + moved and new[b] == old[b] + moved:
                return space.even(old, dims) and space.even(new, dims)
        return False

    def all_reduced(self, state: State) -> float:
        """Seconds of the all-reduce over all pending axes."""
        axes = mask_of(3 * a for a in state.pending)
        ways = self._ranks[axes]
        received = 2 * self.space.widening * state.box * (ways - 1) // ways
        return self._latency[axes] + received / self._bandwidth[axes]

    def scattered(self, before: State, after: State) -> float:
        """Seconds of the reduce-scatter over the axes that are pending before and not afterwards."""
        axes = after.used & ~before.used
        ways, wide, box = self._ranks[axes], self.space.widening, before.box
        changed = [dim for dim, old in enumerate(before.cuts) if old != after.cuts[dim]]
        received = wide * (box * (ways - 1) // ways if self.space.even(after.dims, changed) else after.box * (ways - 1))
        copied = wide * box * self._copy if changed != [0] else 0.0
        return self._latency[axes] + received / self._bandwidth[axes] + copied

    def pair(self, dim: int, before: State, after: State) -> Pair:
        """What the cuts of a dim have in common."""
        key = before.cuts[dim] << 16 | after.cuts[dim]
        found = self._pairs[dim].get(key)
        if found is None:
            old, new = before.dims[dim], after.dims[dim]
            same = shared(old, new)
            held = 1.0 if new[: len(old)] == old else self.space.common(dim, old, new)
            found = self._pairs[dim][key] = mask_of(old[same:]), mask_of(new[same:]), held
        return found

    def speed(self, axes: int) -> float:
        """Bytes per second of a collective over axes."""
        return self._bandwidth[axes]


@lru_cache(maxsize=256)
def _groups(links: Links) -> tuple[list[float], list[float], list[int]]:
    """Latency, bandwidth and number of ranks of the group over every set of axes."""
    latency, bandwidth, ranks = [0.0], [inf], [1]
    for axis, size in enumerate(links.sizes):
        latency += [max(links.latency[axis], other) for other in latency]
        bandwidth += [min(links.bandwidth[axis], other) for other in bandwidth]
        ranks += [size * other for other in ranks]
    return latency, bandwidth, ranks


def mask_of(tokens: Iterable[int]) -> int:
    """The axes of some tokens as bits."""
    mask = 0
    for token in tokens:
        mask |= 1 << token // 3
    return mask
