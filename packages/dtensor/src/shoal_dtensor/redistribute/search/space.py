"""The search space between two specs: states, and possible shardings of their dims.

A state holds the mesh axes that shard each tensor dim, the axes that are still to be reduced, and
the axes that are still to become partial as in the destination. Every other axis is replicated, or
partial at both ends.

The shardings of a dim form a tree. The children of a sharding divide its shards by one more axis:
like torch.chunk, or with explicit sizes of the source or the destination. Equal shardings are one
object. A set of axes is a mask, one bit for each. Axes of size 1 are left out: nothing ever happens
on them.

    mesh (2, 4), shape (8, 6)           dim 0                 dim 1
    src (S(0), S(0))                    by axis 0, by axis 1  whole                             (1, 6) elements a rank
    dst (R, S(1, sizes=(3, 1, 1, 1)))   whole                 by axis 1, with sizes of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import permutations, product
from math import comb, perm
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import RedistributeError
from ...layout.dim_sharding import DimSharding
from ...layout.placements import Replicate, norm_order
from .links import Links, axes_of, mask_of

if TYPE_CHECKING:
    from ...layout.spec import Spec


# that are all looked at: 3 axes on 3 dims have 106, 4 axes on 2 dims 261
MOST_LAYOUTS = 300
_LINEAR = frozenset({"sum", "avg"})


class ShardedDim:
    """One sharding of a dim: the shards of `outer` divided by one more axis.

    They are divided like torch.chunk, or as in `sharding`. If `outer` is None, the whole dim is
    divided.
    """

    __slots__ = ("_ranks", "_sharding", "axes", "even", "longest", "mask", "outers")

    def __init__(
        self,
        outer: ShardedDim | None,
        axis: int = -1,
        ranks: int = 1,
        sharding: DimSharding | None = None,
    ) -> None:
        self._ranks = ranks
        self._sharding = sharding
        # that shard the dim, outermost first
        self.axes: tuple[int, ...] = (*outer.axes, axis) if outer else ()
        self.mask: int = mask_of(self.axes)
        # the coarser ones: the dim whole, by one axis, and so on
        self.outers: Dims = outer.lineage if outer else ()
        # Elements of the longest shard, and whether all are that long.
        if sharding is not None:
            self.longest = sharding.step
            self.even = sharding.even
        elif outer is not None:
            # 7 elements over 2 ranks, then 2: shards of up to 4, then of up to 2, which are not all
            # that long
            self.longest, self.even = (
                -(-outer.longest // ranks),
                outer.even and outer.longest % ranks == 0,
            )

    @property
    def sharding(self) -> DimSharding:
        """The `DimSharding` of the dim; made on first use, as it may have an entry per rank."""
        if self._sharding is None:
            self._sharding = self.outers[-1].sharding.chunked(self.axes[-1], self._ranks)
        return self._sharding

    @property
    def lineage(self) -> tuple[ShardedDim, ...]:
        """The coarser shardings and this sharding; entry n is by n axes."""
        return *self.outers, self


Dims = tuple[ShardedDim, ...]


class Change(NamedTuple):
    """The change of a dim between two shardings."""

    # axes of the old and of the new sharding, inside their common outer axes
    leaving: int
    entering: int
    # the smallest fraction of its new shard that a rank has
    held: float


class State:
    """A layout on the path: the sharding of each tensor dim, and changes due on other axes."""

    __slots__ = ("becoming", "box", "dims", "leaving", "made", "pending", "scaled", "used")

    def __init__(self, space: Space, dims: Dims, pending: int, becoming: int, scaled: int) -> None:
        self.dims: Dims = dims
        self.pending: int = pending  # axes still to be reduced
        self.becoming: int = becoming  # to become partial
        self.scaled: int = scaled  # to change between sum and average
        # whether values are partial as in the destination
        self.made: bool = not (becoming or scaled)
        used = 0
        leaving = 0
        box = space.itemsize
        for sharded, wanted in zip(dims, space.wanted, strict=True):
            used |= sharded.mask  # dim 0 by axes 0 and 1: 0b11
            leaving |= space.change(sharded, wanted).leaving
            box *= sharded.longest  # 4 bytes, at most 1 x 6 elements: 24
        self.used: int = used  # axes that shard a dim
        # axes that take part in a collective on every path to the goal, if not `becoming`
        self.leaving: int = leaving
        self.box: int = box  # bytes of the largest local box


class Space:
    """The states between `src` and `dst`, which describe the same tensor on the same mesh."""

    def __init__(self, src: Spec, dst: Spec, links: Links) -> None:
        src, dst = _over_large_axes(src), _over_large_axes(dst)
        self.links = links
        self.itemsize = src.dtype.itemsize
        self.change = cache(_change)
        # The state, always the same object: shardings of dims, axes that are pending, becoming
        # partial, and scaled.
        self.state: Callable[[Dims, int, int, int], State] = cache(partial(State, self))
        # Shards divided by one more axis: like torch.chunk, then as in the source and the
        # destination.
        self.inside: Callable[[ShardedDim, int], list[ShardedDim]] = cache(
            lambda outer, axis: [ShardedDim(outer, axis, links.sizes[axis])]
        )
        # of several ranks; mesh (2, 1, 4): 0b101
        self.large = mask_of([a for a, n in enumerate(links.sizes) if n > 1])
        old = dict(src.partials)
        new = dict(dst.partials)
        # sum at one end, avg at the other
        both = [a for a, op in old.items() if a in new and _commute({op, new[a]})]
        self.partial = mask_of(new)  # in `dst`
        self.kept = mask_of(both)  # at both ends
        ops = {*old.values()}
        # whether all reductions may be done in any order
        self.alike = _commute({*ops, *new.values()})
        # With which sharded axes may be made partial to be reduced with the pending ones; "" if no
        # op fits.
        self.joining = "sum" if ops <= _LINEAR else "" if any(map(norm_order, ops)) else min(ops)
        # How much wider elements are while they are reduced.
        self.widening = (
            max([wire_itemsize(op, src.dtype) for op in ops], default=self.itemsize)
            // self.itemsize
        )
        # P, R -> R, P: 0b01, 0b10
        pending = mask_of(old) & ~self.kept
        becoming = self.partial & ~self.kept
        self.whole: Dims = tuple(
            [ShardedDim(None, sharding=DimSharding.whole(n)) for n in src.shape]
        )
        start = self._dims_of(src)
        self.wanted = self._dims_of(dst)
        self.start: State = self.state(
            start, pending, becoming, mask_of([a for a in both if old[a] != new[a]])
        )
        self.goal: State = self.state(self.wanted, 0, 0, 0)
        for spec, kinds in ((src, ops), (dst, {*new.values()})) if pending or becoming else ():
            if not _commute(kinds):
                raise RedistributeError(
                    f"{spec!r} mixes the reductions {sorted(kinds)}: their order matters and a "
                    "spec has none, so they cannot be reduced or made. Only sum and avg mix; "
                    "reduce one of them before the other comes into being."
                )

    def _dims_of(self, spec: Spec) -> Dims:
        """Return the sharding of each dim of a spec."""
        dims = []
        for dim, sharded in enumerate(self.whole):
            sharding = spec.dim_sharding(dim)
            for count, axis in enumerate(sharding.axes, 1):
                found = self.inside(sharded, axis)
                wanted = sharding.outer(count)
                if all(each.sharding != wanted for each in found):
                    found.append(ShardedDim(sharded, axis, sharding=wanted))
                sharded = next(each for each in found if each.sharding == wanted)
            dims.append(sharded)
        return tuple(dims)

    def moving(self, here: State) -> int:
        """Return the axes that may still change: all but those that are partial as in `dst`."""
        # P, S(0) -> P, R: axis 1, 0b10
        return self.large & ~(self.partial & ~(here.pending | here.becoming))

    def scattered(self, before: State, dims: Dims) -> State:
        """Return the state after the reduction of the pending axes that shard a dim now."""
        used = sum(sharded.mask for sharded in dims)
        return self.state(dims, before.pending & ~used, before.becoming, before.scaled)


def _over_large_axes(spec: Spec) -> Spec:
    """Return the spec with axes of one rank replicated."""
    sizes = spec.mesh.shape
    if 1 not in sizes:
        return spec
    placements = [p if n > 1 else Replicate() for p, n in zip(spec.placements, sizes, strict=True)]
    order = [
        (dim, tuple([axis for axis in axes if sizes[axis] > 1])) for dim, axes in spec.shard_order
    ]
    return spec.with_(placements=placements, shard_order=tuple(order))


def _change(old: ShardedDim, new: ShardedDim) -> Change:
    common = [a for a, b in zip(old.lineage, new.lineage, strict=False) if a is b][-1]
    # by axes 0 and 1 -> by 0 and 2: axis 1 leaves and axis 2 enters
    leaving = old.mask & ~common.mask
    return Change(leaving, new.mask & ~common.mask, _held(old, new) if leaving else 1.0)


def _held(old: ShardedDim, new: ShardedDim) -> float:
    """Return the smallest fraction of a rank's new interval of a dim that is in its old one."""
    if new in old.outers:
        # 8 on (2, 2), by both axes -> by one: 2 / 4
        return old.longest / max(1, new.longest) if old.even else 0.0
    if old.axes != new.axes:
        # axes 0, 1 -> 1, 0: some rank has nothing of its new shard
        return 0.0
    # 12 elements over 4 ranks as (3, 3, 3, 3), then as (4, 4, 2, 2): rank 1 has [3, 6) and needs
    # [4, 8), so 2 / 4 is
    # there already; ranks 0, 2 and 3 have 3 / 4, 1 / 2 and 1.  The smallest is 0.5.
    before = old.sharding
    after = new.sharding
    shards = zip(before.offsets, before.sizes, after.offsets, after.sizes, strict=True)
    common = [max(0, min(a + n, b + m) - max(a, b)) / m for a, n, b, m in shards if m]
    return min(common, default=1.0)


def wire_itemsize(op: str, dtype: torch.dtype) -> int:
    """Return the bytes of an element while it is reduced."""
    return dtype.itemsize if norm_order(op) is None else torch.float64.itemsize


def _commute(ops: set[str]) -> bool:
    """Tell whether these reductions may be done in any order.

    Sum and average commute; any other reduction commutes only with itself.
    """
    return len(ops) < 2 or ops <= _LINEAR


# --- what to look at ------------------------------------------------------------------------------


class Candidates:
    """The layouts that one hop of the search may lead to, on paths from one start.

    For few axes these are all layouts: every order of every subset of the axes on every tensor dim.
    If these are too many, an axis is replicated or shards one of a few dims: its present dim, its
    dim in the goal, and a dim where it may shard in the meantime. On a dim the axes are in the
    order of the source or of the destination.
    """

    def __init__(self, space: Space, start: State) -> None:
        self.space = space
        self.ends = list(zip(start.dims, space.goal.dims, strict=True))
        # By k of n axes, in any order, on d dims: 2 axes on 2 have 1 + 2 * 2 layouts by none or one
        # and 2 * 3 by both.
        axes = space.moving(start).bit_count()
        dims = max(1, len(self.ends))
        layouts = sum(perm(axes, k) * comb(k + dims - 1, k) for k in range(axes + 1))
        self.complete = layouts <= MOST_LAYOUTS  # whether all of them are looked at

    def inside(self, outer: Dims, axes: int) -> list[Dims]:
        """Return layouts that shard `outer` further by some of these axes, `outer` itself first."""
        chosen = axes_of(axes)
        dims = range(len(outer))
        found: list[Dims] = []
        ordered = cache(self._ordered)
        for places in product(
            *[(None, *(dims if self.complete else self._places(axis))) for axis in chosen]
        ):
            on_dims = [
                tuple([axis for axis, at in zip(chosen, places, strict=True) if at == dim])
                for dim in dims
            ]
            found += product(
                *[ordered(dim, outer[dim], inner) for dim, inner in zip(dims, on_dims, strict=True)]
            )
        return found

    def scattered(self, here: State) -> Dims:
        """Return the layout with pending axes where the goal has them, inside the other axes."""
        # S(1): [[], [0]]
        pending = [
            [axis for axis in goal.axes if here.pending >> axis & 1] for _, goal in self.ends
        ]
        return tuple(
            [self._extended(old, axes)[-1] for old, axes in zip(here.dims, pending, strict=True)]
        )

    def settled(self, here: State, axes: int, *, nested: bool) -> Dims:
        """Return the layout with these axes as in the goal and the other axes as they are.

        The axes are inside the others (`nested`) or ascending.
        """
        dims = []
        for whole, old, (_, goal) in zip(self.space.whole, here.dims, self.ends, strict=True):
            # goal by axis 0, here by 1, axis 0 settled: [0]
            order = [axis for axis in goal.axes if axes >> axis & 1]
            order += [axis for axis in old.axes if not axes >> axis & 1]  # and then [0, 1]
            dims.append(self._extended(whole, order if nested else sorted(order))[-1])
        return tuple(dims)

    def _ordered(self, dim: int, outer: ShardedDim, axes: tuple[int, ...]) -> list[ShardedDim]:
        """Return the shardings that divide the shards of a dim by all of these axes."""
        start, goal = (end.axes for end in self.ends[dim])
        orders: Iterable[tuple[int, ...]] = permutations(axes)
        if not self.complete:
            orders = _in_order(axes, goal + start), _in_order(axes, start + goal)
        return list(
            dict.fromkeys([inner for order in orders for inner in self._extended(outer, order)])
        )

    def _extended(self, outer: ShardedDim, order: Iterable[int]) -> list[ShardedDim]:
        """Return shards divided by these axes in order, like torch.chunk or with explicit sizes.

        The sharding with explicit sizes is last.
        """
        found = [outer]
        for axis in order:
            found = [inner for each in found for inner in self.space.inside(each, axis)]
        return found

    def _places(self, axis: int) -> tuple[int, ...]:
        """Return the dims that an axis may shard: its present dim, its goal, and one to wait on."""
        own = [d for d, (start, goal) in enumerate(self.ends) if axis in start.axes + goal.axes]
        waiting = [
            d
            for d, (start, _) in enumerate(self.ends)
            if d not in own and self.space.inside(start, axis)[0].even
        ]
        quiet = [d for d in waiting if not any(end.axes for end in self.ends[d])]
        # S(0) -> S(2), 1 to wait on: (0, 1, 2)
        return tuple(sorted([*own, *(quiet or waiting)[:1]]))


def _in_order(axes: tuple[int, ...], known: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes in a known order, unknown axes last.

    For example (0, 1, 2) in the order of (2, 0) is (2, 0, 1).
    """
    return tuple(sorted(axes, key=lambda axis: known.index(axis) if axis in known else len(known)))
