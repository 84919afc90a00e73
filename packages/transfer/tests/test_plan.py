"""Plans of random pairs of layouts, run in memory, and the bytes that they move.

Covers: planning/plan.py, planning/routes.py, planning/cells.py, planning/copies.py,
planning/transfer_plan.py.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from index_tensors import apply_mapping, numbered
from random_layouts_of_weights import draw_manifest, draw_mapping
from shoal_transfer import (
    Manifest,
    TransferPlan,
    plan_transfer,
)
from simulated_transfer import memories_of_manifest, run_copies


def draw_plan(seed: int) -> TransferPlan:
    drawing = random.Random(seed)
    mapping = draw_mapping(drawing)
    mapping.check()
    worlds = drawing.choice([("one", "one"), ("one", "other")])
    source = draw_manifest(drawing, dict(mapping.sources), worlds[0])
    target = draw_manifest(drawing, dict(mapping.targets), worlds[1])
    if worlds[0] == worlds[1]:
        # the hosts of a rank do not depend on the side
        hosts = {**source.hosts, **target.hosts}
        source = Manifest(source.tensors, hosts, source.world)
        target = Manifest(target.tensors, hosts, target.world)
    return plan_transfer(source, target, mapping, max_bytes=drawing.choice([64, 400, 2**20]))


def held_elements(manifest: Manifest, values: dict[str, Tensor]) -> dict[int, dict[str, set[int]]]:
    """For each rank the numbers that it holds, by tensor."""
    held: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name, record in manifest.tensors.items():
        for holding in record.holdings:
            box = tuple(slice(*bounds) for bounds in holding.box)
            held[holding.rank][name] |= {*values[name][box].flatten().tolist()}
    return held


def lower_bounds(
    plan: TransferPlan, before: dict[str, Tensor], after: dict[str, Tensor]
) -> tuple[int, int]:
    """Elements that must move between ranks, and between hosts: once per receiver without them."""
    held = held_elements(plan.source, before)
    wanted = held_elements(plan.target, after)
    of_host: dict[tuple[str, str], set[int]] = defaultdict(set)
    between_ranks = 0
    for rank, by_name in wanted.items():
        own = set[int]().union(*held[rank].values()) if plan.is_one_world else set[int]()
        host = plan.target.hosts[rank]
        for name, numbers in by_name.items():
            moved = {number for number in numbers if number > 10} - own
            between_ranks += len(moved)
            of_host[host, name] |= moved
    between_hosts = 0
    for (host, _), numbers in of_host.items():
        near = set[int]()
        for rank, by_name in held.items():
            if plan.source.hosts[rank] == host:
                near = near.union(*by_name.values())
        between_hosts += len(numbers - near)
    return between_ranks, between_hosts


def assert_right(seed: int) -> None:
    plan = draw_plan(seed)
    # numbers up to 10 are fill values and kept elements
    before = {name: value + 10 for name, value in numbered(plan.mapping.sources).items()}
    after = apply_mapping(plan.mapping, before)
    memories = memories_of_manifest("source", plan.source, before)
    memories |= memories_of_manifest("target", plan.target, None)
    run_copies(plan, memories)
    expected = memories_of_manifest("target", plan.target, after)
    assert all(torch.equal(memories[key], value) for key, value in expected.items())
    traffic = plan.traffic()
    bounds = lower_bounds(plan, before, after)
    assert (traffic.total, traffic.between_hosts) == (8 * bounds[0], 8 * bounds[1])


@pytest.mark.parametrize("seed", range(60))
def test_every_element_is_right_and_sent_once(seed: int) -> None:
    assert_right(seed)


@pytest.mark.parametrize("seed", range(30))
def test_no_round_moves_more_than_its_bound(seed: int) -> None:
    plan = draw_plan(seed)
    for batch in plan.batches():
        moved = dict[tuple[str, int], int]()
        copies = 0
        for tensor, routes in batch.parts:
            for copy in map(tensor.copy_of, routes):
                if copy.sender is None or (copy.is_local or copy.stage == 2):
                    continue
                side = "source" if plan.is_one_world else copy.sender.side
                receiver = "source" if plan.is_one_world else "target"
                if (side, copy.sender.rank) == (receiver, copy.receiver.rank):
                    continue
                copies += 1
                for end in ((side, copy.sender.rank), (receiver, copy.receiver.rank)):
                    moved[end] = moved.get(end, 0) + copy.nbytes
        assert copies <= 1 or max(moved.values()) <= plan.max_bytes


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand_pairs(first: int) -> None:
    for seed in range(first, first + 100):
        assert_right(seed)


def test_a_notebook_shows_the_explanation_and_a_repr_is_one_line() -> None:
    plan = draw_plan(0)
    html = plan._repr_html_()
    assert html.startswith("<pre>") and "gather and broadcast" in html
    assert "-&gt; target" in html or "-> target" not in plan.explain()
    assert repr(plan).startswith(f"TransferPlan({len(plan.tensors)} tensors, ")
    assert "\n" not in repr(plan) and len(repr(plan)) < 100
