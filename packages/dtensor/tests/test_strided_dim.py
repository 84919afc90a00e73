"""Covers: layout/dim_sharding.py, redistribute/plan.py, runs in rules/."""

from __future__ import annotations

import pickle
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from shoal_dtensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_tensor,
)
from shoal_dtensor.dispatch.propagate import decide
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.layout.dim_sharding import DimSharding, StridedDimSharding, fold_levels
from shoal_dtensor.redistribute.plan import alternatives, plan
from shoal_dtensor.scopes import current
from shoal_dtensor.testing import simulate
from shoal_dtensor.testing.simulate import coordinates, global_value, local_shards
from shoal_mesh import CommDebugMode, DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
MESH = abstract_mesh((2, 2), ("dp", "tp"))
aten = torch.ops.aten


def viewed(spec: Spec, *shape: int) -> Spec:
    """The spec of a view, which must not move anything."""
    decision = decide(aten.view.default, (spec, list(shape)), {}, current())
    assert not getattr(decision, "moves", ()), f"{spec} as {shape} is gathered"
    return decision.outputs[0]


def ragged(draw: st.DrawFn, dim: int, length: int) -> Shard:
    """A sharding of a dim in two anywhere."""
    first = draw(st.integers(0, length))
    return Shard(dim, sizes=(first, length - first))


@st.composite
def cut_tensors(draw: st.DrawFn) -> Spec:
    """(a, b, c) of which the mesh shards any two dims, or one of them twice."""
    shape = tuple(draw(st.integers(2, 5)) for _ in range(3))
    one, other = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    if one == other:
        return Spec(MESH, (Shard(one), Shard(one)), shape)
    return Spec(MESH, (ragged(draw, one, shape[one]), ragged(draw, other, shape[other])), shape)


def filled(shape: Any) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).view(tuple(shape))


@settings(max_examples=150)
@given(cut_tensors(), st.sampled_from([(0, 2), (1, 3), (0, 3)]))
def test_flattening_and_unflattening_any_sharding_moves_nothing(
    spec: Spec, dims: tuple[int, int]
) -> None:
    start, stop = dims
    shape = (*spec.shape[:start], prod(spec.shape[start:stop]), *spec.shape[stop:])
    flat, full = viewed(spec, *shape), filled(spec.shape)
    pieces = local_shards(full, spec)
    for c, before, after in zip(
        coordinates(spec), pieces, local_shards(full.view(shape), flat), strict=True
    ):
        assert torch.equal(before.reshape(flat.local_shape_at(c)), after)
    assert viewed(flat, *spec.shape).same_layout(spec)


@settings(max_examples=150)
@given(cut_tensors(), cut_tensors(), st.integers(0, 8))
def test_redistribution_to_and_from_folded_dims(spec: Spec, other: Spec, pick: int) -> None:
    shape = (prod(spec.shape[:2]), spec.shape[2])
    flat = viewed(spec, *shape)
    layouts = [*product([R, S0, S1], repeat=2)]
    target = Spec(MESH, layouts[pick], shape)
    ends = [target, flat]
    if prod(other.shape) == prod(spec.shape) and other.shape[2] == spec.shape[2]:
        ends.append(viewed(other, *shape))
    full = filled(shape)
    for src, dst in product(ends, repeat=2):
        chosen = plan(src, dst)
        shards = local_shards(full, src)
        made = simulate(chosen, shards)
        assert torch.equal(global_value(made, dst), full)
        assert all(torch.equal(a, b) for a, b in zip(made, local_shards(full, dst), strict=True))
        assert not chosen.steps or all(
            a.data_ptr() != b.data_ptr() for a, b in zip(made, shards, strict=True) if a.numel()
        )


def test_gathering_a_folded_dim_takes_one_collective() -> None:
    flat = viewed(Spec(abstract_mesh((4,)), (S1,), (3, 8, 5)), 24, 5)
    chosen = plan(flat, flat.with_(placements=(R,)))
    assert [step.name for step in chosen.steps] == ["Reshape", "AllGather", "Reshape"]
    assert alternatives(flat, flat.with_(placements=(R,)))[0].seconds == chosen.seconds


def test_a_folded_spec_is_a_value() -> None:
    flat = viewed(Spec(MESH, (S0, S1), (4, 6, 8)), 24, 8)
    assert flat.is_strided and flat.placements == (
        S0,
        StridedShard(0, split_factor=4, sizes=(3, 3)),
    )
    assert pickle.loads(pickle.dumps(flat)) is flat
    assert Spec(MESH, flat.placements, flat.shape) is flat
    assert flat.with_(dtype=torch.float64).with_(dtype=torch.float32) is flat
    assert "strided of [4, 6]" in repr(flat)
    assert flat.placements[1].is_shard(0) and not flat.placements[1].is_shard(1)
    assert isinstance(flat.dim_shardings[0], StridedDimSharding) and flat.dim_shardings[0].indices(
        (1, 0)
    ) == [
        12,
        13,
        14,
        18,
        19,
        20,
    ]


def test_a_folded_dim_has_no_interval() -> None:
    flat = viewed(Spec(MESH, (R, S1), (4, 6, 8)), 24, 8)
    with pytest.raises(PlacementError, match="flattened from dims"):
        flat.box((0, 0))
    assert flat.local_shape_at((0, 1)) == (12, 8)


def test_runs_and_shards_must_fit() -> None:
    assert fold_levels({4: DimSharding((0,), (2,), (2, 1))}, 13) is None
    assert (
        fold_levels({1: DimSharding((0,), (2,), (7, 5)), 4: DimSharding((1,), (2,), (2, 1))}, 12)
        is None
    )
    with pytest.raises(PlacementError, match="cannot be divided into these shards"):
        Spec(abstract_mesh((2,)), (StridedShard(0, split_factor=4, sizes=(2, 1)),), (13,))
    with pytest.raises(PlacementError, match="negative"):
        StridedShard(0, split_factor=2, sizes=(-1, 2))


def test_an_operator_that_needs_the_order_gathers() -> None:
    flat = viewed(Spec(abstract_mesh((4,)), (S1,), (2, 8)), 16)
    assert decide(aten.cumsum.default, (flat, 0), {}, current()).moves
    assert not decide(aten.sum.dim_IntList, (flat, [0]), {}, current()).slow_path


def meshes() -> list[tuple[DeviceMesh, list[Placement]]]:
    return [(init_device_mesh("cpu", (4,)), [S1]), (init_device_mesh("cpu", (2, 2)), [S0, S1])]


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


@pytest.mark.parametrize("shape", [(3, 8), (2, 7), (3, 2)], ids=str)
@on_ranks(4)
def test_a_linear_layer_and_its_loss_on_a_sharded_sequence_gather_nothing(
    shape: tuple[int, int],
) -> None:
    x, weight, bias = (t.requires_grad_() for t in (sample(*shape, 6), sample(5, 6), sample(5)))
    labels = torch.arange(prod(shape)).view(shape) % 5
    loss: Any = F.cross_entropy(F.linear(x, weight, bias).view(-1, 5), labels.view(-1))
    loss.backward()
    for mesh, placements in meshes():
        whole = [R] * mesh.ndim
        leaves = [
            distribute_tensor(t.detach(), mesh, p).requires_grad_()
            for t, p in ((x, placements), (weight, whole), (bias, whole))
        ]
        spread: Any = distribute_tensor(labels, mesh, placements)
        with CommDebugMode() as counts:
            logits: Any = F.linear(*leaves)
            made: Any = F.cross_entropy(logits.view(-1, 5), spread.view(-1))
            made.backward()
        assert {str(op).split(".")[-1] for op in counts.get_comm_counts()} == {"all_reduce"}
        assert logits.placements == tuple(placements)
        torch.testing.assert_close(made.full_tensor(), loss)
        for mine, theirs in zip(leaves, (x, weight, bias), strict=True):
            gradient: Any = mine.grad
            torch.testing.assert_close(gradient.full_tensor(), theirs.grad)


@pytest.mark.parametrize("heads", [8, 6, 3])
@on_ranks(4)
def test_attention_on_sharded_heads_runs_no_collective(heads: int) -> None:
    query, key = sample(2, heads, 5, 4).requires_grad_(), sample(2, heads, 5, 4) / 2
    wanted: Any = (query @ key.transpose(-1, -2)).softmax(-1) @ key
    wanted.sum().backward()
    for mesh, placements in meshes():
        q: Any = distribute_tensor(query.detach(), mesh, placements).requires_grad_()
        k: Any = distribute_tensor(key, mesh, placements)
        with CommDebugMode() as counts:
            made = (q @ k.transpose(-1, -2)).softmax(-1) @ k
            made.sum().backward()
        assert not counts.get_total_counts()
        assert made.placements == tuple(placements)
        torch.testing.assert_close(made.full_tensor(), wanted)
        torch.testing.assert_close(q.grad.full_tensor(), query.grad)


@on_ranks(4)
def test_writing_to_a_flat_view_reaches_its_base() -> None:
    mesh = init_device_mesh("cpu", (4,))
    base: Any = distribute_tensor(filled((3, 6)), mesh, [S1])
    base.view(-1).mul_(2)
    assert torch.equal(base.full_tensor(), filled((3, 6)) * 2)


@on_ranks(4)
def test_folded_placements_go_through_from_local() -> None:
    mesh = init_device_mesh("cpu", (4,))
    flat: Any = distribute_tensor(filled((3, 6)), mesh, [S1]).view(-1)
    again: Any = DTensor.from_local(flat.to_local() + 1, mesh, flat.placements)
    assert again._spec is flat._spec
    assert torch.equal(again.full_tensor(), filled((18,)) + 1)


@pytest.mark.parametrize("source", [None, 0, 1])
@pytest.mark.parametrize("dims", [(0, 2), (1, 3), (0, 3)], ids=str)
@on_ranks(4)
def test_a_plain_tensor_is_distributed_onto_folded_dims(
    dims: tuple[int, int], source: int | None
) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(3 * 5 * 3.0).view(3, 5, 3)
    for placements in (
        [Shard(1), Shard(2)],
        [Shard(2), Shard(1)],
        [Shard(1, sizes=(5, 0)), Replicate()],
    ):
        one: Any = distribute_tensor(whole, mesh, placements).flatten(dims[0], dims[1] - 1)
        assert one._spec.is_strided or dims == (1, 3)
        mine = source is None or tuple(mesh.get_coordinate() or ()) == (source, source)
        theirs = whole if mine else torch.zeros_like(whole)
        other: Any = distribute_tensor(
            theirs.flatten(dims[0], dims[1] - 1),
            mesh,
            one.placements,
            src_data_rank=source,
            shard_order=one._spec.shard_order,
        )
        assert other._spec is one._spec
        assert torch.equal(other._local_tensor, one._local_tensor)
