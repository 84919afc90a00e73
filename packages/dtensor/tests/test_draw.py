"""Boxes of a global random tensor, without process groups.

Covers: rng/{draw,streams,memory_walk,state}.py.
"""

from __future__ import annotations

import math
import random
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import DTensor, Partial, Replicate, Shard, Spec, random_mode
from shoal_dtensor.errors import ArgumentValueError, PlacementError
from shoal_dtensor.layout.memory_order import walking_order
from shoal_dtensor.rng import streams as cpu_stream
from shoal_dtensor.rng.draw import draw
from shoal_dtensor.rng.memory_walk import memory_walk_of, stretches
from shoal_dtensor.rng.state import get_random_mode
from shoal_dtensor.rng.streams import Fill
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world

FILLS = [
    Fill("uniform_", (-1.0, 2.0)),
    Fill("normal_", (1.0, 2.0)),
    Fill("bernoulli_", (0.3,)),
    Fill("exponential_", (1.5,)),
    Fill("cauchy_", (0.0, 1.0)),
    Fill("geometric_", (0.3,)),
    Fill("log_normal_", (0.0, 1.0)),
    Fill("random_"),
    Fill("random_", (100,)),
    Fill("random_", (-100, 27)),
    Fill("random_", (0, 2**40)),
    Fill("random_", (-(2**63), None)),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
MESHES = [(4,), (2, 2), (3, 2), (2, 2, 2)]
EXTENTS = [0, 1, 2, 3, 5, 7, 16, 33, 48]
# A larger tensor repeats what these chunks of it show, and chunks of 32 take minutes for millions.
MOST_CHUNKS = 500


def supports(fill: Fill, dtype: torch.dtype) -> bool:
    with warnings.catch_warnings():
        # torch warns of integers that a float type cannot hold
        warnings.simplefilter("ignore")
        try:
            fill(torch.empty(3, dtype=dtype))
        except (RuntimeError, NotImplementedError):
            return False
    return True


def some_layout(dice: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride: contiguous, permuted, or a corner of something larger."""
    ndim = dice.choice([0, 1, 1, 2, 2, 3, 4])
    shape = tuple(dice.choice(EXTENTS) for _ in range(ndim))
    order = list(range(ndim))
    if dice.random() < 0.4:
        dice.shuffle(order)
    tensor = torch.empty([shape[dim] for dim in order], device="meta").permute(
        [order.index(d) for d in range(ndim)]
    )
    if ndim and dice.random() < 0.15:
        corner = tuple(slice(0, n) for n in shape)
        tensor = torch.empty([n + 2 for n in shape], device="meta")[corner]
    return tuple(tensor.shape), tuple(tensor.stride())


def some_placements(
    dice: random.Random, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> tuple[list[Any], Any]:
    placements: list[Any] = []
    axes_of: dict[int, list[int]] = {}
    for axis in range(len(mesh)):
        if shape and dice.random() < 0.75:
            dim = dice.randrange(len(shape))
            placements.append(Shard(dim, multiple_of=dice.choice([1, 1, 3])))
            axes_of.setdefault(dim, []).append(axis)
        else:
            placements.append(Replicate())
    for axes in axes_of.values():
        dice.shuffle(axes)
    for dim, axes in axes_of.items():
        if len(axes) == 1 and dice.random() < 0.4:
            cuts = [
                0,
                *sorted(dice.randint(0, shape[dim]) for _ in range(mesh[axes[0]] - 1)),
                shape[dim],
            ]
            placements[axes[0]] = Shard(dim, sizes=[b - a for a, b in pairwise(cuts)])
    return placements, tuple((dim, tuple(axes)) for dim, axes in sorted(axes_of.items()))


def seeded(dice_roll: int, passed: bool) -> torch.Generator:
    """A seeded generator; after an odd number of scalar normals it also holds a spare value."""
    generator = torch.Generator() if passed else torch.default_generator
    generator.manual_seed(5)
    for _ in range(dice_roll):
        torch.empty(1, dtype=torch.float64).normal_(generator=generator)
    return generator


@pytest.mark.filterwarnings("ignore:to - 1 is out of bounds")
@pytest.mark.parametrize("chunk", [32, 64, 1 << 16])
@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: f"{fill.name}{fill.args}")
def test_boxes_equal_one_device(fill: Fill, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layouts, placements, dtypes and generators.

    All ranks take part, one outside the mesh among them.
    """
    monkeypatch.setattr(cpu_stream, "CHUNK", chunk)
    dice = random.Random(f"{fill}{chunk}")
    dtypes = [dtype for dtype in DTYPES if supports(fill, dtype)]
    compared = 0
    while compared < 100:
        dtype, mesh = dice.choice(dtypes), dice.choice(MESHES)
        shape, stride = some_layout(dice)
        if math.prod(shape) > MOST_CHUNKS * chunk:
            continue
        placements, order = some_placements(dice, shape, mesh)
        primed, passed = dice.randrange(3), dice.random() < 0.3
        generator = seeded(primed, passed)
        whole = torch.empty_strided(shape, stride, dtype=dtype)
        fill(whole, generator if passed else None)
        after = generator.get_state()
        for rank in {*dice.sample(range(math.prod(mesh)), 3), math.prod(mesh)}:
            spec = Spec(abstract_mesh(mesh, rank=rank), placements, shape, stride, dtype, order)
            generator = seeded(primed, passed)
            own = torch.empty(spec.local_shape, dtype=dtype) if dice.random() < 0.3 else None
            local = draw(spec, fill, generator if passed else None, out=own)
            case = f"{spec} with stride {stride} on rank {rank}"
            assert torch.equal(generator.get_state(), after), case
            if spec.coordinate is not None:
                box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate))
                assert torch.equal(local, whole[box]), case
                assert local.shape == spec.local_shape, case
                compared += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_as_an_operand(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_stream, "CHUNK", 32)
    chances = torch.rand(9, 14, dtype=dtype)
    torch.manual_seed(1)
    whole = torch.bernoulli(chances)
    for rank in range(4):
        spec = Spec(abstract_mesh((2, 2), rank=rank), (Shard(1), Shard(0)), (9, 14), None, dtype)
        box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate or ()))
        torch.manual_seed(1)
        assert torch.equal(draw(spec, Fill("bernoulli_"), operand=chances[box]), whole[box])


def test_a_law_that_fails_the_probe_is_drawn_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_stream, "CHUNK", 32)
    monkeypatch.setattr(cpu_stream, "law_of", lambda *_: None)
    torch.manual_seed(2)
    whole = torch.randn(100)
    for rank in range(3):
        spec = Spec(abstract_mesh((3,), rank=rank), (Shard(0),), (100,))
        torch.manual_seed(2)
        assert torch.equal(draw(spec, Fill("normal_")), whole[slice(*spec.box((rank,))[0])])


def test_laws_of_torch() -> None:
    """How this torch's CPU distributions consume the generator.

    Another torch may differ and still be right.
    """
    law: Any = cpu_stream.law_of
    assert law(Fill("normal_"), torch.float32, True).unit == 16
    assert law(Fill("normal_"), torch.complex64, True).unit == 8
    assert law(Fill("uniform_"), torch.float32, True) == cpu_stream.Law(1, 1)
    assert law(Fill("uniform_"), torch.float64, True) == cpu_stream.Law(1, 2)
    assert law(Fill("normal_"), torch.float32, False).words == 0, (
        "the spare value depends on the values before"
    )


def test_wrong_laws_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a size that torch's kernel does not use give other values: the probe is needed."""
    monkeypatch.setattr(cpu_stream, "CHUNK", 24)
    monkeypatch.setattr(cpu_stream, "law_of", lambda *_: cpu_stream.Law(1, 0))
    torch.manual_seed(2)
    whole = torch.randn(100)
    torch.manual_seed(2)
    assert not torch.equal(
        draw(Spec(abstract_mesh((2,)), (Shard(0),), (100,)), Fill("normal_")), whole[:50]
    )


def test_partial_tensors_are_refused() -> None:
    with pytest.raises(PlacementError, match="partial"):
        draw(Spec(abstract_mesh((2,)), (Partial(),), (4,)), Fill("normal_"))


def test_meta_tensors_draw_nothing() -> None:
    before = torch.get_rng_state()
    spec = Spec(abstract_mesh((2,)), (Shard(0),), (4,))
    draw(spec, Fill("normal_"), out=torch.empty(2, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_stretches_cover_a_box_once(shape: tuple[int, ...]) -> None:
    dice = random.Random(3)
    values = torch.arange(math.prod(shape))
    for _ in range(60):
        box = tuple(tuple(sorted((dice.randint(0, n), dice.randint(0, n)))) for n in shape)
        target = torch.full([b - a for a, b in box], -1)
        cuts = sorted({0, len(values), *(dice.randint(0, len(values)) for _ in range(3))})
        for start, stop in pairwise(cuts):
            boxed: Any = box  # sorted() forgets the length
            found = list(stretches(shape, boxed, start, stop, values[start:stop], target))
            assert len(found) <= 2 * max(len(shape), 1) - 1
            for part, own in found:
                own.copy_(part)
        assert torch.equal(target, values.view(shape)[tuple(slice(*pair) for pair in box)])


def test_memory_order_and_span() -> None:
    assert walking_order((2, 3), (3, 1)) == (0, 1)
    assert walking_order((2, 3), (1, 2)) == (1, 0)
    assert walking_order((1, 3, 1, 2), (1, 2, 6, 1)) == (0, 2, 1, 3)
    frame = memory_walk_of(Spec(abstract_mesh((2,), rank=1), (Shard(0),), (4, 5)))
    assert frame.span == (10, 20)


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_per_axis_streams(axes: tuple[str, ...]) -> None:
    """Coordinates of a chosen axis draw apart.

    Over the other axes the draw is that of one tensor.
    """
    shape, placements, order = (12, 6), (Shard(0), Shard(0)), ((0, (1, 0)),)
    parts: dict[tuple[int, ...], Any] = {}
    states = set()
    for rank in range(6):
        spec = Spec(
            abstract_mesh((2, 3), ("a", "b"), rank=rank),
            placements,
            shape,
            None,
            torch.float32,
            order,
        )
        torch.manual_seed(4)
        with random_mode("per_axis", axes):
            parts[spec.coordinate or ()] = draw(spec, Fill("normal_"))
        states.add(bytes(torch.get_rng_state().tolist()))
    assert len(states) == 1, "every rank's own generator ends in the same state"
    flat: Any = torch.cat([part.flatten() for part in parts.values()])
    assert flat.unique().numel() == flat.numel(), "no stream is used twice"
    again = Spec(abstract_mesh((2, 3), ("a", "b"), rank=4), (Replicate(), Shard(1)), shape)
    torch.manual_seed(4)
    with random_mode("per_axis", ("a",)):
        replicated = draw(again, Fill("normal_"))
    torch.manual_seed(4)
    assert torch.equal(replicated, torch.randn(shape)[:, 2:4]), (
        "an axis that does not shard leaves replicas equal"
    )


def test_random_mode_is_scoped_and_checked() -> None:
    from shoal_dtensor.rng.state import RandomMode, current_mode

    with random_mode("counter"), random_mode("per_axis", ("dp",)):
        assert current_mode() == RandomMode("per_axis", ("dp",))
    assert current_mode() == RandomMode()
    for mode, axes in (("both", ()), ("per_axis", ()), ("counter", ("dp",))):
        wrong: Any = mode
        with pytest.raises(ArgumentValueError, match="random mode"), random_mode(wrong, axes):
            pass


@pytest.mark.parametrize("mode", ["counter", "local", "single_device"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_again_by_the_mode_of_its_first_run(mode: Any, reentrant: bool) -> None:
    seen: list[Any] = []

    def drop(x: Any) -> Any:
        mask = torch.bernoulli(torch.full_like(x.detach(), 0.5))
        if seen:
            with random_mode("per_axis", ("a",)):  # of its own, and no other's
                torch.rand_like(x)
        local: Any = mask
        seen.append((get_random_mode(), local.to_local()))
        return x * mask

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = DTensor.from_local(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()
        with random_mode("per_axis", ("a",)), random_mode(mode):
            out: Any = checkpoint(drop, x, use_reentrant=reentrant)
        out.sum().backward()
        (first, mask), (second, again) = seen
        assert first == second == mode and torch.equal(mask, again)
        gradient: Any = x.grad
        assert torch.equal(gradient.to_local(), mask)
        assert get_random_mode() == "single_device"
