"""Local shards that are sent together during computation equal shards that are sent one by one.

The tests run on real gloo ranks.

Covers: redistribute/shards_in_flight.py, redistribute/execution/execute.py, tensor/dtensor.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch

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
from shoal_dtensor.internal import local_shard, redistribute_shards
from shoal_mesh import CommDebugMode, DeviceMesh, Link, init_device_mesh, set_topology
from shoal_mesh.testing import fake_world, on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Move = tuple[tuple[int, ...], list[Placement], list[Placement]]  # shape, before, after
MOVES: list[tuple[list[Placement], list[Placement]]] = [
    ([S0, R], [R, R]),
    ([S0, S1], [R, S1]),
    ([S0, S0], [R, S0]),
    ([P, S1], [S0, S1]),
    ([P, R], [S0, R]),
    ([R, S1], [R, S1]),
    ([P, P], [S0, R]),  # two rounds of collectives
]


def placed(value: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A DTensor of these placements.

    Where they are partial, every rank adds as much as the others.
    """
    whole = [R if placement.is_partial() else placement for placement in placements]
    shard = distribute_tensor(value, mesh, whole).to_local()
    return DTensor.from_local(shard, mesh, placements, shape=value.shape)


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 2)])
@on_ranks(4)
def test_they_arrive_as_each_alone(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    sources = [placed(value + i, mesh, src) for i, (src, _) in enumerate(MOVES)]
    targets = [s.spec.with_(placements=dst) for s, (_, dst) in zip(sources, MOVES, strict=True)]
    shards = [local_shard(source) for source in sources]
    in_flight = redistribute_shards(
        shards, [(s.spec, t) for s, t in zip(sources, targets, strict=True)]
    )
    arrived = in_flight.wait()
    for source, target, got in zip(sources, targets, arrived, strict=True):
        assert torch.equal(got, source.redistribute(placements=target.placements).to_local())
    assert in_flight.wait() is arrived


def test_moves_follow_the_topology() -> None:
    def collectives() -> int:
        with CommDebugMode() as calls:
            redistribute_shards([torch.ones(512, 512)], [move]).wait()
        return calls.get_total_counts()

    with fake_world(16):
        mesh = init_device_mesh("cpu", (4, 4))
        summed = Spec(mesh, [P, P], (512, 512))
        move = (summed, summed.with_(placements=[R, R]))
        before = collectives()
        # a slow axis, so that fewer elements are reduced over it
        set_topology(mesh, (Link(10e-6, 5e6), Link(10e-6, 400e9)))
        after = collectives()
        set_topology(mesh, None)
        assert (before, after, collectives()) == (1, 3, 1)


def write_to_data(d: DTensor) -> None:
    d.data.add_(1)


def step_of_foreach(d: DTensor) -> None:
    leaf = torch.nn.Parameter(d)
    leaf.grad = torch.ones_like(leaf)
    torch.optim.SGD([leaf], lr=1.0, foreach=True).step()


WRITES: dict[str, Callable[[DTensor], object]] = {
    "add_": lambda d: d.add_(1),
    "an index": lambda d: d.__setitem__(0, 5.0),
    "a view": lambda d: d.view(-1).fill_(3),
    "out=": lambda d: torch.add(d, 1, out=d),
    "data": write_to_data,
    "detach": lambda d: d.detach().zero_(),
    "foreach": lambda d: torch._foreach_add_([d], 1),
    "an optimizer": step_of_foreach,
    "the local tensor": lambda d: d.to_local().add_(1),
}
WAYS: list[tuple[Placement, Placement]] = [(S0, R), (S0, S1), (P, R), (P, S0), (R, S1)]


# most of the result were new values, where gloo sends what was asked for
@pytest.mark.parametrize("rows", [4, 4800], ids=["in shared memory", "by gloo"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@on_ranks(2)
def test_what_is_written_after_an_async_call_is_not_sent(
    rows: int, way: tuple[Placement, Placement]
) -> None:
    mesh, (src, dst) = init_device_mesh("cpu", (2,)), way
    for name, write in WRITES.items():
        for inference in (False, True):
            with torch.inference_mode(inference), torch.no_grad():
                source = DTensor.from_local(torch.full((rows, 1024), 2.0), mesh, [src])
                moved = source.redistribute(placements=[dst], async_op=True)
                write(source)
                value = 4.0 if src == P else 2.0
                assert bool((moved.full_tensor() == value).all()), (name, inference)


@on_ranks(2)
def test_a_write_before_what_travels_together_is_sent_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, write in WRITES.items():
        source = DTensor.from_local(torch.ones(2, 3), mesh, [S0])
        # a write to the local tensor itself was not noticed
        with torch.no_grad(), pytest.raises(RedistributeError, match="was written to"), coalesce():
            source.redistribute(placements=[R])
            write(source)
        with torch.inference_mode():
            source = DTensor.from_local(torch.ones(2, 3), mesh, [S0])
            with coalesce():
                moved = source.redistribute(placements=[R])
                write(source)
            # nothing shows writes there, so a copy is sent; it was an error of torch's
            assert moved.full_tensor().tolist() == [[1.0] * 3] * 4, name


@on_ranks(4)
def test_meshes_that_share_a_communicator_share_a_message() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    one, two = Spec(mesh["data"], [S0], (4, 2)), Spec(mesh, [S0, S1], (6, 2))
    moves = [(one, one.with_(placements=[R])), (two, two.with_(placements=[R, S1]))]
    with CommDebugMode() as counted:
        arrived = redistribute_shards([torch.ones(2, 2), torch.ones(3, 1)], moves).wait()
    assert counted.get_total_counts() == 1
    assert [tuple(tensor.shape) for tensor in arrived] == [(4, 2), (6, 1)]


@on_ranks(4)
def test_results_are_written_where_they_are_wanted() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    value = torch.arange(40, dtype=torch.float64).reshape(8, 5)
    sources = [placed(value + i, mesh, src) for i, (src, _) in enumerate(MOVES)]
    targets = [s.spec.with_(placements=dst) for s, (_, dst) in zip(sources, MOVES, strict=True)]
    moves = [(s.spec, t) for s, t in zip(sources, targets, strict=True)]
    expected = redistribute_shards([local_shard(source) for source in sources], moves).wait()
    memory = [torch.full_like(one, -1) for one in expected]
    got = redistribute_shards([local_shard(source) for source in sources], moves).wait(
        lambda: memory
    )
    assert all(one is other for one, other in zip(got, memory, strict=True))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@on_ranks(4)
def test_sources_are_not_held_while_they_travel() -> None:
    mesh = init_device_mesh("cpu", (4,))
    shards = [torch.zeros(8) for _ in range(2)]
    spec = Spec(mesh, [P], (8,))
    held = [weakref.ref(shard) for shard in shards]
    in_flight = redistribute_shards(shards, [(spec, spec.with_(placements=[S0]))] * 2)
    del shards
    assert [ref() for ref in held] == [None, None]
    assert [tensor.shape for tensor in in_flight.wait()] == [(2,), (2,)]


def test_shards_that_are_moved_alike_travel_together() -> None:
    even: list[Move] = [((8, 6), [S0, R], [R, R]), ((), [R, R], [R, R]), ((4,), [S0, R], [R, R])]
    reduced: list[Move] = [((8, 6), [P, R], [S0, R]), ((), [P, R], [R, R])]
    usual = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 1}
    more: dict[str, tuple[Move, dict[str, int]]] = {
        "uneven": (((7, 6), [S0, R], [R, R]), {}),
        "along dim 1": (((8, 6), [S1, R], [R, R]), {}),
        "over another axis": (((8, 6), [R, S0], [R, R]), {"all_gather_into_tensor": 2}),
        "over both axes": (((8, 6), [P, S0], [R, R]), {"all_reduce": 2}),
        "an all-to-all": (((8, 6), [S0, R], [S1, R]), {"all_to_all_single": 1}),
    }
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for name, (move, differs) in more.items():
            specs = [
                (Spec(mesh, src, shape), Spec(mesh, dst, shape))
                for shape, src, dst in (*even, *reduced, move)
            ]
            with CommDebugMode() as counted:
                arrived = redistribute_shards(
                    [torch.zeros(src.local_shape) for src, _ in specs], specs
                ).wait()
            assert Counter(record.op for record in counted.trace) == usual | differs, name
            assert [tensor.shape for tensor in arrived] == [dst.local_shape for _, dst in specs], (
                name
            )


@pytest.mark.parametrize("lanes", [True, False])
@on_ranks(4)
def test_even_shards_arrive_where_they_are_wanted(lanes: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    dtype = torch.float32 if lanes else torch.complex64  # which only the backend sends
    shapes = [(8, 3), (4,), (16, 1)]
    moves = [
        (Spec(mesh, [S0], shape, None, dtype), Spec(mesh, [R], shape, None, dtype))
        for shape in shapes
    ]
    wholes = [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) + 1 for shape in shapes]
    shards = [whole.chunk(4)[mesh.get_rank()] for whole in wholes]
    with CommDebugMode() as counted:
        in_flight = redistribute_shards(shards, moves)
        places = [torch.empty(shape, dtype=dtype) for shape in shapes]
        arrived = in_flight.wait(lambda: places)
    assert counted.get_total_counts() == 1
    assert all(
        got is place and torch.equal(got, whole)
        for got, place, whole in zip(arrived, places, wholes, strict=True)
    )
    back = [(src.with_(placements=[P]), src) for src, _ in moves]
    for got, shard in zip(redistribute_shards(wholes, back).wait(), shards, strict=True):
        assert torch.equal(got, 4 * shard)
    summed = [(partial, whole) for (partial, _), (_, whole) in zip(back, moves, strict=True)]
    for got, whole in zip(redistribute_shards(wholes, summed).wait(), wholes, strict=True):
        assert torch.equal(got, 4 * whole)
