"""Exact numbers of bytes between ranks, for reports, pictures and lower bounds.

Ring and tree algorithms route the same bytes over other links; the total that a rank has to receive
does not depend on the links, so blocks are counted as if sent directly.
"""

from __future__ import annotations

from itertools import product
from math import prod
from operator import attrgetter

from ..layout.boxes import intersect, volume
from ..layout.placements import Partial
from ..layout.spec import Spec
from .execution.kernels import blocks_of, members
from .search.space import wire_itemsize
from .steps import Plan, Step


def plan_traffic(plan: Plan) -> dict[tuple[int, int], float]:
    """Return the bytes by (sender, receiver) over all steps of a plan.

    Ranks of the mesh are counted row-major.
    """
    traffic: dict[tuple[int, int], float] = {}
    for step in filter(attrgetter("communicates"), plan.steps):
        itemsize = wire_itemsize(step.op, step.src.dtype)
        # (1, 0): 2
        numbers = {c: number for number, c in enumerate(product(*map(range, step.src.mesh.shape)))}
        for c, me in numbers.items():
            for other, elements in _received(step, c).items():
                if other != c and elements:
                    pair = numbers[other], me
                    traffic[pair] = traffic.get(pair, 0.0) + elements * itemsize
    return traffic


def _received(step: Step, c: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return the elements that the rank at `c` receives from each other rank of its group."""
    group = members(step.src, step.axes, c)
    match step.name:
        case "ReduceScatter":
            return dict.fromkeys(group, float(volume(step.dst.box(c))))
        case "AllReduce":
            # reduce one's part of it, then get the parts of the others
            # 8 elements, 4 ranks: 4 each
            return dict.fromkeys(group, 2 * volume(step.src.box(c)) / len(group))
    return {group[m]: float(volume(box)) for m, box in blocks_of(step, c).receives}


def least_bytes(src: Spec, dst: Spec) -> float:
    """Return a lower bound on the bytes that a rank receives on average with any algorithm."""
    mesh = src.mesh
    free = [
        axis
        for axis, p in enumerate(dst.placements)
        if isinstance(p, Partial) and src.placements[axis] is not p
    ]
    reduced = [axis for axis, _ in src.partials if dst.placements[axis] is not src.placements[axis]]
    ops = {axis: {op for a, op in (*src.partials, *dst.partials) if a == axis} for axis in reduced}
    linear = [
        a for a in reduced if isinstance(dst.placements[a], Partial) and ops[a] <= {"sum", "avg"}
    ]
    reduced = [a for a in reduced if a not in linear]
    free = [a for a in free if a not in linear]
    ranks = mesh.size()
    values = prod(mesh.shape[a] for a in reduced)
    # to add up p values and leave the result on q ranks: p - 1 and q - 1 transfers of every element
    if values > 1:
        kept = prod(mesh.shape[a] for a, _ in src.partials if a not in reduced)
        holders = (
            ranks
            // kept
            // prod(mesh.shape[a] for sharding in dst.dim_shardings for a in sharding.axes)
        )
        holders //= prod(mesh.shape[a] for a in free)
        # 64 * 6 / 4
        return (
            src.dtype.itemsize * prod(src.shape) * kept * (values - 1 + max(1, holders) - 1) / ranks
        )
    # the elements of boxes under `dst` that are not in boxes under `src`
    total = 0
    for c in product(*(range(1 if axis in free else n) for axis, n in enumerate(mesh.shape))):
        wanted = dst.box(c)
        have = {src.box(m) for m in members(dst, free, c)}
        common = sum(volume(both) for box in have if (both := intersect(box, wanted)) is not None)
        total += max(0, volume(wanted) - common)  # 4 x 4, S(0) -> S(1) on 2: 8 - 4
    return src.dtype.itemsize * total / ranks
