"""The search space between two specs: states, and possible shardings of their dims.

A state holds the mesh axes that shard each tensor dim, the axes that are still to be reduced, and
the axes that are still to become partial as in the destination. Every other axis is replicated, or
partial at both ends.

The shardings of a dim form a tree. The children of a sharding divide its shards by one more axis:
like torch.chunk, or with explicit sizes of the source or the destination. Equal shardings are one
object. A set of axes is a bit mask. Axes of size 1 are left out, because nothing is sharded or
reduced along them.

    mesh (2, 4), shape (8, 6)          dim 0                 dim 1
    src (S(0), S(0))                   by axis 0, by axis 1  whole
    dst (R, S(1, sizes=(3, 1, 1, 1)))  whole                 by axis 1, with sizes of its own

Under src each rank has (1, 6) elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import permutations, product
from math import comb, perm
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import RedistributeError
from ...layout.boxes import spans
from ...layout.dim_sharding import DimSharding
from ...layout.placements import Replicate, norm_order
from .links import Links, axes_of, has_axis, mask_of

if TYPE_CHECKING:
    from ...layout.spec import Spec


# The search considers all layouts if there are at most this many. 3 axes on 3 dims have 106
# layouts, 4 axes on 2 dims have 261.
MOST_LAYOUTS = 300
_LINEAR = frozenset({"sum", "avg"})


class ShardedDim:
    """One sharding of a dim: the shards of `outer` divided by one more axis.

    They are divided as in `sharding`, or like torch.chunk if it is None. If `outer` is None, the
    dim is not sharded.
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
        # axes that shard the dim, outermost first
        self.axes: tuple[int, ...] = (*outer.axes, axis) if outer else ()
        self.mask: int = mask_of(self.axes)
        # the coarser shardings: of the whole dim, by one axis, and so on
        self.outers: Dims = outer.lineage if outer else ()
        # `longest` is the number of elements of the longest shard. `even` tells whether all shards
        # have that length.
        if sharding is not None:
            self.longest = sharding.step
            self.even = sharding.even
        elif outer is not None:
            # Example: 7 elements over 2 ranks, then over 2 more. The longest shards have 4, then 2
            # elements, and not all shards are that long.
            self.longest = -(-outer.longest // ranks)
            self.even = outer.even and outer.longest % ranks == 0

    @property
    def sharding(self) -> DimSharding:
        """The `DimSharding` of the dim; made on first use, as it may have an entry per rank."""
        if self._sharding is None:
            self._sharding = self.outers[-1].sharding.chunked(self.axes[-1], self._ranks)
        return self._sharding

    @property
    def lineage(self) -> tuple[ShardedDim, ...]:
        """The coarser shardings and this sharding; entry n is sharded by n axes."""
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
    """A node of the search: the sharding of each tensor dim, and the changes that are still due."""

    __slots__ = (
        "box_bytes",
        "dims",
        "must_leave",
        "partials_done",
        "sharding_axes",
        "to_make_partial",
        "to_reduce",
        "to_rescale",
    )

    def __init__(
        self, space: Space, dims: Dims, to_reduce: int, to_make_partial: int, to_rescale: int
    ) -> None:
        self.dims: Dims = dims
        # axes still to be reduced
        self.to_reduce: int = to_reduce
        # axes still to become partial as in the destination
        self.to_make_partial: int = to_make_partial
        # axes still to change between sum and average
        self.to_rescale: int = to_rescale
        # whether values are partial as in the destination
        self.partials_done: bool = not (to_make_partial or to_rescale)
        sharding_axes = 0
        must_leave = 0
        box_bytes = space.itemsize
        for sharded, wanted in zip(dims, space.wanted, strict=True):
            # Example: 0b11 if dim 0 is sharded by axes 0 and 1.
            sharding_axes |= sharded.mask
            must_leave |= space.change(sharded, wanted).leaving
            # Example: 24 bytes for boxes of at most 1 x 6 elements of 4 bytes.
            box_bytes *= sharded.longest
        # axes that shard a dim
        self.sharding_axes: int = sharding_axes
        # axes that have to stop sharding a dim; unless they are in `to_make_partial`, they take
        # part in a collective on every path to the goal
        self.must_leave: int = must_leave
        # bytes of the largest local box
        self.box_bytes: int = box_bytes


class FinerShardings(dict[tuple[ShardedDim, int], list[ShardedDim]]):
    """The shardings that divide the shards of one sharding by one more axis, by (sharding, axis).

    The first one divides like torch.chunk; it is made on first use. `register` adds others.
    """

    def __init__(self, ranks_of_axes: Sequence[int]) -> None:
        super().__init__()
        self.ranks_of_axes = ranks_of_axes

    def __missing__(self, key: tuple[ShardedDim, int]) -> list[ShardedDim]:
        outer, axis = key
        finer = [ShardedDim(outer, axis, self.ranks_of_axes[axis])]
        self[key] = finer
        return finer

    def register(self, outer: ShardedDim, axis: int, sharding: DimSharding) -> ShardedDim:
        """Return the sharding that divides `outer` by an axis as `sharding` does; add it if new."""
        finer = self[outer, axis]
        for known in finer:
            if known.sharding == sharding:
                return known
        new = ShardedDim(outer, axis, sharding=sharding)
        finer.append(new)
        return new


class Space:
    """The states between `src` and `dst`, which describe the same tensor on the same mesh.

    Attributes:
        multi_rank_axes: axes of several ranks; mesh (2, 1, 4): 0b101.
        partial: axes that are partial in `dst`.
        partial_at_both_ends: axes that are partial in `src` and `dst`, perhaps as sum and average.
        reductions_commute: whether all reductions may be done in any order.
        joinable_op: the reduction as which sharded axes may be made partial, to be reduced with the
            pending ones; "" if no reduction fits.
        accumulate_factor: how much wider elements are while they are reduced.
        finer: the shardings that divide the shards of a given sharding by one more axis.
        whole: the dims without any sharding.
        wanted: the shardings of the dims in `dst`.
    """

    def __init__(self, src: Spec, dst: Spec, links: Links) -> None:
        src = _over_large_axes(src)
        dst = _over_large_axes(dst)
        self.links = links
        self.itemsize = src.dtype.itemsize
        self.multi_rank_axes = mask_of([axis for axis, n in enumerate(links.sizes) if n > 1])
        self._read_partials(src, dst)
        self.change = cache(_change)
        # Returns the state of these dims and of these axes to reduce, to make partial and to
        # rescale. It is one object for equal arguments.
        self.state: Callable[[Dims, int, int, int], State] = cache(partial(State, self))
        self.finer = FinerShardings(links.sizes)
        whole_dims = [ShardedDim(None, sharding=DimSharding.whole(n)) for n in src.shape]
        self.whole: Dims = tuple(whole_dims)
        start = self._dims_of(src)
        self.wanted = self._dims_of(dst)
        # Example: for [P, R] -> [R, P] the masks are 0b01 and 0b10.
        to_reduce = mask_of(dict(src.partials)) & ~self.partial_at_both_ends
        to_make_partial = self.partial & ~self.partial_at_both_ends
        if to_reduce or to_make_partial:
            _check_one_reduction(src)
            _check_one_reduction(dst)
        self.start: State = self.state(start, to_reduce, to_make_partial, self.rescaled)
        self.goal: State = self.state(self.wanted, 0, 0, 0)

    def _read_partials(self, src: Spec, dst: Spec) -> None:
        """Set the attributes that describe the partial axes of both ends."""
        old = dict(src.partials)
        new = dict(dst.partials)
        # An axis stays partial if its reduction is the same, or changes between sum and average.
        at_both_ends = [axis for axis in old if axis in new]
        staying = [axis for axis in at_both_ends if _commute({old[axis], new[axis]})]
        self.partial = mask_of(new)
        self.partial_at_both_ends = mask_of(staying)
        # axes that change between sum and average
        self.rescaled = mask_of([axis for axis in staying if old[axis] != new[axis]])
        ops = {*old.values()}
        self.reductions_commute = _commute({*ops, *new.values()})
        self.joinable_op = _joinable_op(ops)
        widths = [wire_itemsize(op, src.dtype) for op in ops]
        self.accumulate_factor = max(widths, default=self.itemsize) // self.itemsize

    def _dims_of(self, spec: Spec) -> Dims:
        """Return the sharding of each dim of a spec."""
        dims = []
        for dim, sharded in enumerate(self.whole):
            sharding = spec.dim_sharding(dim)
            for count, axis in enumerate(sharding.axes, 1):
                sharded = self.finer.register(sharded, axis, sharding.outer(count))
            dims.append(sharded)
        return tuple(dims)

    def movable_axes(self, state: State) -> int:
        """Return the axes that may still change: all but those that are partial as in `dst`."""
        # Example: for [P, S(0)] -> [P, R] it is axis 1, 0b10.
        final = self.partial & ~(state.to_reduce | state.to_make_partial)
        return self.multi_rank_axes & ~final

    def after_reduce_scatter(self, before: State, dims: Dims) -> State:
        """Return the state with `dims` after a reduce-scatter over pending axes that shard them."""
        sharding_axes = sum(sharded.mask for sharded in dims)
        to_reduce = before.to_reduce & ~sharding_axes
        return self.state(dims, to_reduce, before.to_make_partial, before.to_rescale)


def _joinable_op(ops: set[str]) -> str:
    """Return the reduction as which sharded axes may join pending ones; "" if no reduction fits."""
    if ops <= _LINEAR:
        return "sum"
    if any(norm_order(op) for op in ops):
        return ""
    return min(ops)


def _check_one_reduction(spec: Spec) -> None:
    """Refuse a spec whose pending reductions do not commute."""
    ops = {op for _, op in spec.partials}
    if not _commute(ops):
        raise RedistributeError(
            f"{spec!r} mixes the reductions {sorted(ops)}, which do not commute, and a spec does "
            "not record their order. Only sum and avg can be mixed; reduce one of them before "
            "the other is created."
        )


def _over_large_axes(spec: Spec) -> Spec:
    """Return the spec with axes of one rank replicated."""
    sizes = spec.mesh.shape
    if 1 not in sizes:
        return spec
    placements = []
    for placement, size in zip(spec.placements, sizes, strict=True):
        placements.append(placement if size > 1 else Replicate())
    order = []
    for dim, axes in spec.shard_order:
        large = [axis for axis in axes if sizes[axis] > 1]
        order.append((dim, tuple(large)))
    return spec.with_(placements=placements, shard_order=tuple(order))


def _change(old: ShardedDim, new: ShardedDim) -> Change:
    """Return the change of a dim from an old to a new sharding."""
    pairs = zip(old.lineage, new.lineage, strict=False)
    *_, common = [outer for outer, other in pairs if outer is other]
    # Example: from axes (0, 1) to axes (0, 2), axis 1 leaves and axis 2 enters.
    leaving = old.mask & ~common.mask
    entering = new.mask & ~common.mask
    return Change(leaving, entering, _fraction_held(old, new) if leaving else 1.0)


def _fraction_held(old: ShardedDim, new: ShardedDim) -> float:
    """Return the smallest fraction of a rank's new interval of a dim that is in its old one."""
    if new in old.outers:
        # Example: 8 elements on a mesh of (2, 2), from both axes to one: 2 / 4.
        return old.longest / max(1, new.longest) if old.even else 0.0
    if old.axes != new.axes:
        # Example: from axes (0, 1) to axes (1, 0), some rank has nothing of its new shard.
        return 0.0
    # Example: 12 elements over 4 ranks, from sizes (3, 3, 3, 3) to (4, 4, 2, 2). Rank 1 has [3, 6)
    # and needs [4, 8), so it has 2 / 4. Ranks 0, 2 and 3 have 3 / 4, 1 / 2 and 1. The smallest
    # fraction is 0.5.
    fractions = []
    intervals = zip(spans(old.sharding.sizes), spans(new.sharding.sizes), strict=True)
    for (old_start, old_stop), (start, stop) in intervals:
        if start < stop:
            common = min(old_stop, stop) - max(old_start, start)
            fractions.append(max(0, common) / (stop - start))
    return min(fractions, default=1.0)


def wire_itemsize(op: str, dtype: torch.dtype) -> int:
    """Return the bytes of an element while it is reduced."""
    return dtype.itemsize if norm_order(op) is None else torch.float64.itemsize


def _commute(ops: set[str]) -> bool:
    """Tell whether these reductions may be done in any order.

    Sum and average commute; any other reduction commutes only with itself.
    """
    return len(ops) < 2 or ops <= _LINEAR


# --- the layouts to consider ----------------------------------------------------------------------


class Candidates:
    """The layouts that one hop of the search may lead to, on paths from one start.

    For few axes these are all layouts: every order of every subset of the axes on every tensor dim.
    If these are too many, an axis is replicated or shards one of at most three dims:

    1. the dim that it shards at the start,
    2. the dim that it shards in the goal,
    3. a parking dim, which it may shard meanwhile. The axis is then out of the way of other axes on
       its own dim, while its ranks still keep different shards.

    In that case the axes of a dim are in the order of the source or of the destination.
    """

    def __init__(self, space: Space, start: State) -> None:
        self.space = space
        self.ends = list(zip(start.dims, space.goal.dims, strict=True))
        # Choose k axes in any order, and divide this sequence among the dims. Example: 2 axes on 2
        # dims have 1 layout without sharding, 2 * 2 layouts by one axis and 2 * 3 by both.
        axes = space.movable_axes(start).bit_count()
        dims = max(1, len(self.ends))
        layouts = 0
        for k in range(axes + 1):
            orders = perm(axes, k)
            layouts += orders * comb(k + dims - 1, k)
        # whether all layouts are considered
        self.complete = layouts <= MOST_LAYOUTS

    def inside(self, outer: Dims, axes: int) -> list[Dims]:
        """Return layouts that shard `outer` further by some of these axes, `outer` itself first."""
        chosen = axes_of(axes)
        dims = range(len(outer))
        found: list[Dims] = []
        order_axes = cache(self._shardings_by_axes)
        # for each axis, the dims that it may shard; None if it shards none
        places: list[tuple[int | None, ...]] = []
        for axis in chosen:
            dims_of_axis = dims if self.complete else self._places(axis)
            places.append((None, *dims_of_axis))
        for dims_of_axes in product(*places):
            shardings = []
            for dim in dims:
                pairs = zip(chosen, dims_of_axes, strict=True)
                inner = tuple([axis for axis, place in pairs if place == dim])
                shardings.append(order_axes(dim, outer[dim], inner))
            found += product(*shardings)
        return found

    def dims_after_reduce_scatter(self, state: State) -> Dims:
        """Return the layout with pending axes on their dims of the goal, inside the other axes."""
        dims = []
        for old, (_, goal) in zip(state.dims, self.ends, strict=True):
            pending = [axis for axis in goal.axes if has_axis(state.to_reduce, axis)]
            dims.append(self._divide(old, pending)[-1])
        return tuple(dims)

    def dims_settled_on(self, state: State, axes: int, *, nested: bool) -> Dims:
        """Return the layout with these axes as in the goal and the other axes as they are.

        On one dim, the other axes are inside these axes (`nested`), or all axes are in ascending
        order.
        """
        dims = []
        for whole, old, (_, goal) in zip(self.space.whole, state.dims, self.ends, strict=True):
            # Example: the dim is sharded by axis 1, in the goal by axis 0, and axis 0 is settled.
            # The order is [0], then [0, 1].
            order = [axis for axis in goal.axes if has_axis(axes, axis)]
            order += [axis for axis in old.axes if not has_axis(axes, axis)]
            if not nested:
                order.sort()
            dims.append(self._divide(whole, order)[-1])
        return tuple(dims)

    def _shardings_by_axes(
        self, dim: int, outer: ShardedDim, axes: tuple[int, ...]
    ) -> list[ShardedDim]:
        """Return the shardings that divide the shards of a dim by all of these axes."""
        orders: Iterable[tuple[int, ...]] = permutations(axes)
        if not self.complete:
            start, goal = (end.axes for end in self.ends[dim])
            orders = [_in_order(axes, goal + start), _in_order(axes, start + goal)]
        found: dict[ShardedDim, None] = {}
        for order in orders:
            found |= dict.fromkeys(self._divide(outer, order))
        return list(found)

    def _divide(self, outer: ShardedDim, order: Iterable[int]) -> list[ShardedDim]:
        """Return the shardings that divide the shards of `outer` by these axes in order.

        The first one divides like torch.chunk; shardings with explicit sizes follow.
        """
        finer = self.space.finer
        found = [outer]
        for axis in order:
            found = [inner for sharded in found for inner in finer[sharded, axis]]
        return found

    def _places(self, axis: int) -> tuple[int, ...]:
        """Return the dims that an axis may shard: its present dim, its goal, and a parking dim."""
        axes_of_dims = [start.axes + goal.axes for start, goal in self.ends]
        at_ends = [d for d, axes in enumerate(axes_of_dims) if axis in axes]
        parking = []
        unsharded = []
        for d, (start, goal) in enumerate(self.ends):
            if d not in at_ends and self.space.finer[start, axis][0].even:
                parking.append(d)
                if not (start.axes or goal.axes):
                    unsharded.append(d)
        # Example: for S(0) -> S(2) with dim 1 as the parking dim, the dims are (0, 1, 2).
        first = (unsharded or parking)[:1]
        return tuple(sorted([*at_ends, *first]))


def _in_order(axes: tuple[int, ...], known: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes in a known order, unknown axes last.

    For example (0, 1, 2) in the order of (2, 0) is (2, 0, 1).
    """
    positions: dict[int, int] = {}
    for axis in known:
        positions.setdefault(axis, len(positions))
    return tuple(sorted(axes, key=lambda axis: positions.get(axis, len(known))))
