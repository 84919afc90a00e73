"""Covers: redistribute/shards_in_flight.py, redistribute/execution/execute.py."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from random_specs import draw_spec
from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    coalesce,
    distribute_tensor,
)
from shoal_dtensor.errors import RedistributeError
from shoal_dtensor.redistribute.execution.execute import run_plan
from shoal_dtensor.redistribute.plan import plan
from shoal_dtensor.redistribute.shards_in_flight import ShardsInFlight
from shoal_dtensor.testing import coordinates, local_shards
from shoal_mesh import CommDebugMode, DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world, observed, on_ranks


def mine(full: Tensor, spec: Spec, seed: int = 0) -> Tensor:
    """This rank's local tensor of a global value.

    Equal seeds take partial values apart equally on all ranks.
    """
    shards = local_shards(full, spec, torch.Generator().manual_seed(seed))
    assert spec.coordinate is not None
    return shards[coordinates(spec).index(spec.coordinate)]


def reduced(spec: Spec) -> Spec:
    """The spec without its partial axes."""
    return spec.with_(placements=[Replicate() if p.is_partial() else p for p in spec.placements])


def random_pairs(
    mesh: DeviceMesh, count: int, ops: tuple[str, ...], seed: int
) -> list[tuple[Spec, Spec, Tensor]]:
    rng, found = Random(seed), []
    for _ in range(count):
        shape = [rng.choice((1, 2, 3, 4, 5, 8)) for _ in range(rng.randint(1, 3))]
        src, dst = draw_spec(rng, mesh, shape, ops=ops), draw_spec(rng, mesh, shape, ops=())
        full = torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(seed)).to(
            torch.float64
        )
        found.append((src, dst, full))
    return found


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("ops", [(), ("sum",), ("max",)], ids=str)
@on_ranks(4)
def test_random_pairs(mesh_shape: tuple[int, ...], ops: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for src, dst, full in random_pairs(mesh, 40, ops, 3):
        found = plan(src, dst)
        assert torch.equal(run_plan(found, mine(full, src)), mine(full, dst)), (
            f"{src} {dst}\n{found}"
        )


@on_ranks(4)
def test_partial_destinations() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(24.0).reshape(4, 6)
    options = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]
    specs = [
        Spec(mesh, p, (4, 6))
        for p in product(options, options)
        if Partial("max") not in p or p[0] is p[1]
    ]
    for src, dst in zip(specs, specs[7:] + specs[:7], strict=True):
        there = run_plan(plan(src, dst), mine(full, src, 5))
        back = run_plan(plan(dst, reduced(dst)), there)
        assert torch.equal(back, mine(full, reduced(dst))), f"{src} {dst}"


@on_ranks(4)
def test_coalesced_redistributions_give_the_same_in_fewer_collectives() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cases = [case for ops in ((), ("sum",), ("max",)) for case in random_pairs(mesh, 30, ops, 9)]
    plans = [plan(src, dst) for src, dst, _ in cases]
    counts = {}
    for name in ("alone", "together"):
        locals_ = [mine(full, src) for src, _, full in cases]
        with observed() as events:
            if name == "alone":
                results = [run_plan(p, local) for p, local in zip(plans, locals_, strict=True)]
            else:
                results = ShardsInFlight(plans, locals_).wait()
        counts[name] = len(events)
        for (src, dst, full), result in zip(cases, results, strict=True):
            assert torch.equal(result, mine(full, dst)), f"{name}: {src} {dst}"
    assert counts["together"] < counts["alone"] / 3, counts


@on_ranks(4)
def test_a_coalesced_block_of_dtensors_with_gradients() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    weights = [torch.randn(n, 6) for n in (3, 4, 5)]
    parts: list[Any] = [
        distribute_tensor(w, mesh, [Shard(0), Shard(1)]).requires_grad_() for w in weights
    ]
    with CommDebugMode() as counted:
        with coalesce():
            whole = [part.redistribute(placements=[Replicate(), Replicate()]) for part in parts]
        assert all(
            torch.equal(w.to_local(), plain) for w, plain in zip(whole, weights, strict=True)
        )
    assert counted.get_total_counts() <= 2
    loss: Any = sum((w * w).sum() for w in whole)
    loss.backward()
    for part, plain in zip(parts, weights, strict=True):
        assert part.grad is not None
        assert part.grad.placements == part.placements
        assert torch.allclose(part.grad.full_tensor(), 2 * plain)


@on_ranks(4)
def test_a_result_used_inside_the_block_is_there() -> None:
    mesh = init_device_mesh("cpu", (4,))
    part = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with coalesce():
        whole: Any = part.redistribute(placements=[Replicate()])
        assert torch.equal((whole + 1).to_local(), torch.arange(8.0) + 1)


@on_ranks(4)
def test_writing_to_a_queued_source_is_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    part = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    block = coalesce()
    block.__enter__()
    whole = part.redistribute(placements=[Replicate()])
    part.zero_()
    with pytest.raises(RedistributeError, match="written to before it was sent"):
        block.__exit__(None, None, None)
    with pytest.raises(RedistributeError, match="written to before it was sent"):
        whole.to_local()


@on_ranks(4)
def test_started_redistributions_finish_when_waited_for() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    flying = []
    for src, dst, full in random_pairs(mesh, 30, ("sum",), 4):
        flying.append((ShardsInFlight([plan(src, dst)], [mine(full, src)]), mine(full, dst)))
    for flight, expected in flying:
        (got,) = flight.wait()
        assert torch.equal(got, expected)
        assert flight.wait()[0] is got


@on_ranks(4)
def test_the_first_use_of_what_was_started_starts_no_collective() -> None:
    """So ranks may use it in any order, or not at all."""
    mesh = init_device_mesh("cpu", (2, 2))
    x: Any = DTensor.from_local(torch.ones(512, 512), mesh, [Partial(), Shard(0)])
    with observed() as events:
        moved = x.redistribute(placements=[Replicate(), Shard(1)], async_op=True)
    assert len(events) == plan(x._spec, moved._spec).collectives == 2
    if mesh.get_rank() == 0:
        with observed() as events:
            assert torch.equal(moved.to_local(), torch.full((1024, 256), 2.0))
        assert not events


OVERLAPPING: dict[str, tuple[tuple[int, int], list[Placement], list[Placement]]] = {
    "gather": ((5, 3), [Shard(0)], [Replicate()]),
    "gather of two dims": ((5, 3), [Shard(0), Shard(1)], [Replicate(), Replicate()]),
    "exchange": ((7, 5), [Shard(0)], [Shard(1)]),
    "scatter": ((7, 5), [Partial()], [Shard(0)]),
    "to ragged": ((8, 2), [Shard(0)], [Shard(0, sizes=(1, 5, 0, 2))]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
@on_ranks(4)
def test_uneven_redistributions_go_on_until_the_first_use(name: str, tmp_path: Path) -> None:
    """The others only join once rank 0 has got past starting, so it cannot have waited for them."""
    flag = tmp_path / "started"
    shape, old, new = OVERLAPPING[name]
    mesh = init_device_mesh("cpu", (4,) if len(old) == 1 else (2, 2))
    full = torch.arange(float(shape[0] * shape[1])).view(shape)
    src = Spec(mesh, old, shape)
    tensor = DTensor.from_local(mine(full, src), mesh, old, shape=shape)
    end = time.monotonic() + 40
    while mesh.get_rank() and not flag.exists():
        assert time.monotonic() < end, "rank 0 never got past starting its redistribution"
        time.sleep(0.005)
    moved: Any = tensor.redistribute(placements=new, async_op=True)
    if mesh.get_rank() == 0:
        flag.touch()
    expected = mine(full, Spec(mesh, new, shape))
    assert torch.equal((moved + 0).to_local(), expected)
    assert torch.equal(moved.to_local(), expected)


@on_ranks(4)
def test_replicas_are_bitwise_equal_after_a_reduction_over_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    comm = mesh.comm((0, 1))
    from shoal_mesh import all_gather

    for shape in ((257,), (64, 33), (5, 3), (1,), (3, 1, 7), (1024, 512)):
        local = torch.randn(shape, generator=torch.Generator().manual_seed(mesh.get_rank()))
        src = Spec(mesh, (Partial(), Partial()), shape)
        got = run_plan(plan(src, reduced(src)), local)
        every = all_gather(got.reshape(1, -1), comm).reshape(4, -1)
        assert all(torch.equal(row, every[0]) for row in every)


@on_ranks(4)
def test_the_adjoint_of_a_redistribution() -> None:
    """<A x, y> == <x, A' y>, where A' goes back with replicated and partial exchanged."""
    mesh = init_device_mesh("cpu", (2, 2))
    world = mesh.comm((0, 1))
    from shoal_mesh import all_reduce

    def inner(a: Tensor, b: Tensor) -> float:
        return float(all_reduce((a * b).sum(), world))

    def dual(spec: Spec) -> Spec:
        flip = {Replicate(): Partial(), Partial(): Replicate()}
        return spec.with_(placements=[flip.get(p, p) for p in spec.placements])

    rng = Random(5)
    for case in range(60):
        shape = [rng.choice((2, 3, 5)) for _ in range(2)]
        src, dst = (draw_spec(rng, mesh, shape, ops=("sum",)) for _ in range(2))
        seed = torch.Generator().manual_seed(100 * case + mesh.get_rank())
        x = run_plan(
            plan(src, src), torch.randn(src.local_shape, generator=seed, dtype=torch.float64)
        )
        y = torch.randn(dst.local_shape, generator=seed, dtype=torch.float64)
        # Values: replicas of x must agree, as must those of y in the dual space.
        x = agreed(src, x)
        y = agreed(dual(dst), y)
        left = inner(run_plan(plan(src, dst), x), y)
        right = inner(x, run_plan(plan(dual(dst), dual(src)), y))
        assert abs(left - right) < 1e-9 * max(1.0, abs(left)), f"{src} {dst}: {left} {right}"


def agreed(spec: Spec, local: Tensor) -> Tensor:
    """The local tensor, the same on all replicas: that of the first."""
    from shoal_mesh import broadcast

    for axis, placement in enumerate(spec.placements):
        if placement.is_replicate():
            local = broadcast(local, (spec.mesh, axis))
    return local


@on_ranks(4)
def test_memory_order_follows_the_global_stride() -> None:
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(64.0).reshape(8, 8)
    src = Spec(mesh, (Shard(0),), (8, 8), stride=(1, 8))
    for dst in (src.with_(placements=(Replicate(),)), src.with_(placements=(Shard(1),))):
        got = run_plan(plan(src, dst), mine(full, src))
        assert torch.equal(got, mine(full, dst))
        assert got.stride()[0] < got.stride()[1]


def test_results_do_not_share_memory_with_the_source() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        src = Spec(mesh, (Replicate(),), (8, 4))
        local = torch.zeros(8, 4)
        for placement in (Shard(0), Shard(1), Partial(), Partial("max")):
            got = run_plan(plan(src, src.with_(placements=(placement,))), local)
            assert got.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
            assert got.is_contiguous()
        assert run_plan(plan(src, src), local) is local


def test_an_abstract_mesh_can_plan_but_not_run() -> None:
    from shoal_mesh.errors import NoGroupError

    src = Spec(abstract_mesh((4,)), (Shard(0),), (8,))
    with pytest.raises(NoGroupError, match="abstract"):
        run_plan(plan(src, src.with_(placements=(Replicate(),))), torch.zeros(2))


MOVED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16,
    torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def with_odd_strides(local: Tensor) -> list[Tensor]:
    """The same values spread in memory.

    Dims of one element have any stride and count as contiguous all the same.
    """
    apart = torch.zeros(*local.shape, 3, dtype=local.dtype)[..., 1]
    shifted = torch.zeros(64, dtype=local.dtype).as_strided(local.shape, (7, 3), 1)
    return [apart.copy_(local), shifted.copy_(local)]


@on_ranks(2)
def test_a_shard_of_any_dtype_and_strides_moves() -> None:
    """One element, none and several on a rank; each way from one placement to another."""
    mesh = init_device_mesh("cpu", (2,))
    placements = (Replicate(), Shard(0), Shard(1), Shard(0, sizes=(2, 0)))
    for dtype, shape in product(MOVED, ((2, 1), (1, 2), (1, 1))):
        full = torch.arange(1, 3)[: shape[0] * shape[1]].reshape(shape).to(dtype)
        for old, new in product(placements, repeat=2):
            if shape[0] != 2 and (old is placements[3] or new is placements[3]):
                continue
            src, dst = (
                Spec(mesh, (old,), shape, dtype=dtype),
                Spec(mesh, (new,), shape, dtype=dtype),
            )
            for local in with_odd_strides(mine(full, src)):
                got = run_plan(plan(src, dst), local).contiguous()
                assert got.tolist() == mine(full, dst).tolist(), f"{src} {dst} {local.stride()}"
