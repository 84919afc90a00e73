"""`placements` determines the whole layout, including the order of axes.

A tensor made from it has the same layout.

Covers: layout/{placements,partition_spec,dim_sharding,spec}.py, and all that takes placements.
"""

from __future__ import annotations

import io
import pickle
from itertools import accumulate
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import shoal_dtensor
from shoal_dtensor import (
    DTensor,
    PartitionSpec,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_tensor,
    local_map,
)
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.interop import from_torch, to_torch
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Order = tuple[tuple[int, tuple[int, ...]], ...]


# --- as values ------------------------------------------------------------------------------------


def test_a_later_axis_is_a_strided_shard_and_no_shard() -> None:
    # once they were (Shard(0), Shard(0)), and the order was elsewhere
    spec = Spec(abstract_mesh((2, 2)), (S0, S0), (8, 4), shard_order=((0, (1, 0)),))
    first, last = spec.placements
    assert first is StridedShard(0, split_factor=2) and last is S0
    assert not issubclass(type(first), Shard)
    assert first != S0
    assert repr(spec.placements) == "(StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert spec.placements != Spec(abstract_mesh((2, 2)), (S0, S0), (8, 4)).placements


@st.composite
def sharded_dims(draw: st.DrawFn) -> tuple[DeviceMesh, list[Placement], tuple[int], Order]:
    """One dim, sharded by all axes of a mesh in any order.

    It is sharded by chunks, units, sizes of all kinds, or runs.
    """
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes = tuple(draw(st.permutations(range(len(mesh_shape)))))
    kind = draw(st.sampled_from(["chunks", "units", "sizes", "runs"]))
    placements: list[Placement] = [S0] * len(mesh_shape)
    length = draw(st.integers(1, 24))
    if kind == "units":
        for axis in axes:
            placements[axis] = Shard(0, multiple_of=draw(st.integers(1, 3)))
    if kind in ("sizes", "runs"):
        ranks = prod(mesh_shape)
        sizes = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
        inner = ranks
        for axis in axes:
            inner //= mesh_shape[axis]
            ends = [0, *accumulate(sizes)]
            of_axis = [ends[i + inner] - ends[i] for i in range(0, ranks, inner)]
            placements[axis] = Shard(0, sizes=of_axis)
        length = sum(sizes)
    if kind == "runs":
        placements = [
            StridedShard(0, split_factor=2, sizes=p.sizes)  # type: ignore[attr-defined]  # ragged
            for p in placements
        ]
        length *= 2
        # an order of runs is not given beside placements of `StridedShard`: they say it
        counts = {a: prod(mesh_shape[b] for b in axes[: axes.index(a)] if b > a) for a in axes}
        placements = [
            StridedShard(
                0,
                split_factor=2,
                sizes=p.sizes,  # type: ignore[attr-defined]  # it has sizes
                outer_shards=counts[axis],
            )
            for axis, p in enumerate(placements)
        ]
    return abstract_mesh(mesh_shape), placements, (length,), ((0, axes),)


@settings(max_examples=300)
@given(sharded_dims())
def test_placements_alone_are_the_layout(
    case: tuple[DeviceMesh, list[Placement], tuple[int], Order],
) -> None:
    mesh, placements, shape, order = case
    spec = Spec(mesh, placements, shape, shard_order=order)
    assert Spec(mesh, spec.placements, shape) is spec
    assert Spec(mesh, spec.placements, shape, shard_order=spec.shard_order) is spec
    assert spec.with_(placements=spec.placements) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert pickle.loads(pickle.dumps(spec.placements)) == spec.placements
    names = {"Shard": Shard, "StridedShard": StridedShard}
    # as code that torch.compile generates spells them
    assert tuple(eval(repr(spec.placements), names)) == spec.placements
    parts = [spec.dim_shardings[0].indices(at) for at in _coordinates(mesh)]
    assert sorted(i for part in parts for i in part) == [*range(shape[0])]


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    coordinates = [mesh.coordinate_of(rank) for rank in mesh.ranks]
    return [at for at in coordinates if at is not None]


def test_specs_of_older_files_have_their_order_beside_plain_shards() -> None:
    mesh = abstract_mesh((2, 2))
    old = (mesh, (S0, S0), (8, 4), (4, 1), torch.float32, ((0, (1, 0)),))
    assert Spec(*old).placements == (StridedShard(0, split_factor=2), S0)
    rebuild, fields = StridedShard(0, split_factor=3, sizes=(2, 1)).__reduce__()
    assert fields == (0, 3, (2, 1)) and rebuild(0, 3) is StridedShard(0, split_factor=3)


def test_an_axis_leaves_a_dim_and_the_others_shard_it_as_before() -> None:
    mesh = abstract_mesh((2, 2, 2))
    spec = Spec(mesh, (S0, S0, S0), (8,), shard_order=((0, (2, 0, 1)),))
    assert spec.without_axes({2}).placements == (S0, S0, R)
    assert spec.without_axes({0}).shard_order == ((0, (2, 1)),)
    ragged = Spec(
        abstract_mesh((2, 2)), (Shard(0, sizes=(3, 1)), Shard(0, sizes=(0, 3, 1, 0))), (4,)
    )
    assert ragged.without_axes({1}).placements == (Shard(0, sizes=(3, 1)), R)
    assert ragged.without_axes({0}).placements == (R, S0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_factor": 2, "outer_shards": 2}, "outer_shards=2 needs sizes"),
        ({"split_factor": 1, "outer_shards": 0, "sizes": (1,)}, "outer_shards must be at least 1"),
        ({"split_factor": 2, "multiple_of": 0}, "multiple_of must be at least 1"),
        ({"split_factor": 2, "multiple_of": 2, "sizes": (1,)}, "sizes or multiple_of, not both"),
    ],
)
def test_contradictions_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        StridedShard(0, **options)


# --- on ranks -------------------------------------------------------------------------------------

# mesh, shape, placements, order
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Placement], Order]] = {
    "even": ((2, 2), (8, 3), [S0, S0], ((0, (1, 0)),)),
    "uneven": ((2, 2), (5, 3), [S0, S0], ((0, (1, 0)),)),
    "some empty": ((2, 2), (2, 3), [S0, S0], ((0, (1, 0)),)),
    "second dim": ((2, 2), (3, 7), [S1, S1], ((1, (1, 0)),)),
    "units": ((2, 2), (12, 3), [S0, Shard(0, multiple_of=4)], ((0, (1, 0)),)),
    "units inside": ((2, 2), (12, 3), [Shard(0, multiple_of=4), S0], ((0, (1, 0)),)),
    "ragged": (
        (2, 2),
        (9, 2),
        [Shard(0, sizes=(1, 4, 3, 1)), Shard(0, sizes=(5, 4))],
        ((0, (1, 0)),),
    ),
    "three axes": ((1, 2, 2), (8, 3), [R, S0, S0], ((0, (2, 1)),)),
    "all of three": ((2, 1, 2), (7, 3), [S0, S0, S0], ((0, (2, 1, 0)),)),
    "two dims": ((1, 2, 2), (4, 6), [S1, S0, S0], ((0, (2, 1)),)),
    "runs": (
        (2, 2),
        (16,),
        [
            StridedShard(0, split_factor=2, sizes=(3, 1, 2, 2), outer_shards=2),
            StridedShard(0, split_factor=2, sizes=(4, 4)),
        ],
        (),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4)
def test_whoever_takes_placements_makes_the_same_layout(name: str) -> None:
    # once from_local differed in half of the elements, distribute_tensor in all on some ranks, and
    # uneven sizes were a PeerError
    mesh_shape, shape, wanted, order = LAYOUTS[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(float(prod(shape))).view(shape)
    p = distribute_tensor(whole, mesh, wanted, shard_order=order)
    local, placements = p.to_local(), p.placements
    assert torch.equal(p.full_tensor(), whole)

    def is_same(made: DTensor) -> None:
        assert made.spec.same_layout(p.spec)
        # the sizes that ranks compared are in their own words
        assert made.placements == placements or "units" in name
        assert torch.equal(made.to_local(), local) and torch.equal(made.full_tensor(), whole)

    is_same(DTensor.from_local(local, mesh, placements, shape=shape, stride=p.stride()))
    is_same(DTensor.from_local(local, mesh, placements, shape=shape))
    is_same(DTensor.from_local(local, mesh, placements, run_check=True))
    is_same(DTensor.from_local(local, mesh, placements, shape=shape, shard_order=p.shard_order))
    is_same(DTensor.from_local(local, mesh, p.spec.placements, run_check=True))
    if p.spec.even:
        is_same(DTensor.from_local(local, mesh, placements))
        is_same(local_map(lambda x: x + 0, [*placements], run_check=False)(p))
    is_same(distribute_tensor(whole, mesh, placements))
    is_same(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    is_same(distribute_tensor(whole, mesh).redistribute(placements=placements))
    sharding: Any = placements
    plain = [p if isinstance(p, Replicate) else Shard(p.dim) for p in sharding]
    is_same(distribute_tensor(whole, mesh, plain).redistribute(mesh, placements))
    is_same(local_map(lambda x: x + 0, out_placements=[*placements])(p))
    is_same(local_map(lambda x: x + 0, [*placements], ([*placements],))(p))
    zeros = shoal_dtensor.zeros(shape, device_mesh=mesh, placements=placements)
    assert zeros.spec is p.spec and zeros.to_local().shape == local.shape
    total: Any = zeros + p
    is_same(total)
    copied: Any = torch.empty_like(p).copy_(p)
    is_same(copied)


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4)
def test_gradients_come_in_the_placements_that_are_said(name: str) -> None:
    mesh_shape, shape, wanted, order = LAYOUTS[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(float(prod(shape))).view(shape)
    p: Any = distribute_tensor(whole, mesh, wanted, shard_order=order).requires_grad_()
    factor = p.detach()
    out = p.to_local(grad_placements=p.placements) * factor.to_local()
    (gradient,) = torch.autograd.grad(out.sum(), p)
    assert gradient.placements == p.placements and torch.equal(gradient.full_tensor(), whole)
    local = factor.to_local().requires_grad_()
    back: Any = DTensor.from_local(
        local, mesh, p.placements, shape=shape, grad_placements=p.placements
    )
    (back * factor).sum().full_tensor().backward()
    assert torch.equal(local.grad, factor.to_local())


@on_ranks(4)
def test_local_map_asks_for_the_order_that_placements_say() -> None:
    # once the order of the input was kept, and the function got other rows than asked for
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(8.0)
    p = distribute_tensor(whole, mesh, [S0, S0], shard_order=((0, (1, 0)),))
    with pytest.raises(PlacementError, match="in_placements expects"):
        local_map(lambda x: x, [S0, S0], ([S0, S0],))(p)
    moved = local_map(lambda x: x, [S0, S0], ([S0, S0],), redistribute_inputs=True)(p)
    assert moved.placements == (S0, S0) and torch.equal(moved.full_tensor(), whole)


@on_ranks(4)
def test_the_order_passes_to_torch_and_back() -> None:
    from torch.distributed.tensor import DTensor as TorchTensor, Shard as TorchShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(24.0).view(8, 3)
    p = distribute_tensor(whole, mesh, PartitionSpec(("tp", "dp")))
    theirs: Any = to_torch(p)
    shards: Any = p.placements
    ours = [(type(a).__name__.strip("_"), a.dim) for a in shards]
    assert ours == [(type(a).__name__.strip("_"), a.dim) for a in theirs.placements]
    assert not isinstance(theirs.placements[0], TorchShard)
    assert torch.equal(theirs.full_tensor(), whole)
    again = from_torch(theirs, mesh)
    assert again.spec is p.spec and torch.equal(again.to_local(), p.to_local())
    made = TorchTensor.from_local(p.to_local(), theirs.device_mesh, theirs.placements)
    assert torch.equal(from_torch(made, mesh).full_tensor(), whole)


@on_ranks(4)
def test_a_pickled_tensor_keeps_its_order() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(10.0)
    p = distribute_tensor(whole, mesh, [S0, S0], shard_order=((0, (1, 0)),))
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    with torch.serialization.safe_globals(shoal_dtensor.safe_globals()):
        loaded = torch.load(file)
    assert loaded.spec is p.spec and torch.equal(loaded.full_tensor(), whole)


@on_ranks(4)
def test_compiled_code_has_the_order() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(8.0)
    p = distribute_tensor(whole, mesh, [S0, S0], shard_order=((0, (1, 0)),))

    def function(x: Any) -> Any:
        return DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements)

    out = torch.compile(function, backend="aot_eager", fullgraph=True)(p)
    assert out.placements == p.placements and torch.equal(out.full_tensor(), whole * 2)
