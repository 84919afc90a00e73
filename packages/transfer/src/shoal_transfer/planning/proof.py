"""The proof of a plan: its routes write each element of each target box once, as the mapping says.

The proof checks the finished routes against the manifests and the mapping, and does not depend on
how the planner found them. If several tensors share a table, the proof holds for each of them: the
tensors differ only in names and in which of a route's senders is used, and the proof covers all
senders of a route.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shoal_dtensor.internal import Box, format_box

from ..errors import ProofError
from ..manifest.records import Holding
from ..mapping.assignment import Assignment
from ..mapping.regions import (
    Region,
    contains,
    count_elements,
    first_gap,
    first_overlap,
    format_region,
    intersect_regions,
    region_of_box,
)
from .routes import Route, RouteTable


def prove(table: RouteTable) -> None:
    """Prove the routes of one target tensor.

    Raises:
        ProofError: the message names the tensor and the box.
    """
    by_holding = defaultdict[Holding, list[Route]](list)
    # Routes to replicas share their part and senders, which are proven once.
    proven = set[tuple[int, ...]]()
    for route in table.routes:
        by_holding[route.receiver].append(route)
        key = (id(route.part), id(route.senders), id(route.copied))
        if key in proven:
            continue
        proven.add(key)
        _prove_mapping(table, route.part)
        _prove_sender(table, route)
    covers = set[tuple[Box, frozenset[int]]]()
    for holding in table.record.holdings:
        routes = by_holding.pop(holding, [])
        regions = [route.part.region for route in routes]
        cover = (holding.box, frozenset(id(route.part) for route in routes))
        if len(cover[1]) < len(routes) or cover not in covers:
            _prove_cover(table, holding, regions)
            covers.add(cover)
    if by_holding:
        route = next(iter(by_holding.values()))[0]
        raise ProofError(f"{route.part}: rank {route.receiver.rank} does not hold these elements")


def _prove_cover(table: RouteTable, holding: Holding, regions: Sequence[Region]) -> None:
    """Prove that the regions are disjoint and cover the box of a holding."""
    place = f"{table.record.name!r}{format_box(holding.box)} on target rank {holding.rank}"
    box = region_of_box(holding.box)
    for region in regions:
        if not contains(box, region):
            raise ProofError(f"{place}: {format_region(region)} is outside of the box")
    twice = first_overlap(regions)
    if twice is not None:
        common = intersect_regions(regions[twice[0]], regions[twice[1]])
        raise ProofError(f"{place}: {format_region(common or ())} is written twice")
    if sum(map(count_elements, regions)) != count_elements(box):
        starts = [indices.start for indices in box]
        inside = [_shifted(region, starts) for region in regions]
        gap = first_gap(inside, [len(indices) for indices in box]) or ()
        gap = _shifted(gap, [-start for start in starts])
        raise ProofError(f"{place}: {format_region(gap)} is not written")


def _prove_mapping(table: RouteTable, part: Assignment) -> None:
    """Prove that a part is what the mapping assigns to its target elements."""
    left = count_elements(part.region)
    for assignment in table.parts:
        expected = assignment.restricted_to(part.region)
        if expected is None:
            continue
        got = part.restricted_to(expected.region)
        if got != expected:
            raise ProofError(f"the plan has {got}, but the mapping has {expected}")
        left -= count_elements(expected.region)
    if left:
        raise ProofError(f"{part}: the mapping does not assign {left} of these elements")


def _prove_sender(table: RouteTable, route: Route) -> None:
    """Prove that each sender of a route holds the elements that the route reads."""
    part = route.part
    if part.source is None:
        return
    if route.copied is not None:
        arrived = route.copied.part
        is_in_order = route.copied.stage < route.stage and route.copied.source == route.source
        is_at_rank = not route.is_local or route.copied.receiver.rank == route.receiver.rank
        if (
            not is_in_order
            or not is_at_rank
            or not contains(arrived.source_region, part.source_region)
        ):
            raise ProofError(f"{part}: copies elements that have not arrived by {arrived}")
        return
    if not route.senders:
        raise ProofError(f"{part}: no rank sends these elements to rank {route.receiver.rank}")
    held = table.held_by(route.source)
    for holding in route.senders:
        is_held = holding in held and contains(region_of_box(holding.box), part.source_region)
        if not is_held:
            raise ProofError(f"{part}: source rank {holding.rank} does not hold these elements")


def _shifted(region: Region, distances: Sequence[int]) -> Region:
    shifted = []
    for indices, distance in zip(region, distances, strict=True):
        shifted.append(range(indices.start - distance, indices.stop - distance, indices.step))
    return tuple(shifted)
