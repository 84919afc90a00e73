"""The search space between two specs: states and edges as small integers.

A state says, for each tensor dim, which mesh axes shard it, outermost first; which axes are still to be reduced; and
whether values are partial as in the destination already.  Every other axis is replicated.

An entry of a dim is a token (see `tokens`).  Axes of size 1 are left out: nothing ever happens on them.

    mesh (2, 4), shape (8, 6)           dim 0     dim 1
    src (S(0), S(0))                    (0, 3)    ()       axis 0 outside, axis 1 inside: (1, 6) elements a rank
    dst (R, S(1, sizes=(3, 1, 1, 1)))   ()        (5,)     5 = 3 * axis 1 + AS_DST
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, combinations
from typing import TYPE_CHECKING

from ...errors import RedistributeError
from ...layout.dim_sharding import shard_dim
from ...layout.placements import Partial, Placement, Shard, norm_order
from ..reductions import wire_itemsize
from .tokens import AS_DST, AS_SRC, CHUNK, Dims, Tokens

if TYPE_CHECKING:
    from ...layout.spec import Spec
    from ..step_cost import Links


_LINEAR = frozenset({"sum", "avg"})


class Space:
    """States between `src` and `dst`, which describe the same tensor on the same mesh.

    Attributes:
        start, goal: shardings of the two specs.
        moving: axes over which anything may happen: all but those of size 1 and those that stay partial.
        pending: axes that are partial in `src` and have to be reduced.
        becoming: axes that are partial in `dst` but not (so) in `src`.
        remade: axes that are partial in both and nevertheless reduced and made partial again.
        scaled: axes that only change between sum and average.
        mixing: whether values may be partial as in `dst` while others are still to be reduced.
        joining: op with which sharded axes may be made partial to be reduced with the pending ones; "" if none fits.
        conversions: local steps that make values partial as in `dst`: one for `becoming`, one for `scaled`.
        widening: how much wider elements are while they are reduced.

    Raises:
        RedistributeError: if reductions of different kinds would have to be reordered.
    """

    __slots__ = (
        "_boxes", "_widths", "becoming", "conversions", "goal", "itemsize", "joining", "links", "mixing", "moving",
        "pending", "placements", "remade", "scaled", "shape", "start", "widening",
    )  # fmt: skip

    def __init__(self, src: Spec, dst: Spec, links: Links, remade: tuple[int, ...] = ()) -> None:
        self.links: Links = links
        self.remade: tuple[int, ...] = remade
        self.shape: tuple[int, ...] = tuple(src.shape)
        self.itemsize: int = src.dtype.itemsize
        self.placements: tuple[tuple[Placement, ...], tuple[Placement, ...]] = (src.placements, dst.placements)
        self._widths: dict[tuple[int, Tokens], tuple[int, bool]] = {}
        self._boxes: dict[Dims, int] = {}
        large = [a for a, n in enumerate(links.sizes) if n > 1]
        kept = {a for a in large if a not in remade and _stays_partial(src.placements[a], dst.placements[a])}
        self.moving: tuple[int, ...] = tuple(a for a in large if a not in kept)
        self.scaled: tuple[int, ...] = tuple(
            a for a in large if a in kept and src.placements[a] is not dst.placements[a]
        )
        self.pending: tuple[int, ...] = tuple(a for a, _ in src.partials if a in self.moving)
        self.becoming: tuple[int, ...] = tuple(a for a, _ in dst.partials if a in self.moving)
        ops = {op for a, op in src.partials if a in self.pending}
        self.joining: str = "sum" if ops <= _LINEAR else min(ops) if not any(map(norm_order, ops)) else ""
        ops |= {op for a, op in dst.partials if a in self.becoming}
        self.mixing: bool = len(ops) < 2 or ops <= _LINEAR
        self.conversions: int = bool(self.becoming) + bool(self.scaled)
        widths = [wire_itemsize(op, src.dtype) for a, op in src.partials if a in self.pending]
        self.widening: int = max(widths, default=self.itemsize) // self.itemsize
        self.start: Dims = self._tokens(src, AS_SRC, None)
        self.goal: Dims = self._tokens(dst, AS_DST, self.start)
        if self.pending or self.becoming:
            _check_ops(src, dst)

    def _tokens(self, spec: Spec, kind: int, other: Dims | None) -> Dims:
        dims = []
        for dim, sharding in enumerate(map(spec.dim_sharding, range(spec.ndim))):
            tokens: Tokens = ()
            for axis, ways in zip(sharding.axes, sharding.axis_sizes, strict=True):
                if ways == 1:
                    continue
                placement = spec.placements[axis]
                assert isinstance(placement, Shard), "axes of a dim sharding have Shard placements"
                token = 3 * axis
                if placement.sizes is not None or placement.multiple_of != 1:
                    token += kind
                    twin = (*tokens, 3 * axis + AS_SRC)
                    if other is not None and other[dim][: len(twin)] == twin and self.placements[0][axis] is placement:
                        token = 3 * axis + AS_SRC
                tokens = (*tokens, token)
            dims.append(tokens)
        return tuple(dims)

    def placement(self, token: int, dim: int) -> Placement:
        """The placement that a token stands for on a tensor dim."""
        kind = token % 3
        return Shard(dim) if kind == CHUNK else self.placements[kind - 1][token // 3]

    def width(self, dim: int, tokens: Tokens) -> tuple[int, bool]:
        """Length of the longest shard of a dim under these tokens, and whether all shards are that long."""
        key = (dim, tokens)
        known = self._widths.get(key)
        if known is not None:
            return known
        if not tokens:
            known = (self.shape[dim], True)
        else:
            longest, even = self.width(dim, tokens[:-1])
            axis, kind = divmod(tokens[-1], 3)
            placement = self.placements[kind - 1][axis] if kind else None
            sizes, unit = (placement.sizes, placement.multiple_of) if isinstance(placement, Shard) else (None, 1)
            if sizes is not None:
                known = (max(sizes), len(set(sizes)) == 1)
            else:
                ways = self.links.sizes[axis]
                known = (min(longest, -(-longest // (ways * unit)) * unit), even and longest % (ways * unit) == 0)
        self._widths[key] = known
        return known

    def box(self, dims: Dims) -> int:
        """Bytes of the largest local box under these shardings."""
        known = self._boxes.get(dims)
        if known is None:
            known = self.itemsize
            for dim, tokens in enumerate(dims):
                known *= self.width(dim, tokens)[0]
            self._boxes[dims] = known
        return known

    def even(self, dims: Dims, of: Iterable[int]) -> bool:
        """Whether all shards of the tensor dims `of` are equally long."""
        return all(self.width(dim, dims[dim])[1] for dim in of)

    def common(self, dim: int, old: Tokens, new: Tokens) -> float:
        """The smallest fraction of a rank's new interval that is in its old one.

        12 elements over 4 ranks as (3, 3, 3, 3), then as (4, 4, 2, 2): rank 1 has [3, 6) and needs [4, 8), so 2 / 4 is
        there already; ranks 0, 2 and 3 have 3 / 4, 1 / 2 and 1.  The smallest is 0.5.
        """
        length, even = self.width(dim, old)
        if old[: len(new)] == new:
            return length / max(1, self.width(dim, new)[0]) if even else 0.0
        if [t // 3 for t in old] != [t // 3 for t in new]:
            return 0.0
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
            placements[token // 3] = self.placement(token, dim)
        return shard_dim(self.shape[dim], [t // 3 for t in tokens], placements, self.links.sizes).sizes


def spaces(src: Spec, dst: Spec, links: Links) -> Iterator[Space]:
    """The space in which axes that are partial in both specs stay so, and those in which some are reduced and remade.

    mesh (4 fast, 2 slow), P, S(0) -> P, R: to reduce-scatter over the fast axis first leaves a quarter to gather over
    the slow one, and making values partial again costs no communication.
    """
    space = Space(src, dst, links)
    yield space
    kept = [a for a, n in enumerate(links.sizes) if n > 1 and a not in space.moving]
    if space.start == space.goal and not space.pending and not space.becoming:
        return
    if len({op for _, op in (*src.partials, *dst.partials)} - _LINEAR) > 1:
        return
    for count in range(1, len(kept) + 1):
        for remade in combinations(kept, count):
            yield Space(src, dst, links, remade)


def _stays_partial(src: Placement, dst: Placement) -> bool:
    """Whether an axis stays partial throughout: same op, or sum and average, which differ by a factor."""
    if not (isinstance(src, Partial) and isinstance(dst, Partial)):
        return False
    return src is dst or {src.reduce_op, dst.reduce_op} == _LINEAR


def _check_ops(src: Spec, dst: Spec) -> None:
    """Sum and average commute with each other; any other mixture means different things in different orders."""
    for spec in (src, dst):
        ops = {op for axis, op in spec.partials if spec.mesh.shape[axis] > 1}
        if len(ops) > 1 and not ops <= _LINEAR:
            raise RedistributeError(
                f"{spec!r} mixes the reductions {sorted(ops)}: their order matters and a spec has none, so they "
                "cannot be reduced or made. Only sum and avg mix; reduce one of them before the other comes into being."
            )
