"""Covers: redistribute/execution/rank_steps.py, redistribute/blocks.py, testing/simulate.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from random_specs import spec_pairs
from shoal_dtensor import Partial, Replicate, Shard, Spec
from shoal_dtensor.internal import volume
from shoal_dtensor.redistribute.blocks import exchange_blocks
from shoal_dtensor.redistribute.execution.rank_steps import blocks_of
from shoal_dtensor.redistribute.plan import plan
from shoal_dtensor.testing import global_value, local_shards, simulate
from shoal_mesh import Link, abstract_mesh
from shoal_mesh.internal import Topology

MESHES = [(4,), (2, 2), (2, 3), (1, 4), (2, 2, 2), (3, 2, 2), (2, 1, 3)]


def check(src: Spec, dst: Spec, seed: int = 0, links: Topology | None = None) -> None:
    """Redistribute random whole numbers and compare the global values exactly."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randint(1, 9, tuple(src.shape), generator=generator).to(src.dtype)
    found = plan(src, dst, topology=links)
    got = global_value(simulate(found, local_shards(full, src, generator)), dst)
    rounded = any(op == "avg" or op.startswith("norm") for _, op in (*src.partials, *dst.partials))
    same = torch.allclose(got, full) if rounded else torch.equal(got, full)
    assert same, f"{found}\n{src}\n{dst}\n{got}\n{full}"


@pytest.mark.parametrize(
    "ops",
    [(), ("sum",), ("sum", "avg"), ("max",), ("min",), ("product",), ("norm2",), ("norm-3.5",)],
    ids=str,
)
def test_random_pairs(ops: tuple[str, ...]) -> None:
    for i, (src, dst) in enumerate(spec_pairs(7, 400, mesh_shapes=MESHES, ops=ops)):
        check(src, dst, i)


def test_random_pairs_on_uneven_links() -> None:
    for i, (src, dst) in enumerate(spec_pairs(11, 400, mesh_shapes=MESHES)):
        size = src.mesh.ndim
        check(
            src, dst, i, Topology(tuple(Link(1e-9, speed) for speed in (1.0, 100.0, 10.0)[:size]))
        )


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 2, 2)], ids=str)
def test_all_pairs_even(mesh_shape: tuple[int, ...]) -> None:
    mesh = abstract_mesh(mesh_shape)
    options = [Replicate(), Partial(), Shard(0), Shard(1)]
    specs = [
        Spec(mesh, p, (8, 16), dtype=torch.float64)
        for p in product(options, repeat=len(mesh_shape))
    ]
    pairs = list(product(specs, specs))
    for src, dst in pairs[:: max(1, len(pairs) // 600)]:
        check(src, dst)


def test_uneven_nested_gather_that_torch_corrupts() -> None:
    src = Spec(abstract_mesh((2, 2)), (Shard(0), Shard(0)), (5, 3), dtype=torch.float64)
    dst = src.with_(placements=(Replicate(), Replicate()))
    full = torch.arange(15, dtype=torch.float64).reshape(5, 3)
    for shard in simulate(plan(src, dst), local_shards(full, src)):
        assert torch.equal(shard, full)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from(MESHES), st.sampled_from([(), ("sum",), ("min",)]))
def test_there_and_back(seed: int, mesh_shape: tuple[int, ...], ops: tuple[str, ...]) -> None:
    ((src, dst),) = spec_pairs(seed, 1, mesh_shapes=[mesh_shape], ops=ops, ragged=0.5)
    check(src, dst, seed % 1000)
    check(dst, src, seed % 1000)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from(MESHES))
def test_an_exchange_moves_only_what_must_move(seed: int, mesh_shape: tuple[int, ...]) -> None:
    ((src, dst),) = spec_pairs(seed, 1, mesh_shapes=[mesh_shape], ops=())
    for step in plan(src, dst).steps:
        if step.name != "Exchange":
            continue
        for c in product(*map(range, mesh_shape)):
            blocks = blocks_of(step, c)
            kept = sum(map(volume, blocks.kept))
            received = sum(volume(box) for _, box in blocks.receives)
            assert received == volume(step.dst.box(c)) - kept


def test_replicas_take_turns_as_senders() -> None:
    whole, halves = ((0, 4),), [((0, 2),), ((2, 4),)]
    before = [[whole], [whole], [], []]
    after = [[], [], *([half] for half in halves)]
    sends = [exchange_blocks(me, before, after).sends for me in (0, 1)]
    assert sends == [((2, halves[0]),), ((3, halves[1]),)]
    assert exchange_blocks(3, before, after).receives == ((1, halves[1]),)


def test_simulation_notices_replicas_that_differ() -> None:
    spec = Spec(abstract_mesh((2,)), (Replicate(),), (2,))
    with pytest.raises(AssertionError, match="replica"):
        global_value([torch.zeros(2), torch.ones(2)], spec)


def test_what_is_gathered_is_row_major() -> None:
    """Also from blocks of one column, which are a transposed view of what arrives."""
    src = Spec(abstract_mesh((4,)), (Shard(1),), (3, 4))
    found = plan(src, src.with_(placements=(Replicate(),)))
    assert all(
        shard.is_contiguous() for shard in simulate(found, local_shards(torch.zeros(3, 4), src))
    )
