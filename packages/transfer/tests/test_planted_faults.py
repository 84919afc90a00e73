"""Wrong mappings that prove themselves, each named by version 0 before anything is committed.

Covers: running/weight_transfer.py, mapping/weight_mapping.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal_transfer import MappingError, WeightMapping, WeightTransfer, describe, plan_transfer

SHAPES = {
    "q": (8, 4),
    "k": (4, 4),
    "v": (4, 4),
    "gate": (6, 4),
    "up": (6, 4),
    **{f"experts.{index}.w": (3, 4) for index in range(4)},
}


def served(mapping: WeightMapping) -> WeightMapping:
    return (
        mapping.fuse({"qkv": ("q", "k", "v")}, groups=4)
        .fuse({"gate_up": ("gate", "up")})
        .stack({"experts": "experts.{index}.w"})
    )


def exchanged(one: str, other: str) -> WeightMapping:
    names = {f"^{one}$": "x", f"^{other}$": one, "^x$": other}
    return served(WeightMapping.same_names(SHAPES).rename(names))


def local_expert_numbers() -> WeightMapping:
    """Experts 2 and 3, the second rank's, under the numbers 0 and 1."""
    shapes = dict(SHAPES)
    names = {r"experts\.[01]\.w": r"unused.\g<0>"}
    moved = WeightMapping.same_names(shapes).rename(names)
    moved = moved.rename({r"^experts\.2": "experts.0", r"^experts\.3": "experts.1"})
    return served(
        moved.rename({r"^unused\.experts\.0": "experts.2", r"^unused\.experts\.1": "experts.3"})
    )


def wrong_group() -> WeightMapping:
    mapping = WeightMapping.same_names(SHAPES).fuse({"qkv": ("q", "k", "v")}, groups=2)
    mapping = mapping.fuse({"gate_up": ("gate", "up")})
    return mapping.stack({"experts": "experts.{index}.w"})


FAULTS: dict[str, tuple[Callable[[], WeightMapping], str]] = {
    "gate and up are exchanged": (lambda: exchanged("gate", "up"), "'gate_up' in 48 of 48"),
    "k and v are exchanged": (lambda: exchanged("k", "v"), "'qkv' in 32 of 64"),
    "local expert numbers": (local_expert_numbers, "'experts' in 48 of 48"),
    "interleaved by another group": (wrong_group, "'qkv' in 40 of 64"),
}


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def loaded() -> dict[str, Tensor]:
    """What the server has loaded by itself from the files of version 0."""
    source = values()
    blocks = [source[name].chunk(4) for name in "qkv"]
    return {
        "qkv": torch.cat([block[group] for group in range(4) for block in blocks]),
        "gate_up": torch.cat([source["gate"], source["up"]]),
        "experts": torch.stack([source[f"experts.{index}.w"] for index in range(4)]),
    }


def transfer_by(mapping: WeightMapping) -> tuple[WeightTransfer, dict[str, Tensor]]:
    source = values()
    target = loaded()
    plan = plan_transfer(describe(source), describe(target), mapping)
    return WeightTransfer(plan, source=source, target=target), target


@pytest.mark.parametrize("fault", FAULTS)
def test_version_zero_names_the_tensor(fault: str) -> None:
    mapping, message = FAULTS[fault]
    transfer, target = transfer_by(mapping())
    assert "mapping unverified" in transfer.plan.explain()
    with pytest.raises(
        MappingError, match=f"version 0 differs: {message} elements on target rank 0"
    ):
        transfer.witness()
    assert not transfer.plan.is_verified
    assert all(torch.equal(target[name], value) for name, value in loaded().items())


def test_the_right_mapping_is_witnessed() -> None:
    transfer, target = transfer_by(served(WeightMapping.same_names(SHAPES)))
    transfer.witness()
    assert "mapping witnessed: version 0" in transfer.plan.explain()
    transfer.run(1)
    assert all(torch.equal(target[name], value) for name, value in loaded().items())
