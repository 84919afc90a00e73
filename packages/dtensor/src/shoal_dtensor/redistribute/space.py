"""The search space between two specs: states and moves as small integers.

A state says, for each tensor dim, which mesh axes cut it (outermost first), and which axes are
still to be reduced; every other axis is replicated.  An entry of a dim is a token: three times
the axis, plus how it cuts (`CHUNK` like torch.chunk, `AS_SRC` / `AS_DST` as the explicit sizes
of that spec say), so equal tuples of tokens are equal cuts and a prefix is a coarser cut.
Axes of size 1 are left out: nothing ever happens on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from ..chunks import Cut, cut_dim
from ..errors import RedistributeError
from ..placements import Partial, Placement, Shard
from ..spec import Spec
from .norms import wire_itemsize
from .pricing import Links

__all__ = ["AS_DST", "AS_SRC", "CHUNK", "Dims", "Move", "Space", "Tokens", "shared", "valid_tokens"]

Tokens = tuple[int, ...]
Dims = tuple[Tokens, ...]

CHUNK, AS_SRC, AS_DST = 0, 1, 2
_LINEAR = frozenset({"sum", "avg"})


class Move(NamedTuple):
    """One edge of the search: what `plan` makes a step of.

    Attributes:
        kind: name of the step class.
        axes: mesh axes, in the order of the collective's blocks.
        tensor_dims: dims that are cut or joined; (from, to) of an all-to-all.
        dims: the state's cuts afterwards.
        pending: axes still to be reduced afterwards.
        seconds, received, peak: time, bytes of the busiest rank, memory of input, output and buffers.
    """

    kind: str
    axes: tuple[int, ...]
    tensor_dims: tuple[int, ...]
    dims: Dims
    pending: tuple[int, ...]
    seconds: float
    received: int
    peak: int


class Space:
    """States between `src` and `dst`, which cover the same tensor on the same mesh.

    Attributes:
        start, goal: cuts of the two specs.
        pending: axes that are partial in `src` and have to be reduced.
        becoming: axes that are partial in `dst` but not (so) in `src`.
        largest: bytes of the larger one of the two local tensors.
        bulky: whether copying a local tensor takes longer than starting a collective.
        scaled: axes that only change between sum and average.
        widening: how much wider elements are while they are reduced.
        ranks: number of ranks over which data move: axes that stay partial count as separate tensors.

    Raises:
        RedistributeError: if reductions of different kinds would have to be reordered.
    """

    __slots__ = (
        "_boxes",
        "_shares",
        "_widths",
        "becoming",
        "bulky",
        "goal",
        "itemsize",
        "largest",
        "links",
        "pending",
        "placements",
        "ranks",
        "scaled",
        "shape",
        "start",
        "widening",
    )

    def __init__(self, src: Spec, dst: Spec, links: Links) -> None:
        self.links = links
        self.shape = tuple(src.shape)
        self.itemsize = src.dtype.itemsize
        self.placements: tuple[tuple[Placement, ...], tuple[Placement, ...]] = (src.placements, dst.placements)
        self._widths: dict[tuple[int, Tokens], tuple[int, bool]] = {}
        self._boxes: dict[Dims, int] = {}
        self._shares: dict[tuple[int, Tokens, Tokens], float] = {}
        sizes = links.sizes
        kept = [a for a, n in enumerate(sizes) if n > 1 and _keeps(src.placements[a], dst.placements[a])]
        self.scaled = tuple(a for a in kept if src.placements[a] is not dst.placements[a] and sizes[a] > 1)
        self.pending = tuple(a for a, _ in src.partials if sizes[a] > 1 and a not in kept)
        self.becoming = tuple(a for a, _ in dst.partials if sizes[a] > 1 and a not in kept)
        widths = [wire_itemsize(op, src.dtype) for a, op in src.partials if a in self.pending]
        self.widening = max(widths, default=self.itemsize) // self.itemsize
        self.ranks = prod(n for a, n in enumerate(sizes) if a not in kept)
        self.start = self._tokens(src, AS_SRC, None)
        self.goal = self._tokens(dst, AS_DST, self.start)
        self.largest = max(self.box(self.start), self.box(self.goal))
        self.bulky = links.copy(self.largest) > min(links.latency, default=0.0)
        if self.pending or self.becoming:
            _check_ops(src, dst)

    def _tokens(self, spec: Spec, kind: int, other: Dims | None) -> Dims:
        dims = []
        for dim, cut in enumerate(map(spec.cut, range(spec.ndim))):
            tokens: Tokens = ()
            for axis, ways in zip(cut.axes, cut.axis_sizes, strict=True):
                if ways == 1:
                    continue
                placement = spec.placements[axis]
                assert isinstance(placement, Shard), "only sharded axes cut a dim"
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
        """Length of the longest piece of a dim so cut, and whether all pieces are that long."""
        key = (dim, tokens)
        found = self._widths.get(key)
        if found is not None:
            return found
        if not tokens:
            found = (self.shape[dim], True)
        else:
            longest, even = self.width(dim, tokens[:-1])
            axis, kind = divmod(tokens[-1], 3)
            placement = self.placements[kind - 1][axis] if kind else None
            sizes, unit = (placement.sizes, placement.multiple_of) if isinstance(placement, Shard) else (None, 1)
            if sizes is not None:
                found = (max(sizes), len(set(sizes)) == 1)
            else:
                ways = self.links.sizes[axis]
                found = (min(longest, -(-longest // (ways * unit)) * unit), even and longest % (ways * unit) == 0)
        self._widths[key] = found
        return found

    def box(self, dims: Dims) -> int:
        """Bytes of the largest local box under these cuts."""
        found = self._boxes.get(dims)
        if found is None:
            found = self.itemsize
            for dim, tokens in enumerate(dims):
                found *= self.width(dim, tokens)[0]
            self._boxes[dims] = found
        return found

    def even(self, dims: Dims, of: Iterable[int]) -> bool:
        """Whether all pieces of the tensor dims `of` are equally long."""
        return all(self.width(dim, dims[dim])[1] for dim in of)

    def missing(self, dims: Dims, after: Dims) -> int:
        """Bytes that the rank with the least in common has to receive to get from one box to the other."""
        whole = self.box(after)
        kept = float(whole)
        for dim, (old, new) in enumerate(zip(dims, after, strict=True)):
            if old != new and new[: len(old)] != old:
                kept *= self.common(dim, old, new)
        return whole - int(kept)

    def common(self, dim: int, old: Tokens, new: Tokens) -> float:
        """The smallest share of a rank's new interval that lies in its old one."""
        length, even = self.width(dim, old)
        if old[: len(new)] == new:
            return length / max(1, self.width(dim, new)[0]) if even else 0.0
        if [t // 3 for t in old] != [t // 3 for t in new]:
            return 0.0
        before, behind = self.leaves(dim, old), self.leaves(dim, new)
        worst = 1.0
        for a, b, n, m in zip(
            accumulate(before, initial=0), accumulate(behind, initial=0), before, behind, strict=False
        ):
            if m:
                worst = min(worst, max(0, min(a + n, b + m) - max(a, b)) / m)
        return worst

    def average_missing(self, dims: Dims, after: Dims) -> float:
        """Bytes that a rank has to receive on average to get from one box to the other."""
        whole = float(self.box(after))
        kept = whole
        for dim, (old, new) in enumerate(zip(dims, after, strict=True)):
            if old != new and new[: len(old)] != old:
                kept *= self._average_common(dim, old, new)
        return whole - kept

    def _average_common(self, dim: int, old: Tokens, new: Tokens) -> float:
        """The share of a rank's new interval that lies in its old one, averaged over the ranks."""
        key = (dim, old, new)
        found = self._shares.get(key)
        if found is None:
            before, behind = self._cut(dim, old), self._cut(dim, new)
            axes = sorted({*before.axes, *behind.axes})
            both, wanted = 0, 0
            for position in product(*(range(self.links.sizes[a]) for a in axes)):
                at = [0] * len(self.links.sizes)
                for axis, i in zip(axes, position, strict=True):
                    at[axis] = i
                (start, stop), (k, m) = before.interval(at), behind.interval(at)
                both += max(0, min(stop, m) - max(start, k))
                wanted += m - k
            found = self._shares[key] = both / max(1, wanted)
        return found

    def leaves(self, dim: int, tokens: Tokens) -> tuple[int, ...]:
        """Lengths of all pieces of a dim so cut."""
        return self._cut(dim, tokens).sizes

    def _cut(self, dim: int, tokens: Tokens) -> Cut:
        placements: list[Placement] = [Partial()] * len(self.links.sizes)
        for token in tokens:
            placements[token // 3] = self.placement(token, dim)
        return cut_dim(self.shape[dim], [t // 3 for t in tokens], placements, self.links.sizes)


def shared(old: Tokens, new: Tokens) -> int:
    """Number of outer cuts that two cuts of a dim have in common.

    Example:
        >>> shared((0, 3), (0, 6))
        1
    """
    length = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        length += 1
    return length


def valid_tokens(tokens: Tokens, old: Tokens, new: Tokens) -> Tokens:
    """Tokens with explicit sizes only where everything outside them is as those sizes assume."""
    for i, token in enumerate(tokens):
        if token % 3 != CHUNK and tokens[: i + 1] not in (old[: i + 1], new[: i + 1]):
            return valid_tokens((*tokens[:i], token // 3 * 3, *tokens[i + 1 :]), old, new)
    return tokens


def _keeps(src: Placement, dst: Placement) -> bool:
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
