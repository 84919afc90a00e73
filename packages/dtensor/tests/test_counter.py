"""Covers: rng/counter.py."""

from __future__ import annotations

import math

import pytest
import torch

from shoal_dtensor import Replicate, Shard, Spec, random_mode
from shoal_dtensor.rng import counter as counter_mode
from shoal_dtensor.rng.counter import philox
from shoal_dtensor.rng.draw import draw
from shoal_dtensor.rng.streams import Fill
from shoal_mesh import abstract_mesh

# Published with Random123 (kat_vectors): counter, key, output of philox4x32 with ten rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox(counter, key)) == words
    vector = [torch.full((3,), word) for word in counter]
    assert [word.tolist() for word in philox(vector, key)] == [[word] * 3 for word in words]


CASES = [
    (Fill("normal_", (1.0, 2.0)), torch.float32),
    (Fill("normal_"), torch.float64),
    (Fill("normal_"), torch.bfloat16),
    (Fill("normal_"), torch.complex64),
    (Fill("uniform_", (-1.0, 3.0)), torch.float32),
    (Fill("uniform_"), torch.float64),
    (Fill("uniform_"), torch.float16),
    (Fill("bernoulli_", (0.3,)), torch.bool),
    (Fill("bernoulli_", (0.3,)), torch.float64),
    (Fill("exponential_", (2.0,)), torch.float32),
    (Fill("cauchy_", (0.0, 1.0)), torch.float32),
    (Fill("geometric_", (0.25,)), torch.int64),
    (Fill("log_normal_", (0.0, 0.5)), torch.float32),
    (Fill("random_"), torch.int64),
    (Fill("random_"), torch.float32),
    (Fill("random_"), torch.bool),
    (Fill("random_", (5,)), torch.uint8),
    (Fill("random_", (0, 2**40)), torch.int64),
    (Fill("random_", (-(2**63), None)), torch.int64),
]


def in_counter_mode(spec: Spec, fill: Fill) -> torch.Tensor:
    # torch.manual_seed formats a stack for every kind of device
    torch.default_generator.manual_seed(9)
    with random_mode("counter"):
        return draw(spec, fill)


@pytest.mark.parametrize(("fill", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(50, 3, 41), (70,), (), (4, 0), (300, 1)])
def test_values_do_not_depend_on_the_mesh(
    fill: Fill, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_counter_mode(Spec(abstract_mesh((1,)), (Replicate(),), shape, None, dtype), fill)
    monkeypatch.setattr(counter_mode, "_CHUNK", 64)
    state = torch.get_rng_state()
    for placements in ((Shard(0), Shard(-1)), (Shard(-1), Shard(-1)), (Replicate(), Shard(0))):
        for rank in range(6):
            mesh = abstract_mesh((2, 3), rank=rank)
            spec = Spec(mesh, placements if shape else (Replicate(),) * 2, shape, None, dtype)
            box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate or ()))
            assert torch.equal(in_counter_mode(spec, fill), whole[box]), spec
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("fill", "dtype"), CASES, ids=str)
def test_values_have_the_distribution(fill: Fill, dtype: torch.dtype) -> None:
    """The distance of the distribution function from torch's own.

    It is Kolmogorov and Smirnov's test at about 1e-6.
    """
    n = 40000
    ours = in_counter_mode(
        Spec(abstract_mesh((1,)), (Replicate(),), (n // 40, 40), None, dtype), fill
    )
    theirs = torch.empty(n, dtype=dtype)
    torch.manual_seed(3)
    fill(theirs)
    flat = [
        torch.view_as_real(x).flatten() if dtype.is_complex else x.flatten() for x in (ours, theirs)
    ]
    a, b = (x.double().sort().values for x in flat)
    points = torch.cat([a, b])
    gap = (
        torch.searchsorted(a, points, right=True) - torch.searchsorted(b, points, right=True)
    ).abs().max() / len(a)
    assert gap < 2.7 * math.sqrt(2 / len(a)), float(gap)


def test_keys_follow_the_generator() -> None:
    spec = Spec(abstract_mesh((2,)), (Shard(0),), (100,))
    generator = torch.Generator()
    generator.manual_seed(1)
    with random_mode("counter"):
        first, second = (draw(spec, Fill("uniform_"), generator) for _ in range(2))
        generator.manual_seed(1)
        again = draw(spec, Fill("uniform_"), generator)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_uniform_values_stay_below_the_end() -> None:
    low = in_counter_mode(
        Spec(abstract_mesh((1,)), (Replicate(),), (1 << 16,), None, torch.bfloat16),
        Fill("uniform_", (1.0, 1.01)),
    )
    assert bool((low < 1.01).all())
