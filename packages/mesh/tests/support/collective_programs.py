"""Programs that call every collective of c10d, whose results ranks return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from shoal_mesh import _torch


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers that differ on all ranks, so that sums are exact."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 7 + rank * 3) % 11 + 1).reshape(shape).to(dtype)


def reductions(rank: int, size: int) -> list[Any]:
    results: list[Any] = []
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16):
            tensor = values(rank, 2, 3, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            results.append(tensor.tolist())
    for op in ("BAND", "BOR", "BXOR"):
        tensor = values(rank, 4, dtype=torch.int64)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        results.append(tensor.tolist())
    # rows of a transposed tensor are not contiguous
    tensor = values(rank, 3, 4).t().contiguous()
    dist.reduce(tensor, dst=size - 1)
    results.append(tensor.tolist() if rank == size - 1 else None)
    many = [values(rank, 3), values(rank, 2, 2)]
    dist.all_reduce_coalesced(many)
    results += [each.tolist() for each in many]
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty)
    return [*results, list(empty.shape)]


def copies(rank: int, size: int) -> list[Any]:
    tensor = values(rank, 2, 3)
    dist.broadcast(tensor, src=1)
    blocks = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(blocks, values(rank, 2, 3))
    whole = torch.zeros(size * 2, 3)
    dist.all_gather_into_tensor(whole, values(rank, 2, 3))
    at_root = [torch.zeros(3) for _ in range(size)] if rank == 2 else None
    dist.gather(values(rank, 3), at_root, dst=2)
    part = torch.zeros(2)
    dist.scatter(part, [values(r, 2) for r in range(size)] if rank == 1 else None, src=1)
    reduced = torch.zeros(2)
    dist.reduce_scatter_tensor(reduced, values(rank, size * 2))
    results = [tensor, *blocks, whole, *(at_root or []), part, reduced]
    return [each.tolist() for each in results]


def exchanges(rank: int, size: int) -> list[Any]:
    even = torch.zeros(size, 2)
    dist.all_to_all_single(even, values(rank, size, 2))
    sent = [(rank + other) % 3 for other in range(size)]
    received = [(other + rank) % 3 for other in range(size)]
    uneven = torch.zeros(sum(received), 2)
    dist.all_to_all_single(uneven, values(rank, sum(sent), 2), received, sent)
    return [even.tolist(), uneven.tolist()]


def messages(rank: int, size: int) -> list[Any]:
    after = (rank + 1) % size
    before = (rank - 1) % size
    got = torch.zeros(3)
    tagged = torch.zeros(2)
    operations = [
        dist.P2POp(dist.isend, values(rank, 3), after),
        dist.P2POp(dist.irecv, got, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank % 2 == 0 and rank + 1 < size:
        dist.send(values(rank, 2), rank + 1, tag=5)
    if rank % 2:
        dist.recv(tagged, rank - 1, tag=5)
    sources = []
    if rank == 0:
        for _ in range(size - 1):
            tensor = torch.zeros(1)
            source = dist.recv(tensor)
            assert tensor.item() == source * 10
            sources.append(source)
    else:
        dist.send(torch.tensor([rank * 10.0]), 0)
    return [got.tolist(), tagged.tolist(), sorted(sources)]


def objects(rank: int, size: int) -> list[Any]:
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, {"rank": rank})
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("a", rank), at_root)
    shared = [rank, "x"]
    dist.broadcast_object_list(shared, src=2)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [[r, r] for r in range(size)] if rank == 0 else None)
    return [everywhere, at_root, shared, part]


def groups(rank: int, size: int) -> list[Any]:
    halves = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    mine = halves[rank // 2]
    total = values(rank, 2)
    dist.all_reduce(total, group=mine)
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(total, group=alone)
    enumerate_groups: Any = dist.new_subgroups_by_enumeration
    own, _ = enumerate_groups([[0, 2], [1, 3]])
    gathered = torch.zeros(2)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=own)
    dist.barrier(group=mine)
    dist.destroy_process_group(mine)
    return [total.tolist(), gathered.tolist(), dist.get_process_group_ranks(own)]


def asynchronous(rank: int, size: int) -> list[Any]:
    first = values(rank, 3)
    second = values(rank, 2)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    future = works[0].get_future().then(lambda done: done.value()[0] * 2)
    works[1].wait()
    doubled = future.wait()
    while not works[0].is_completed():
        pass
    return [first.tolist(), second.tolist(), doubled.tolist()]


def functional_collectives(rank: int, size: int) -> list[Any]:
    world = dist.group.WORLD
    assert world is not None, "the programs run with a default group"
    total = functional.all_reduce(values(rank, 2), "sum", world)
    whole = functional.all_gather_tensor(values(rank, 2), 0, world)
    part = functional.reduce_scatter_tensor(values(rank, size * 2), "sum", 0, world)
    swapped = functional.all_to_all_single(values(rank, size), None, None, world)
    many = functional.all_reduce_coalesced([values(rank, 2), values(rank, 1)], "sum", world)
    root = functional.broadcast(values(rank, 2), 1, world)
    return [each.tolist() for each in (total, whole, part, swapped, *many, root)]


def stores(rank: int, size: int) -> list[Any]:
    store = _torch.PrefixStore("test", _torch.default_store())
    if rank == 0:
        store.set("key", "value")
    value = store.get("key")
    count = store.add("count", 1)
    store.set(f"rank{rank}", str(rank))
    store.wait([f"rank{r}" for r in range(size)])
    numbers = store.multi_get([f"rank{r}" for r in range(size)])
    dist.barrier()
    return [value, 1 <= count <= size, store.add("count", 0), numbers, store.check(["missing"])]


PROGRAMS: list[Callable[[int, int], list[Any]]] = [
    reductions,
    copies,
    exchanges,
    messages,
    objects,
    groups,
    asynchronous,
    functional_collectives,
    stores,
]


def run_all() -> dict[str, list[Any]]:
    """Run all programs on this rank, and return their results by name."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    return {program.__name__: program(rank, size) for program in PROGRAMS}
