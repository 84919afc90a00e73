"""Exact numbers of bytes between ranks, for reports, pictures and lower bounds.

Blocks are counted as if they were sent directly. Ring and tree algorithms route the bytes over
other links, but a rank receives the same total.
"""

from __future__ import annotations

from itertools import product
from math import prod
from operator import attrgetter
from typing import NamedTuple

from ..layout.boxes import intersect, volume
from ..layout.placements import Partial
from ..layout.spec import Spec
from .execution.rank_steps import blocks_of, members
from .search.space import wire_itemsize
from .steps import Plan, Step


def plan_traffic(plan: Plan) -> dict[tuple[int, int], float]:
    """Return the bytes by (sender, receiver) over all steps of a plan.

    Ranks of the mesh are numbered in row-major order.
    """
    traffic: dict[tuple[int, int], float] = {}
    for step in filter(attrgetter("communicates"), plan.steps):
        itemsize = wire_itemsize(step.op, step.src.dtype)
        coordinates = product(*map(range, step.src.mesh.shape))
        # Example: on a mesh of (2, 2) the rank at (1, 0) has the number 2.
        numbers = {coordinate: number for number, coordinate in enumerate(coordinates)}
        for coordinate, receiver in numbers.items():
            for sender, elements in _received_elements(step, coordinate).items():
                if sender != coordinate and elements:
                    pair = (numbers[sender], receiver)
                    traffic[pair] = traffic.get(pair, 0.0) + elements * itemsize
    return traffic


def _received_elements(step: Step, coordinate: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return the elements that the rank at `coordinate` receives from each rank of its group."""
    group = members(step.src, step.axes, coordinate)
    match step.name:
        case "ReduceScatter":
            return dict.fromkeys(group, float(volume(step.dst.box(coordinate))))
        case "AllReduce":
            # Each rank reduces its part of the box, then receives the reduced parts of the others.
            # Example: 8 elements on 4 ranks are 2 + 2 elements from each rank.
            elements = volume(step.src.box(coordinate))
            return dict.fromkeys(group, 2 * elements / len(group))
    blocks = blocks_of(step, coordinate)
    return {group[member]: float(volume(box)) for member, box in blocks.receives}


def least_bytes(src: Spec, dst: Spec) -> float:
    """Return a lower bound on the bytes that a rank receives on average with any algorithm."""
    mesh = src.mesh
    axes = _partial_axes(src, dst)
    terms = prod(mesh.shape[axis] for axis in axes.reduced)
    if terms > 1:
        return _least_bytes_of_reduction(src, dst, axes)
    # elements that ranks hold under `dst` and do not hold under `src`, over all ranks
    lacking = 0
    sizes = [*mesh.shape]
    for axis in axes.made:
        sizes[axis] = 1
    ranges = map(range, sizes)
    for coordinate in product(*ranges):
        wanted = dst.box(coordinate)
        # Along axes that become partial one rank holds the values, and this can be any rank.
        held = {src.box(member) for member in members(dst, axes.made, coordinate)}
        common = 0
        for box in held:
            both = intersect(box, wanted)
            if both is not None:
                common += volume(both)
        # Example: 4 x 4 from S(0) to S(1) on 2 ranks. A rank wants 8 elements and has 4 of them.
        lacking += max(0, volume(wanted) - common)
    return src.dtype.itemsize * lacking / mesh.size()


class _PartialAxes(NamedTuple):
    """The axes that are partial in a source or a destination and need work.

    Attributes:
        reduced: axes to reduce.
        made: axes to make partial.
    """

    reduced: list[int]
    made: list[int]


def _partial_axes(src: Spec, dst: Spec) -> _PartialAxes:
    """Return the axes to reduce and to make partial.

    An axis that only changes between sum and average is neither, because no bytes are sent for it.
    """
    reduced = []
    made = []
    for axis, (before, after) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if before is after:
            continue
        partials = [placement for placement in (before, after) if isinstance(placement, Partial)]
        are_linear = {placement.reduce_op for placement in partials} <= {"sum", "avg"}
        if len(partials) == 2 and are_linear:
            continue
        if isinstance(before, Partial):
            reduced.append(axis)
        if isinstance(after, Partial):
            made.append(axis)
    return _PartialAxes(reduced, made)


def _least_bytes_of_reduction(src: Spec, dst: Spec, axes: _PartialAxes) -> float:
    """Return the lower bound for adding up p terms and leaving the result on q ranks.

    Every element is transferred p - 1 times to be added and q - 1 times to be held.
    """
    mesh = src.mesh
    ranks = mesh.size()
    terms = prod(mesh.shape[axis] for axis in axes.reduced)
    # Along axes that stay partial, every rank reduces terms of its own.
    partial_axes = [axis for axis, _ in src.partials]
    groups = prod(mesh.shape[axis] for axis in partial_axes if axis not in axes.reduced)
    shards = prod(mesh.shape[axis] for sharding in dst.dim_shardings for axis in sharding.axes)
    made = prod(mesh.shape[axis] for axis in axes.made)
    holders = max(1, ranks // groups // shards // made)
    transfers = (terms - 1) + (holders - 1)
    # Example: 64 elements, P -> R over 4 ranks. 64 * (3 + 3) / 4 = 96 elements for each rank.
    return src.dtype.itemsize * prod(src.shape) * groups * transfers / ranks
