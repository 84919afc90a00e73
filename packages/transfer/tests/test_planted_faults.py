"""Five faults that prove themselves.

Each is found before a byte moves or before elements are committed.

A complete mapping without overlaps is what its plan does, so algebra alone finds none of these. The
witnesses do: the server's recorded loader before a byte moves, version 0 before anything is
committed; versions are compared before a byte moves, and a stale base of a delta has
another digest.

Covers: running/weight_transfer.py, mapping/weight_mapping.py, learn/witness.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_transfer import (
    FolderWire,
    MappingError,
    Sync,
    TransferError,
    WeightMapping,
    WeightTransfer,
    describe,
    learn_mapping,
    plan_transfer,
    verify_mapping,
)

HEADS = 4
# by number of kv heads, so that q and k have equal shapes, or not
KV_HEADS = {"multi-head": 4, "grouped": 2}


def shapes_of(kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Sizes of heads in which q and k of equal and of unequal shapes fill one fused tensor."""
    return {
        "q": (4 * HEADS, 4),
        "k": (4 * kv_heads, 4),
        "v": (4 * kv_heads, 4),
        "gate": (6, 4),
        "up": (6, 4),
        **{f"experts.{index}.w": (3, 4) for index in range(4)},
    }


class ServerOfGroupedHeads(nn.Module):
    """Interleaves q, k and v by kv head, fuses gate and up, and serves experts 2 and 3."""

    gate_up: nn.Parameter

    def __init__(self, kv_heads: int, device: str = "cpu") -> None:
        super().__init__()
        self.kv_heads = kv_heads
        rows = 4 * (HEADS + 2 * kv_heads)
        served = {"qkv": (rows, 4), "gate_up": (12, 4), "experts": (2, 3, 4)}
        for name, shape in served.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        params = dict(self.named_parameters())
        group = {"q": 4 * HEADS // self.kv_heads, "k": 4, "v": 4}
        first = {"q": 0, "k": group["q"], "v": group["q"] + 4}
        for name, tensor in weights:
            if name in group:
                groups = params["qkv"].data.view(self.kv_heads, -1, 4)
                rows = groups.narrow(1, first[name], group[name])
                rows.copy_(tensor.view(self.kv_heads, -1, 4))
            elif name in ("gate", "up"):
                params["gate_up"].data.chunk(2)[name == "up"].copy_(tensor)
            elif int(name[8]) >= 2:
                params["experts"].data[int(name[8]) - 2].copy_(tensor)


def declared(
    kv_heads: int, *, exchanged: str = "", groups: int | None = None, first: int = 2
) -> WeightMapping:
    """The mapping of the server, written by hand.

    Args:
        kv_heads: of the model.
        exchanged: two names that the author confuses.
        groups: of the interleaved q, k and v; right are the kv heads.
        first: number of the first expert that is served; 2 is right, 0 its local number.
    """
    mapping = WeightMapping.same_names(shapes_of(kv_heads))
    if exchanged:
        one, other = exchanged.split()
        mapping = mapping.rename({f"^{one}$": "x", f"^{other}$": one, "^x$": other})
    mapping = mapping.fuse({"qkv": ("q", "k", "v")}, groups=groups or kv_heads)
    mapping = mapping.fuse({"gate_up": ("gate", "up")})
    unused = [f"experts.{index}.w" for index in range(4) if index not in (first, first + 1)]
    numbers = {f"^experts.{first + index}": f"experts.{index}" for index in range(2)}
    mapping = mapping.drop(unused).rename(numbers).stack({"experts": "experts.{index}.w"})
    return mapping.rename({"$": "@0"}).witnessed_by(None)


def values(kv_heads: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = shapes_of(kv_heads)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def loaded(kv_heads: int) -> ServerOfGroupedHeads:
    """The server after it has loaded the files of version 0 by itself."""
    server = ServerOfGroupedHeads(kv_heads)
    server.load_weights(iter(values(kv_heads).items()))
    return server


def transfer_by(
    mapping: WeightMapping, kv_heads: int
) -> tuple[WeightTransfer, ServerOfGroupedHeads]:
    source = values(kv_heads)
    server = loaded(kv_heads)
    plan = plan_transfer(describe(source), describe(server, per_rank=True), mapping)
    return WeightTransfer(plan, source=source, target=server), server


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "gate and up are exchanged": ({"exchanged": "gate up"}, "gate_up@0"),
    "q and k are exchanged": ({"exchanged": "q k"}, "qkv@0"),
    "local expert numbers": ({"first": 0}, "experts@0"),
    "interleaved by another group": ({"groups": 1}, "qkv@0"),
}


@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_recorded_loader_finds_it_before_a_byte_moves(fault: str, kv_heads: int) -> None:
    options, name = FAULTS[fault]
    wrong = declared(kv_heads, **options)
    wrong.check()
    server = ServerOfGroupedHeads(kv_heads, "meta")
    checkpoint = {one: torch.empty(shape) for one, shape in shapes_of(kv_heads).items()}
    recorded = learn_mapping(server, server.load_weights, checkpoint)
    with pytest.raises(MappingError, match=rf"'{name}'\[.* in the mapping, but .* in the witness"):
        verify_mapping(wrong, recorded)
    assert verify_mapping(declared(kv_heads), recorded).witness == "recorded loader"


@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
@pytest.mark.parametrize("fault", FAULTS)
def test_version_zero_finds_it_before_anything_is_committed(fault: str, kv_heads: int) -> None:
    options, name = FAULTS[fault]
    transfer, server = transfer_by(declared(kv_heads, **options), kv_heads)
    assert "proven; mapping unverified" in transfer.plan.explain()
    with pytest.raises(
        MappingError, match=rf"version 0 differs: '{name}' in \d+ of \d+ elements on target rank 0"
    ):
        transfer.witness()
    assert not transfer.plan.is_verified
    assert_unchanged(server)


def assert_unchanged(server: ServerOfGroupedHeads) -> None:
    for name, value in loaded(server.kv_heads).named_parameters():
        assert torch.equal(server.get_parameter(name), value), name


class CountingWire(FolderWire):
    """Counts the exchanges of elements."""

    exchanges = 0

    def exchange(self, sends: Any, receives: Any) -> None:
        self.exchanges += 1
        super().exchange(sends, receives)


class TwoWorlds:
    """A trainer in a thread and a server, which share a folder: elements go over a wire."""

    def __init__(self, home: Path) -> None:
        self.source = values(2)
        self.server = ServerOfGroupedHeads(2)
        target = describe(self.server, world="server", per_rank=True)
        plan = plan_transfer(describe(self.source, world="trainer"), target, declared(2))
        self.wires = [CountingWire(home, member, 2, timeout=60) for member in range(2)]
        how: dict[str, Any] = {"mode": "in_place", "deltas": True}
        self.sends = WeightTransfer(plan, source=self.source, wire=self.wires[0], **how)
        self.receives = WeightTransfer(plan, target=self.server, wire=self.wires[1], **how)

    def run(self, version: int) -> Sync:
        """Send a version; return what the server got."""
        with ThreadPoolExecutor(1) as pool:
            self.sent = pool.submit(self.sends.run, version)
            return self.receives.run()


def test_a_stale_version_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    worlds = TwoWorlds(tmp_path)
    worlds.run(2)
    moved = worlds.wires[0].exchanges
    worlds.source["gate"].fill_(5)
    with pytest.raises(
        TransferError,
        match="version 1 is older than version 2; pass an increasing version; "
        "no data was transferred",
    ):
        worlds.run(1)
    assert worlds.wires[0].exchanges == moved
    assert_unchanged(worlds.server)


def test_changes_to_a_stale_base_are_named_by_the_digest(tmp_path: Path) -> None:
    worlds = TwoWorlds(tmp_path)
    worlds.run(1)
    old = worlds.server.gate_up.detach().clone()
    for version in (2, 3):
        worlds.source["gate"][0, 0] += 1
        worlds.source["up"][version, 0] += 1
        assert worlds.run(version).was_delta
    # as after a sleep from which the server wakes with the weights of version 1
    worlds.server.gate_up.data.copy_(old)
    worlds.source["gate"][0, 0] += 1
    with pytest.raises(
        TransferError, match=r"arrived with a different digest; the tensors are .*gate_up@0"
    ):
        worlds.run(4)
    assert isinstance(worlds.sent.exception(), TransferError), "the trainer knows"
    assert not worlds.receives.is_valid
    assert not worlds.run(5).was_delta
    expected = torch.cat([worlds.source["gate"], worlds.source["up"]])
    assert torch.equal(worlds.server.gate_up, expected)


@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_the_right_mapping_is_witnessed(kv_heads: int) -> None:
    transfer, server = transfer_by(declared(kv_heads), kv_heads)
    transfer.witness()
    assert "proven; mapping witnessed: version 0" in transfer.plan.explain()
    transfer.run(1)
    assert_unchanged(server)
