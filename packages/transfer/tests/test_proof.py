"""Planted faults, each named by the proof with tensor and box.  Covers: planning/proof.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal_dtensor.errors import StyleTypeError
from shoal_transfer import (
    Assignment,
    Holding,
    Manifest,
    ManifestError,
    MappingError,
    ProofError,
    TensorRecord,
    WeightMapping,
    describe,
    plan_transfer,
)
from shoal_transfer.planning.proof import prove
from shoal_transfer.planning.routes import Loads, Route, RouteTable, Sides


def rows(rank: int, start: int, stop: int) -> Holding:
    return Holding(rank, ((start, stop), (0, 2)), 0, (2, 1))


def manifest(tensors: dict[str, list[Holding]], world: str) -> Manifest:
    records = {}
    ranks = set()
    for name, holdings in tensors.items():
        size = max(holding.box[0][1] for holding in holdings)
        records[name] = TensorRecord(name, (size, 2), "float32", tuple(holdings), parts=(name,))
        ranks |= {holding.rank for holding in holdings}
    return Manifest(records, dict.fromkeys(ranks, "host"), world)


SOURCE = manifest({"gate": [rows(0, 0, 2), rows(1, 2, 4)], "up": [rows(0, 0, 4)]}, "trainer")
TARGET = manifest({"gate_up": [rows(0, 0, 4), rows(1, 4, 8), rows(2, 0, 8)]}, "server")
MAPPING = WeightMapping.same_names(SOURCE.shapes).fuse({"gate_up": ("gate", "up")})


def table() -> RouteTable:
    record = TARGET.tensors["gate_up"]
    return RouteTable(
        record,
        dict(SOURCE.tensors),
        MAPPING.by_target["gate_up"],
        Sides(SOURCE, TARGET),
        Loads(),
        most_bytes=2**20,
    )


def moved(part: Assignment, **changes: Any) -> Assignment:
    return replace(part, **changes)


FAULTS: dict[str, tuple[Callable[[list[Route]], Any], str]] = {
    "a part is left out": (
        lambda routes: routes.pop(0),
        r"'gate_up'\[0:4, 0:2\] on target rank 0: \[0:2, 0:2\] is not written",
    ),
    "a part is written twice": (
        lambda routes: routes.append(routes[0]),
        r"on target rank 0: \[0:2, 0:2\] is written twice",
    ),
    "gate and up are exchanged": (
        lambda routes: swap(routes, source="up"),
        r"the plan has 'gate_up'\[0:2, 0:2\] = 'up'\[0:2, 0:2\], but the mapping .*= 'gate'",
    ),
    "rows of another shard": (
        lambda routes: swap(routes, source_region=(range(1, 3), range(2))),
        r"the plan has 'gate_up'\[0:2, 0:2\] = 'gate'\[1:3, 0:2\]",
    ),
    "transposed": (
        lambda routes: swap(routes, dims=(1, 0)),
        r"the plan has .* along \(1, 0\)",
    ),
    "a sender that does not hold the rows": (
        lambda routes: put(routes, senders=(rows(1, 2, 4),)),
        r"'gate_up'\[0:2, 0:2\] = 'gate'\[0:2, 0:2\]: source rank 1 does not hold",
    ),
    "no sender": (lambda routes: put(routes, senders=()), "no rank sends these elements to rank 0"),
    "copied from elements that did not arrive": (
        lambda routes: put(routes, copied=routes[-1], is_local=True),
        "copies elements that have not arrived",
    ),
    "written outside of the box": (
        lambda routes: routes.append(replace(routes[0], receiver=rows(1, 4, 8))),
        r"'gate_up'\[4:8, 0:2\] on target rank 1: \[0:2, 0:2\] is outside of the box",
    ),
    "written to a rank that holds nothing": (
        lambda routes: routes.append(replace(routes[0], receiver=rows(7, 0, 4))),
        "rank 7 does not hold these elements",
    ),
}


def put(routes: list[Route], **changes: Any) -> None:
    routes[0] = replace(routes[0], **changes)


def swap(routes: list[Route], **changes: Any) -> None:
    put(routes, part=replace(routes[0].part, **changes))


def test_the_plan_as_it_is_made_is_proven() -> None:
    made = table()
    prove(made)
    assert len(made.routes) == 6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    plant, message = FAULTS[fault]
    made = table()
    plant(made.routes)
    with pytest.raises(ProofError, match=message):
        prove(made)


def test_mappings_that_do_not_fit_the_manifests_are_refused() -> None:
    other = manifest({"gate_up": [rows(0, 0, 6)]}, "server")
    with pytest.raises(
        MappingError, match=r"'gate_up' is \(6, 2\) in the target, but \(8, 2\) in the"
    ):
        plan_transfer(SOURCE, other, MAPPING)
    with pytest.raises(
        MappingError, match=r"the mapping does not have the target 'gate_up' \(8, 2\)"
    ):
        plan_transfer(SOURCE, TARGET, MAPPING.rename({"gate_up": "w"}))
    with pytest.raises(MappingError, match="the target does not have a tensor 'extra'"):
        plan_transfer(SOURCE, TARGET, MAPPING.add_filled({"extra": (1,)}, fill=0.0))
    with pytest.raises(
        MappingError, match=r"'gate' is \(4, 2\) in the mapping, but the source has no"
    ):
        plan_transfer(manifest({"up": [rows(0, 0, 4)]}, "trainer"), TARGET, MAPPING)
    with pytest.raises(
        MappingError, match=r"'gate_up' is \(8, 2\) in the mapping, but the source has"
    ):
        plan_transfer(SOURCE, TARGET)


def test_arguments_of_wrong_types_are_named() -> None:
    with pytest.raises(StyleTypeError, match="plan_transfer: source is a Manifest"):
        plan_transfer({}, TARGET)  # type: ignore[arg-type]  # refused
    with pytest.raises(StyleTypeError, match="mapping is a WeightMapping"):
        plan_transfer(SOURCE, TARGET, {})  # type: ignore[arg-type]  # refused
    with pytest.raises(StyleTypeError, match=r"describe: model is an nn\.Module"):
        describe([])  # type: ignore[arg-type]  # refused


def test_a_cast_is_said_in_the_mapping() -> None:
    record = replace(TARGET.tensors["gate_up"], dtype="bfloat16")
    narrow = Manifest({"gate_up": record}, TARGET.hosts, "server")
    with pytest.raises(
        MappingError, match=r"the source is float32, but the target is bfloat16; .*casts"
    ):
        plan_transfer(SOURCE, narrow, MAPPING)
    plan = plan_transfer(SOURCE, narrow, MAPPING.with_casts())
    assert plan.traffic().total == 2 * 32, "elements are cast before they are sent"


def test_tied_targets_need_one_source() -> None:
    record = replace(TARGET.tensors["gate_up"], aliases=("head",))
    tied = Manifest({"gate_up": record}, TARGET.hosts, "server")
    plan = plan_transfer(SOURCE, tied, MAPPING.add_copies({"head": "gate_up"}))
    assert [tensor.target for tensor in plan.tensors] == ["gate_up"], "it is sent once"
    with pytest.raises(MappingError, match="'gate_up' and 'head' are one tensor in the target"):
        plan_transfer(SOURCE, tied, MAPPING.add_filled({"head": (8, 2)}, fill=0.0))
    with pytest.raises(ManifestError, match="does not have a tensor 'none'"):
        tied.record("none")


def test_a_mapping_may_name_tied_tensors_of_both_sides_by_all_their_names() -> None:
    tensor = torch.zeros(2)
    manifest = describe({"emb": tensor, "head": tensor})
    mapping = WeightMapping.same_names({"emb": (2,), "head": (2,)})
    plan = plan_transfer(manifest, manifest, mapping)
    assert [tensor.target for tensor in plan.tensors] == ["emb"]


def test_senders_take_turns_and_the_near_ones_first() -> None:
    whole = {f"{n}": [rows(rank, 0, 4) for rank in range(4)] for n in range(8)}
    source = manifest(whole, "trainer")
    # a layout that tensors share is one tuple, as describe makes it
    layout = source.tensors["0"].holdings
    shared = {name: replace(one, holdings=layout) for name, one in source.tensors.items()}
    source = Manifest(shared, {0: "a", 1: "a", 2: "b", 3: "b"}, "trainer")
    served = {name: [rows(rank, 0, 4) for rank in range(2)] for name in whole}
    target = manifest(served, "server")
    layout = target.tensors["0"].holdings
    shared = {name: replace(one, holdings=layout) for name, one in target.tensors.items()}
    target = Manifest(shared, target.hosts, "server")
    near = plan_transfer(source, Manifest(target.tensors, {0: "b", 1: "b"}, "server"))
    assert near.traffic().between_hosts == 0
    assert near.traffic().most_sent == 8 * 32
    assert {copy.sender.rank for copy in near.regions() if copy.sender} == {2, 3}
    far = plan_transfer(source, Manifest(target.tensors, {0: "c", 1: "c"}, "server"))
    assert far.traffic().between_hosts == 8 * 32, "once per receiving host"
    assert far.traffic().total == 16 * 32
    assert {copy.stage for copy in far.regions()} == {0, 1}
    first = [copy.sender.rank for copy in far.regions() if copy.sender and copy.stage == 0]
    assert sorted(first) == [0, 0, 1, 1, 2, 2, 3, 3], "senders take turns over the tensors"
    text = far.explain(pairs=1)
    assert "16 tensors" not in text
    assert "8 tensors from 4 ranks to 2 ranks: 512 B between ranks" in text
    assert "and 4 more pairs" in text
    assert "mapping unverified" in text
