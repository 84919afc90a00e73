"""Mappings that differ from the server's loader.

Each fault is found before anything is sent, or by the digest.

Covers: learn/witness.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from shoal_transfer import (
    MappingError,
    TransferError,
    WeightMapping,
    WeightTransfer,
    describe,
    learn_mapping,
    plan_transfer,
    verify_mapping,
)

HEADS = 4
CHECKPOINT = {
    "q": (8, 4),
    "k": (8, 4),
    "v": (8, 4),
    "gate": (6, 4),
    "up": (6, 4),
    "vocabulary": (10, 4),
    **{f"experts.{index}.w": (3, 4) for index in range(4)},
}
SERVED = {"qkv": (24, 4), "gate_up": (12, 4), "vocabulary": (12, 4), "experts": (2, 3, 4)}


class InterleavingServer(nn.Module):
    """Serves experts 2 and 3; interleaves q, k and v by head; pads the vocabulary."""

    def __init__(self, device: str) -> None:
        super().__init__()
        for name, shape in SERVED.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                heads = params["qkv"].data.view(HEADS, 3, -1, 4)
                heads[:, "qkv".index(name)].copy_(tensor.view(HEADS, -1, 4))
            elif name in ("gate", "up"):
                params["gate_up"].data.chunk(2)[name == "up"].copy_(tensor)
            elif name == "vocabulary":
                params[name].data[: len(tensor)].copy_(tensor)
                params[name].data[len(tensor) :].zero_()
            elif int(name[8]) >= 2:
                params["experts"].data[int(name[8]) - 2].copy_(tensor)


def declared(
    rename: dict[str, str] | None = None, *, groups: int = HEADS, first: int = 2, fill: float = 0.0
) -> WeightMapping:
    """The mapping of the server, written by hand."""
    mapping = WeightMapping.same_names(CHECKPOINT).rename(rename or {})
    mapping = mapping.fuse({"qkv": ("q", "k", "v")}, groups=groups)
    mapping = mapping.fuse({"gate_up": ("gate", "up")}).pad({"vocabulary": 12}, fill=fill)
    unused = [f"experts.{index}.w" for index in range(4) if index not in (first, first + 1)]
    mapping = mapping.drop(unused)
    numbers = {f"^experts.{first + index}": f"experts.{index}" for index in range(2)}
    mapping = mapping.rename(numbers).stack({"experts": "experts.{index}.w"})
    return mapping.rename({"$": "@0"}).witnessed_by(None)


def exchanged(one: str, other: str) -> dict[str, str]:
    return {f"^{one}$": "x", f"^{other}$": one, "^x$": other}


def recorded() -> WeightMapping:
    server = InterleavingServer("meta")
    checkpoint = {name: torch.empty(shape) for name, shape in CHECKPOINT.items()}
    return learn_mapping(server, server.load_weights, checkpoint)


FAULTS: dict[str, tuple[Callable[[], WeightMapping], str]] = {
    "gate and up are exchanged": (lambda: declared(exchanged("gate", "up")), r"'gate_up@0'\[0:6"),
    "q and k are exchanged": (lambda: declared(exchanged("q", "k")), r"'qkv@0'\["),
    "k and v are exchanged": (lambda: declared(exchanged("k", "v")), r"'qkv@0'\["),
    "local expert numbers": (lambda: declared(first=0), r"'experts@0'\[0:1"),
    "interleaved by another group": (lambda: declared(groups=2), r"'qkv@0'\["),
    "not interleaved": (lambda: declared(groups=1), r"'qkv@0'\["),
    "another filling": (lambda: declared(fill=1.0), r"'vocabulary@0'\[10:12"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_loader_finds_the_fault_before_a_byte_moves(fault: str) -> None:
    mapping, place = FAULTS[fault]
    wrong = mapping()
    # complete and without overlaps: algebra alone finds nothing
    wrong.check()
    with pytest.raises(MappingError, match=rf"{place}.* in the mapping, but"):
        verify_mapping(wrong, recorded())


def test_the_right_mapping_is_verified_and_gives_the_bytes_of_the_loader() -> None:
    mapping = verify_mapping(declared(), recorded())
    generator = torch.Generator().manual_seed(0)
    source = {name: torch.rand(shape, generator=generator) for name, shape in CHECKPOINT.items()}
    loaded = InterleavingServer("cpu")
    loaded.load_weights(iter(source.items()))
    served = InterleavingServer("cpu")
    plan = plan_transfer(describe(source), describe(served, per_rank=True), mapping)
    assert "mapping witnessed: recorded loader" in plan.explain()
    WeightTransfer(plan, source=source, target=served).run(1)
    for name, value in loaded.named_parameters():
        assert torch.equal(served.get_parameter(name), value), name


def test_a_mapping_that_nobody_witnessed_stays_unverified() -> None:
    plan = plan_transfer(
        describe({name: torch.zeros(shape) for name, shape in CHECKPOINT.items()}),
        describe(InterleavingServer("cpu"), per_rank=True),
        declared(),
    )
    assert not plan.is_verified
    assert "mapping unverified" in plan.explain()


def test_a_stale_version_is_refused_before_a_byte_moves() -> None:
    source = {name: torch.ones(shape) for name, shape in CHECKPOINT.items()}
    served = InterleavingServer("cpu")
    plan = plan_transfer(describe(source), describe(served, per_rank=True), recorded())
    transfer = WeightTransfer(plan, source=source, target=served)
    transfer.run(2)
    source["gate"].fill_(5)
    with pytest.raises(TransferError, match="version 1 is older than version 2"):
        transfer.run(1)
    assert torch.equal(served.get_parameter("gate_up"), torch.ones(12, 4))


def test_mappings_of_other_targets_or_without_a_witness_are_refused() -> None:
    with pytest.raises(MappingError, match="has the target 'experts@0'"):
        verify_mapping(declared().drop(["experts@0"]), recorded())
    with pytest.raises(MappingError, match=r"is \(13, 4\) in the mapping"):
        longer = declared().pad({"vocabulary@0": 13}, fill=0.0)
        verify_mapping(longer, recorded())
    with pytest.raises(MappingError, match="with a witness"):
        verify_mapping(declared(), declared())
