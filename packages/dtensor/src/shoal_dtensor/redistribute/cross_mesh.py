"""Plans from one mesh to another: the same ranks in another grid, fewer, more, or others altogether.

What is partial is reduced on the source mesh first; then one `Transfer` carries every block from
a rank that has it to those that need it; replicas on the destination mesh may each receive only
a part and gather the rest among themselves, if their links are better used so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ..errors import RedistributeError
from ..layout.boxes import volume
from ..layout.placements import Partial, Placement, Replicate, Shard
from .blocks import boxes_of_rank, flows
from .steps import Plan, Transfer

if TYPE_CHECKING:
    from ..layout.spec import Spec
    from .search.costs import Links


EXACT_RANKS = 32  # up to so many ranks a transfer is priced by its exact blocks (32 ranks: about 2 ms)


def plan_across(
    src: Spec,
    dst: Spec,
    within: Callable[[Spec, Spec], Plan],
    links: tuple[Links, Links],
    memory_limit: int | None = None,
) -> Plan:
    """The cheapest of the ways reduce - transfer - spread.

    Args:
        src: on one mesh.
        dst: on another.
        within: plans on one mesh.
        links: of the two meshes.
        memory_limit: bytes at the worst moment of the transfer; `within` observes it on its own.

    Raises:
        RedistributeError: if no way stays within the limit.
    """
    best: Plan | None = None
    leanest = 0
    for sent, received in product(_without_partials(src), _spread(dst)):
        first, last = within(src, sent), within(received, dst)
        step = _transfer(sent, received, links)
        leanest = min(leanest or step.peak_bytes, step.peak_bytes)
        if memory_limit is not None and step.peak_bytes > memory_limit:
            continue
        seconds = first.seconds + step.seconds + last.seconds
        if best is None or seconds < best.seconds:
            peak = max(first.peak_bytes, step.peak_bytes, last.peak_bytes)
            total = first.bytes_sent + step.bytes + last.bytes_sent
            best = Plan(src, dst, (*first.steps, step, *last.steps), seconds, total, peak)
    if best is None:
        raise RedistributeError(
            f"no transfer from {src!r} to {dst!r} stays within memory_limit={memory_limit} bytes: "
            f"the leanest needs {leanest}"
        )
    return best


def _without_partials(spec: Spec) -> Iterator[Spec]:
    """The spec with its partial axes reduced: everywhere, or scattered."""
    axes = [axis for axis, _ in spec.partials]
    yield _replaced(spec, axes, None)
    if axes:
        yield from _scattered(spec, axes)


def _spread(spec: Spec) -> Iterator[Spec]:
    """Specs that lead to `spec` on its own mesh: replicas made there, or sent ready."""
    yield from _without_partials(spec)
    copies = [axis for axis, p in enumerate(spec.placements) if not isinstance(p, Shard) and spec.mesh.shape[axis] > 1]
    if copies and copies != [axis for axis, _ in spec.partials]:
        yield from _scattered(spec, copies)


def _scattered(spec: Spec, axes: list[int]) -> Iterator[Spec]:
    """The spec with `axes` sharding the first dim that they shard evenly."""
    ways = prod(spec.mesh.shape[axis] for axis in axes)
    for dim, sharding in enumerate(map(spec.dim_sharding, range(spec.ndim))):
        if sharding.even and sharding.step and sharding.step % ways == 0:
            yield _replaced(spec, axes, dim)
            return


def _replaced(spec: Spec, axes: list[int], dim: int | None) -> Spec:
    """The spec with `axes` replicated, or sharding `dim` innermost; other partials replicated."""
    placements: list[Placement] = [Replicate() if isinstance(p, Partial) else p for p in spec.placements]
    order = dict(spec.shard_order)
    for axis in axes:
        placements[axis] = Replicate() if dim is None else Shard(dim)
    if dim is not None:
        order[dim] = (*order.get(dim, ()), *axes)
    return spec.with_(placements=placements, shard_order=tuple(sorted(order.items())))


def _transfer(src: Spec, dst: Spec, links: tuple[Links, Links]) -> Transfer:
    ranks = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks}))
    biggest = [max(volume(spec.box(c)) for c in _corners(spec)) * src.dtype.itemsize for spec in (src, dst)]
    if len(ranks) <= EXACT_RANKS:
        moved = _busiest(src, dst, ranks) * src.dtype.itemsize
    else:
        moved = max(biggest[1], biggest[1] * dst.mesh.size() // src.mesh.size())
    latency = max(link for side in links for link in side.latency)
    bandwidth = min(link for side in links for link in side.bandwidth)
    seconds = latency + moved / bandwidth
    peak = 2 * sum(biggest)
    return Transfer(src=src, dst=dst, ranks=ranks, seconds=seconds, bytes=moved, peak_bytes=peak)


def _corners(spec: Spec) -> Iterator[tuple[int, ...]]:
    """Coordinates of a mesh, of large meshes only the first: its shard is as large as any."""
    if spec.mesh.size() > EXACT_RANKS and spec.even:
        yield (0,) * spec.mesh.ndim
        return
    yield from product(*map(range, spec.mesh.shape))


def _busiest(src: Spec, dst: Spec, ranks: tuple[int, ...]) -> int:
    """The largest number of elements that a rank sends or receives."""
    loads: Counter[tuple[str, int]] = Counter()
    for sender, receiver, box in flows(*([boxes_of_rank(spec, rank) for rank in ranks] for spec in (src, dst))):
        loads["sends", sender] += volume(box)
        loads["receives", receiver] += volume(box)
    return max(loads.values(), default=0)
