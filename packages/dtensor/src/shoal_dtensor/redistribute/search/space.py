"""The search space between two specs: what a state is, and how long the shards of its dims are.

A state says, for each tensor dim, which mesh axes shard it, outermost first; which axes are still to be reduced; and
which are still to become partial as in the destination.  Every other axis is replicated, or partial at both ends.

The sharding of a dim is a tuple of tokens.  A token is three times the mesh axis plus where its sizes come from:
`CHUNK` (like torch.chunk), `AS_SRC` or `AS_DST` (explicit sizes of that spec).  Equal tuples are equal shardings, a
prefix is a coarser one.  A set of axes is a mask, one bit for each.  Axes of size 1 are left out: nothing ever happens
on them.

    mesh (2, 4), shape (8, 6)           dim 0     dim 1
    src (S(0), S(0))                    (0, 3)    ()       axis 0 outside, axis 1 inside: (1, 6) elements a rank
    dst (R, S(1, sizes=(3, 1, 1, 1)))   ()        (5,)     5 = 3 * axis 1 + AS_DST
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, permutations, product
from math import comb, factorial
from typing import TYPE_CHECKING, NamedTuple

from ...errors import RedistributeError
from ...layout.dim_sharding import shard_dim
from ...layout.placements import Partial, Placement, Shard, norm_order
from ..reductions import wire_itemsize
from .costs import axes_of, mask_of

if TYPE_CHECKING:
    from ...layout.spec import Spec
    from .costs import Links


Tokens = tuple[int, ...]
Dims = tuple[Tokens, ...]

CHUNK, AS_SRC, AS_DST = 0, 1, 2
MOST_LAYOUTS = 300  # that are all looked at: 3 axes on 3 dims have 106, 4 axes on 2 dims 261
_LINEAR = frozenset({"sum", "avg"})


class Shards(NamedTuple):
    """What tokens make of a dim.

    Attributes:
        axes: those that shard it.
        leaving: those of them that take part in a collective on any way to the goal, unless they become partial.
        longest: elements of the longest shard.
        even: whether all shards are that long.
    """

    axes: int
    leaving: int
    longest: int
    even: bool


class Change(NamedTuple):
    """What becomes of a dim between two shardings."""

    leaving: int  # axes of the old one, and of the new one, inside of what both have in common
    entering: int
    held: float  # the smallest fraction of its new shard that a rank has


class State:
    """A layout on the way.

    Attributes:
        dims: the sharding of each tensor dim.
        pending, becoming, scaled: axes still to be reduced; to become partial; to change between sum and average.
        made: whether values are partial as in the destination.
        used, leaving: `axes` and `leaving` of `Shards`, of all dims.
        placed: axes that shard a dim, 16 bits further left for each dim: axis 1 on dim 2 is bit 1 + 2 * 16 = 33.
        box: bytes of the largest local box.
    """

    __slots__ = ("becoming", "box", "dims", "leaving", "made", "pending", "placed", "scaled", "used")

    def __init__(self, space: Space, dims: Dims, pending: int, becoming: int, scaled: int) -> None:
        self.dims: Dims = dims
        self.pending: int = pending
        self.becoming: int = becoming
        self.scaled: int = scaled
        self.made: bool = not (becoming or scaled)
        used, leaving, placed, box = 0, 0, 0, space.itemsize
        for dim, tokens in enumerate(dims):
            axes, gone, longest, _ = space.shards(dim, tokens)
            used |= axes  # of dims (0, 3) and (): 0b11
            leaving |= gone
            placed |= axes << 16 * dim
            box *= longest  # 4 bytes, at most 1 x 6 elements: 24
        self.used: int = used
        self.leaving: int = leaving
        self.placed: int = placed
        self.box: int = box


class Space:
    """States between `src` and `dst`, which describe the same tensor on the same mesh.

    Attributes:
        start, goal: states of the two specs.
        large: axes of more than one rank.
        partial, kept: axes that are partial in `dst`; that are so at both ends.
        alike: whether the reductions of both specs may be done in any order.
        joining: op with which sharded axes may be made partial to be reduced with the pending ones; "" if none fits.
        widening: how much wider elements are while they are reduced.

    Raises:
        RedistributeError: if reductions of different kinds would have to be reordered.
    """

    __slots__ = (
        "_changes", "_shards", "_states", "_wanted", "alike", "goal", "itemsize", "joining", "kept", "large", "links",
        "partial", "placements", "shape", "start", "widening",
    )  # fmt: skip

    def __init__(self, src: Spec, dst: Spec, links: Links) -> None:
        self.links: Links = links
        self.shape: tuple[int, ...] = tuple(src.shape)
        self.itemsize: int = src.dtype.itemsize
        self.placements: tuple[tuple[Placement, ...], tuple[Placement, ...]] = (src.placements, dst.placements)
        self._shards: dict[tuple[int, Tokens], Shards] = {}
        self._changes: dict[tuple[int, Tokens, Tokens], Change] = {}
        self._states: dict[tuple[Dims, int, int, int], State] = {}
        self.large: int = mask_of([a for a, n in enumerate(links.sizes) if n > 1])  # mesh (2, 1, 4): 0b101
        old, new = ({a: op for a, op in spec.partials if self.large >> a & 1} for spec in (src, dst))
        both = [a for a, op in old.items() if a in new and _commute({op, new[a]})]  # sum at one end, avg at the other
        self.partial: int = mask_of(new)
        self.kept: int = mask_of(both)
        ops = {*old.values()}
        self.alike: bool = _commute({*ops, *new.values()})
        self.joining: str = "sum" if ops <= _LINEAR else "" if any(map(norm_order, ops)) else min(ops)
        self.widening: int = max([wire_itemsize(op, src.dtype) for op in ops], default=self.itemsize) // self.itemsize
        pending, becoming = mask_of(old) & ~self.kept, self.partial & ~self.kept  # P, R -> R, P: 0b01, 0b10
        start = self._tokens(src, AS_SRC, None)
        self._wanted: Dims = self._tokens(dst, AS_DST, start)
        self.start: State = self.state(start, pending, becoming, mask_of([a for a in both if old[a] != new[a]]))
        self.goal: State = self.state(self._wanted, 0, 0, 0)
        if pending or becoming:
            _check_ops(src, old)
            _check_ops(dst, new)

    def _tokens(self, spec: Spec, kind: int, other: Dims | None) -> Dims:
        dims = []
        for dim, sharding in enumerate(map(spec.dim_sharding, range(spec.ndim))):
            tokens: Tokens = ()
            for axis, ways in zip(sharding.axes, sharding.axis_sizes, strict=True):
                if ways == 1:
                    continue
                placement = spec.placements[axis]
                assert isinstance(placement, Shard), "axes of a dim sharding have Shard placements"
                token = 3 * axis  # axis 1 like torch.chunk: 3
                if placement.sizes is not None or placement.multiple_of != 1:
                    token += kind  # axis 1 with sizes of the destination: 3 + 2 = 5
                    twin = (*tokens, 3 * axis + AS_SRC)
                    if other is not None and other[dim][: len(twin)] == twin and self.placements[0][axis] is placement:
                        token = 3 * axis + AS_SRC  # the same sizes at both ends: 4 in both
                tokens = (*tokens, token)
            dims.append(tokens)
        return tuple(dims)

    def state(self, dims: Dims, pending: int, becoming: int, scaled: int) -> State:
        """The state, always the same object."""
        key = dims, pending, becoming, scaled
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = State(self, *key)
        return state

    def moving(self, here: State) -> int:
        """The axes over which anything may still happen: all but those that are partial as in `dst`."""
        return self.large & ~(self.partial & ~(here.pending | here.becoming))  # P, S(0) -> P, R: axis 1, 0b10

    def scattered(self, before: State, dims: Dims) -> State:
        """The state after pending axes were reduced that shard a dim now."""
        pending = before.pending & ~mask_of([t // 3 for tokens in dims for t in tokens])
        return self.state(dims, pending, before.becoming, before.scaled)

    def placement(self, token: int, dim: int) -> Placement:
        """The placement that a token stands for on a tensor dim."""
        kind = token % 3  # 5 is AS_DST: the destination's placement of axis 1
        return Shard(dim) if kind == CHUNK else self.placements[kind - 1][token // 3]

    def shards(self, dim: int, tokens: Tokens) -> Shards:
        """What these tokens make of a dim."""
        key = dim, tokens
        shards = self._shards.get(key)
        if shards is None:
            shards = self._shards[key] = self._sharded(dim, tokens) if tokens else Shards(0, 0, self.shape[dim], True)
        return shards

    def _sharded(self, dim: int, tokens: Tokens) -> Shards:
        axes, _, longest, even = self.shards(dim, tokens[:-1])  # of (0, 3) those of (0,), then axis 1 inside of it
        leaving = mask_of([t // 3 for t in tokens[_shared(tokens, self._wanted[dim]) :]])  # (0, 3), wanted (0, 6): 0b10
        axis, kind = divmod(tokens[-1], 3)  # 5: axis 1, with the sizes of the destination
        axes |= 1 << axis
        placement = self.placements[kind - 1][axis] if kind else None
        sizes, unit = (placement.sizes, placement.multiple_of) if isinstance(placement, Shard) else (None, 1)
        if sizes is not None:
            return Shards(axes, leaving, max(sizes), len(set(sizes)) == 1)  # (3, 1, 1, 1): up to 3, uneven
        # 7 elements over 2 ranks, then 2: shards of up to 4, then of up to 2, which are not all that long
        ways = self.links.sizes[axis] * unit  # 10 over 2 ranks at multiples of 4: -(-10 // 8) * 4 = 8
        return Shards(axes, leaving, min(longest, -(-longest // ways) * unit), even and longest % ways == 0)

    def change(self, dim: int, old: Tokens, new: Tokens) -> Change:
        """What becomes of a dim between two shardings."""
        key = dim, old, new
        change = self._changes.get(key)
        if change is None:
            same = _shared(old, new)  # (0, 3) -> (0, 6): 1, so axis 1 leaves and axis 2 enters
            held = self._held(dim, old, new) if old[same:] else 1.0
            leaving, entering = (mask_of([t // 3 for t in tokens[same:]]) for tokens in (old, new))
            change = self._changes[key] = Change(leaving, entering, held)
        return change

    def _held(self, dim: int, old: Tokens, new: Tokens) -> float:
        """The smallest fraction of a rank's new interval of a dim that is in its old one.

        12 elements over 4 ranks as (3, 3, 3, 3), then as (4, 4, 2, 2): rank 1 has [3, 6) and needs [4, 8), so 2 / 4 is
        there already; ranks 0, 2 and 3 have 3 / 4, 1 / 2 and 1.  The smallest is 0.5.
        """
        length, even = self.shards(dim, old)[2:]
        if old[: len(new)] == new:
            return length / max(1, self.shards(dim, new).longest) if even else 0.0  # 8 on (2, 2), (0, 3) -> (0,): 2 / 4
        if [t // 3 for t in old] != [t // 3 for t in new]:
            return 0.0  # (0, 3) -> (3, 0): some rank has nothing of its new shard
        before, after = self._sizes(dim, old), self._sizes(dim, new)
        worst = 1.0
        for a, b, n, m in zip(accumulate(before, initial=0), accumulate(after, initial=0), before, after, strict=False):
            if m:
                worst = min(worst, max(0, min(a + n, b + m) - max(a, b)) / m)
        return worst

    def _sizes(self, dim: int, tokens: Tokens) -> tuple[int, ...]:
        """Lengths of all shards of a dim under these tokens."""
        placements: list[Placement] = [Partial()] * len(self.links.sizes)
        for token in tokens:
            placements[token // 3] = self.placement(token, dim)  # token 5: that of axis 1
        return shard_dim(self.shape[dim], [t // 3 for t in tokens], placements, self.links.sizes).sizes


def _shared(old: Tokens, new: Tokens) -> int:
    """Number of outer axes that two shardings of a dim have in common: 1 of (0, 3) and (0, 6)."""
    same = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        same += 1
    return same


def _commute(ops: set[str]) -> bool:
    """Whether these reductions may be done in any order: sum and average commute, any other one with itself."""
    return len(ops) < 2 or ops <= _LINEAR


def _check_ops(spec: Spec, ops: dict[int, str]) -> None:
    kinds = {*ops.values()}
    if not _commute(kinds):
        raise RedistributeError(
            f"{spec!r} mixes the reductions {sorted(kinds)}: their order matters and a spec has none, so they "
            "cannot be reduced or made. Only sum and avg mix; reduce one of them before the other comes into being."
        )


# --- what to look at --------------------------------------------------------------------------------------------------


class Candidates:
    """The layouts that one hop of the search may lead to, on ways from one start.

    Of few axes all of them: every order of every subset of the axes on every tensor dim.  Where those are too many, an
    axis is replicated or on one of a few dims: where it is, where it goes, and where it may wait meanwhile, being
    neither in the way nor idle; and on a dim axes are in the order of the source or of the destination.

    Attributes:
        complete: whether all of them are looked at.
    """

    def __init__(self, space: Space, start: State) -> None:
        self.space = space
        self.ends = list(zip(start.dims, space.goal.dims, strict=True))
        self.complete = _count(space.moving(start).bit_count(), len(self.ends)) <= MOST_LAYOUTS
        self._orders: dict[tuple[int, Tokens, tuple[int, ...]], list[Tokens]] = {}

    def inside(self, outer: Dims, axes: int) -> list[Dims]:
        """The layouts that shard `outer` further by some of these axes, first that by none of them.

        Inside of nothing, by axis 0 on two dims: ((), ()), ((0,), ()), ((), (0,)).
        """
        chosen = axes_of(axes)
        everywhere = tuple(range(len(outer)))
        places = tuple([everywhere if self.complete else self._places(axis) for axis in chosen])
        found: list[Dims] = []
        for on_dims in _placings(chosen, places, len(outer)):  # ((0, 1),) on one dim: then (0, 3), (3, 0)
            found += product(*[self._ordered(dim, outer[dim], inner) for dim, inner in enumerate(on_dims)])
        return found

    def scattered(self, here: State) -> Dims:
        """The layout with pending axes where the goal has them, inside of the others."""
        pending = [[t // 3 for t in goal if here.pending >> t // 3 & 1] for _, goal in self.ends]  # to S(1): [[], [0]]
        return tuple([self._extended(dim, old, pending[dim])[-1] for dim, old in enumerate(here.dims)])

    def settled(self, here: State, axes: int, *, nested: bool) -> Dims:
        """The layout with these axes as in the goal and the others as they are, inside of those or ascending."""
        dims = []
        for dim, (_, goal) in enumerate(self.ends):
            order = [t // 3 for t in goal if axes >> t // 3 & 1]  # goal (0,), here (3,), axis 0 settled: [0]
            order += [t // 3 for t in here.dims[dim] if not axes >> t // 3 & 1]  # and then [0, 1]
            dims.append(self._extended(dim, (), order if nested else sorted(order))[-1])
        return tuple(dims)

    def _ordered(self, dim: int, outer: Tokens, axes: tuple[int, ...]) -> list[Tokens]:
        """The ways to shard a dim further by all of these axes."""
        if not axes:
            return [outer]
        key = dim, outer, axes
        extensions = self._orders.get(key)
        if extensions is None:
            start, goal = self.ends[dim]
            orders: Iterable[tuple[int, ...]] = permutations(axes)
            if not self.complete:
                orders = _in_order(axes, goal + start), _in_order(axes, start + goal)
            ways = [tokens for order in orders for tokens in self._extended(dim, outer, order)]
            extensions = self._orders[key] = list(dict.fromkeys(ways))
        return extensions

    def _extended(self, dim: int, outer: Tokens, order: Iterable[int]) -> list[Tokens]:
        """The dim sharded further by these axes in this order: like torch.chunk, and last with explicit sizes.

        Those of either end, inside of just what they are inside of there.
        """
        if not any(t % 3 for end in self.ends[dim] for t in end):
            return [outer + tuple([3 * axis for axis in order])]  # () by axes 1 and 0: [(3, 0)]
        found = [outer]
        for axis in order:
            longer: list[Tokens] = []
            for tokens in found:
                depth = len(tokens)
                inner = [end[depth] for end in self.ends[dim] if end[:depth] == tokens and end[depth:]]
                same = [token for token in inner if token // 3 == axis]  # goal (5,), axis 1: [5]
                longer += [(*tokens, token) for token in dict.fromkeys([3 * axis, *same])]  # () -> (3,) and (5,)
            found = longer
        return found

    def _places(self, axis: int) -> tuple[int, ...]:
        """Tensor dims that an axis may shard: where it does, where it shall, and one to wait on."""
        own = [d for d, (start, goal) in enumerate(self.ends) if any(t // 3 == axis for t in start + goal)]
        even = [d for d, (start, _) in enumerate(self.ends) if self.space.shards(d, (*start, 3 * axis)).even]
        waiting = [d for d in even if d not in own]
        quiet = [d for d in waiting if not any(self.ends[d])]
        return tuple(sorted([*own, *(quiet or waiting)[:1]]))  # S(0) -> S(2), 1 to wait on: (0, 1, 2)


def _count(axes: int, dims: int) -> int:
    """Number of layouts of `dims` dims by subsets of `axes` axes in every order.

    2 axes on 2 dims: 1 by none, 2 * 2 by one; by both 2 orders * 3, as 2 + 0, 1 + 1 or 0 + 2 on the dims; so 11.
    """
    ways = (comb(axes, k) * factorial(k) * comb(k + dims - 1, k) for k in range(axes + 1))
    return sum(ways) if dims else 1


@lru_cache(maxsize=1024)
def _placings(
    axes: tuple[int, ...], places: tuple[tuple[int, ...], ...], ndim: int
) -> list[tuple[tuple[int, ...], ...]]:
    """Every axis on none or on one of its places: the axes on every dim, ascending.

    Axes 0 and 2, both on dim 0 of 1: [((),), ((2,),), ((0,),), ((0, 2),)].
    """
    return [
        tuple([tuple([a for a, at in zip(axes, chosen, strict=True) if at == dim]) for dim in range(ndim)])
        for chosen in product(*[(None, *dims) for dims in places])
    ]


def _in_order(axes: tuple[int, ...], tokens: Tokens) -> tuple[int, ...]:
    """The axes in the order of some tokens, those that are not among them last."""
    known = [t // 3 for t in tokens]  # axes (0, 2) in the order of (6, 0): (2, 0)
    return tuple(sorted(axes, key=lambda axis: known.index(axis) if axis in known else len(known)))
