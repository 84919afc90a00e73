"""Covers: api/custom_ops.py: outputs have the layout of out_placements, on every rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    checked_replicas,
    distribute_tensor,
    local_map,
)
from shoal_dtensor.errors import PlacementError, SpmdTypeError
from shoal_mesh import CommDebugMode, LockstepError, abstract_mesh, init_device_mesh, lockstep
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_uneven_outputs_of_even_inputs() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)

    @local_map(out_placements=[Shard(0)])
    def some(local: Tensor) -> Tensor:
        return local[: dist.get_rank()]

    for _ in range(2):
        result = some(x)
        assert result.shape == (6,)
        assert result.full_tensor().tolist() == [4, 8, 9, 12, 13, 14]


@on_ranks(4)
def test_outputs_that_are_not_replicated_are_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)
    total = local_map(lambda local: local.sum(0, keepdim=True), out_placements=[Replicate()])
    for _ in range(2):
        with pytest.raises(PlacementError, match="output 0 of local_map"):
            total(x)
    assert (
        local_map(lambda local: local.sum(0), out_placements=[Partial()])(x).full_tensor().item()
        == 120
    )


@on_ranks(4)
def test_every_call_compares_in_one_collective_for_each_output() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)
    for placements in ([Shard(0)], [Partial()]):
        twice = local_map(lambda local: local * 2, out_placements=placements)
        counts = []
        for _ in range(3):
            with CommDebugMode() as seen:
                twice(x)
            counts.append(sum(seen.get_comm_counts().values()))
        assert counts == [1, 1, 1]


@on_ranks(4)
def test_outputs_may_change_between_calls() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)
    kept = [2]
    first = local_map(lambda local: local[: kept[0]], out_placements=[Shard(0)])
    assert first(x).full_tensor().tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
    kept[0] = rank
    assert first(x).full_tensor().tolist() == [4, 8, 9, 12, 13, 14]
    kept[0] = 1
    assert first(x).shape == (4,)
    constant = local_map(lambda local: torch.ones(2) * kept[0], out_placements=[Replicate()])
    assert constant(x).shape == (2,)
    kept[0] = rank // 2
    with pytest.raises(
        PlacementError, match=r"output 0 of local_map.* differs between ranks along"
    ):
        constant(x)


@on_ranks(4)
def test_replicas_are_compared_along_the_axes_that_have_them() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(
        torch.arange(8.0).view(4, 2), mesh, [Shard(0), Replicate()], src_data_rank=None
    )
    same = local_map(lambda local: local + 1, out_placements=[Shard(0), Replicate()])(x)
    assert torch.equal(same.full_tensor(), torch.arange(8.0).view(4, 2) + 1)
    with pytest.raises(PlacementError, match="differs between ranks along a"):
        local_map(lambda local: local + 1, out_placements=[Replicate(), Replicate()])(x)


@on_ranks(4)
def test_threads_may_call_it_in_another_order_on_each_rank() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    inputs = [
        distribute_tensor(torch.arange(n), mesh, [Shard(0)], src_data_rank=None) for n in (8, 5, 16)
    ]
    found: list[tuple[int, list[int]]] = []
    below, cut = [
        local_map(f, out_placements=[Shard(0)]) for f in (lambda a: a - 1, lambda a: a[:rank])
    ]

    def work(place: int) -> None:
        for function in (below, cut, below):
            result = function(inputs[place])
            found.append((place, [*result.shape, result.to_local().numel()]))

    threads = [threading.Thread(target=work, args=((rank + i) % 3,)) for i in range(3)]
    for thread in threads:
        thread.start()
        # so that each comes to its first call before the next one
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    for place, x in enumerate(inputs):
        own, kept = (
            len(x.to_local()),
            sum(min(r, len(p)) for r, p in enumerate(torch.arange(len(x)).chunk(4))),
        )
        assert [of for at, of in found if at == place] == [
            [len(x), own],
            [kept, min(rank, own)],
            [len(x), own],
        ]


@on_ranks(4)
def test_without_a_check_nothing_is_sent() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)], src_data_rank=None)
    sizes = [Shard(0, sizes=(2, 2, 1, 0))]
    twice = local_map(lambda local: local * 2, out_placements=sizes, run_check=False)
    with CommDebugMode() as seen:
        result = twice(x)
    assert not seen.get_comm_counts()
    assert result.full_tensor().tolist() == [0, 2, 4, 6, 8]


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)
@on_ranks(2)
def test_compiled_code_leaves_uneven_inputs_to_eager_code() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)], src_data_rank=None)
    twice = local_map(lambda local: local * 2, out_placements=[Shard(0)])
    assert torch.compile(lambda x: twice(x) + 1, backend="eager")(x).full_tensor().tolist() == [
        1,
        3,
        5,
        7,
        9,
    ]
    sized = local_map(
        lambda local: local * 2, out_placements=[Shard(0, sizes=(3, 2))], run_check=False
    )
    compiled = torch.compile(lambda x: sized(x) + 1, backend="eager", fullgraph=True)
    assert compiled(x).full_tensor().tolist() == [1, 3, 5, 7, 9]


@on_ranks(4)
def test_from_local_of_other_sizes_is_found_in_debug_modes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.ones(dist.get_rank() + 1)
    for block in (checked_replicas(), lockstep()):
        with block:
            with pytest.raises(PlacementError, match="run_check=True"):
                DTensor.from_local(local, mesh, [Shard(0)])
            assert DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).shape == (8,)
            with pytest.raises(PlacementError, match="differ"):
                DTensor.from_local(torch.ones(2) * dist.get_rank(), mesh, [Replicate()])


@on_ranks(4)
def test_replicated_inputs_that_differ_are_found_in_debug_modes() -> None:
    """Outputs that are sharded are not compared, so they would not show it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()])
    unequal = torch.ones(2) * mesh.get_local_rank("b")
    broken = DTensor.from_local(unequal, mesh, [Shard(0), Replicate()])
    added = local_map(lambda x, y: x + y, out_placements=[Shard(0), Shard(0)])
    for block in (checked_replicas(), lockstep()):
        with block:
            assert added(sharded, sharded).shape == (8,)
            with pytest.raises(LockstepError, match=r"input 1 of local_map .* differ along b"):
                added(sharded, broken)
    assert added(sharded, broken).shape == (8,)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_types_of_plain_tensors_are_checked_in_place_of_values(shape: tuple[int, ...]) -> None:
    # no collective compares ranks, so one process is enough
    mesh = abstract_mesh(shape, ("tp", "dp")[: len(shape)])
    others = [Replicate()] * (len(shape) - 1)
    x = DTensor.from_local(torch.ones(4, 6), mesh, [Replicate(), *others], run_check=False)
    up = DTensor.from_local(torch.ones(6, 4), mesh, [Shard(1), *others], run_check=False)
    down = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0), *others], run_check=False)

    def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (x @ up).relu() @ down

    entries = ([Partial(), *others], None, None)
    right = local_map(
        feed_forward,
        out_placements=[Partial(), *others],
        in_grad_placements=entries,
        spmd_types=True,
    )
    assert right(x, up, down).placements[0] == Partial()
    for wrong, message in (
        (local_map(feed_forward, [Replicate(), *others], None, entries, spmd_types=True), "P over"),
        (local_map(feed_forward, [Partial(), *others], spmd_types=True), "I cannot be combined"),
        (
            local_map(
                lambda x, *_: (x @ up.to_local()).relu(),
                [Shard(0), *others],
                None,
                entries,
                spmd_types=True,
            ),
            "S",
        ),
    ):
        with pytest.raises(SpmdTypeError, match=message):
            wrong(x.detach().requires_grad_(), up, down)
