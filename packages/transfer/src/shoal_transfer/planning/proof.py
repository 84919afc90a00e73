"""The proof of a plan: its routes write each element of each target box once, as the mapping says.

The proof checks the finished routes against the manifests and the mapping, and does not depend on
how the planner found them. If several tensors share a table, the proof holds for each of them.
These tensors have other names, and each may use another sender of a route, but the proof covers all
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
    # `RouteTable` uses the same objects in the routes to all replicas, so they are proven once. For
    # equal objects that are not the same, the proof only runs again.
    proven = set[tuple[int, ...]]()
    for route in table.routes:
        by_holding[route.receiver].append(route)
        key = (id(route.part), id(route.senders), id(route.copied))
        if key in proven:
            continue
        proven.add(key)
        _prove_mapping(table, route.part)
        _prove_sender(table, route)
    proven_covers = set[tuple[Box, frozenset[int]]]()
    for holding in table.record.holdings:
        routes = by_holding.pop(holding, [])
        # Replicas have the same box, and routes with the same parts.
        distinct_parts = frozenset(id(route.part) for route in routes)
        cover = (holding.box, distinct_parts)
        has_part_twice = len(distinct_parts) < len(routes)
        if has_part_twice or cover not in proven_covers:
            regions = [route.part.region for route in routes]
            _prove_cover(table, holding, regions)
            proven_covers.add(cover)
    if by_holding:
        route = next(iter(by_holding.values()))[0]
        raise ProofError(f"{route.part}: rank {route.receiver.rank} does not hold these elements")


def _prove_cover(table: RouteTable, holding: Holding, regions: Sequence[Region]) -> None:
    """Prove that the regions are disjoint and cover the box of a holding."""
    place = f"{table.record.name!r}{format_box(holding.box)} on target rank {holding.rank}"
    region_of_holding = region_of_box(holding.box)
    for region in regions:
        if not contains(region_of_holding, region):
            raise ProofError(f"{place}: {format_region(region)} is outside of the box")
    twice = first_overlap(regions)
    if twice is not None:
        common = intersect_regions(regions[twice[0]], regions[twice[1]])
        raise ProofError(f"{place}: {format_region(common or ())} is written twice")
    # The regions are disjoint and in the box, so they cover it if they have as many elements.
    if sum(map(count_elements, regions)) != count_elements(region_of_holding):
        # `first_gap` takes regions that count from the start of the box.
        starts = [indices.start for indices in region_of_holding]
        back_to_zero = [-start for start in starts]
        from_start = [_shift_region(region, back_to_zero) for region in regions]
        lengths = [len(indices) for indices in region_of_holding]
        gap = first_gap(from_start, lengths) or ()
        raise ProofError(f"{place}: {format_region(_shift_region(gap, starts))} is not written")


def _prove_mapping(table: RouteTable, part: Assignment) -> None:
    """Prove that a part is what the mapping assigns to its target elements."""
    # The regions of `table.parts` are disjoint: `WeightMapping` refuses others. So each element
    # that is assigned is counted once.
    unassigned = count_elements(part.region)
    for assignment in table.parts:
        expected = assignment.restricted_to(part.region)
        if expected is None:
            continue
        got = part.restricted_to(expected.region)
        if got != expected:
            raise ProofError(f"the plan has {got}, but the mapping has {expected}")
        unassigned -= count_elements(expected.region)
    if unassigned:
        raise ProofError(f"{part}: the mapping does not assign {unassigned} of these elements")


def _prove_sender(table: RouteTable, route: Route) -> None:
    """Prove that each sender of a route holds the elements that the route reads."""
    part = route.part
    if part.source is None:
        return
    if route.copied is not None:
        _prove_copy(route, route.copied)
        return
    if not route.senders:
        raise ProofError(f"{part}: no rank sends these elements to rank {route.receiver.rank}")
    held = table.held_by(route.source)
    for holding in route.senders:
        is_held = holding in held and contains(region_of_box(holding.box), part.source_region)
        if not is_held:
            raise ProofError(f"{part}: source rank {holding.rank} does not hold these elements")


def _prove_copy(route: Route, earlier: Route) -> None:
    """Prove that an earlier route brings the elements that a route copies from target memory.

    A local route copies them in one rank, so they must have arrived at this rank. Another route
    takes them from the rank at which they have arrived, whichever it is.
    """
    is_in_order = earlier.stage < route.stage and earlier.source == route.source
    is_at_rank = not route.is_local or earlier.receiver.rank == route.receiver.rank
    has_elements = contains(earlier.part.source_region, route.part.source_region)
    if not (is_in_order and is_at_rank and has_elements):
        raise ProofError(
            f"{route.part}: copies elements that have not arrived; the copied route is "
            f"{earlier.part}, to rank {earlier.receiver.rank}"
        )


def _shift_region(region: Region, distances: Sequence[int]) -> Region:
    """Return a region with the distance of each dim added to its indices."""
    shifted = []
    for indices, distance in zip(region, distances, strict=True):
        shifted.append(range(indices.start + distance, indices.stop + distance, indices.step))
    return tuple(shifted)
