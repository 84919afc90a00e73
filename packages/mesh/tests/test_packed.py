"""Many tensors in one collective, through shared memory in one round and many, and through gloo.

Covers: packed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rank_values import ORDERS, assert_near, assert_same, comm_of, values_of
from shared_slots import shared_and_gloo
from shoal_mesh import (
    Comm,
    CommDebugMode,
    all_gather,
    all_gather_coalesced,
    all_reduce,
    all_reduce_coalesced,
    comm_over,
    reduce_scatter_coalesced,
)
from shoal_mesh.errors import CollectiveError
from shoal_mesh.internal import Flat, Pending, start_packed
from shoal_mesh.shared_memory.channel import channel_of
from shoal_mesh.testing import on_ranks

LENGTHS = {0: (3, 0, 4), 1: (0, 0, 0), 2: (40, 1, 0), 3: (5, 70, 9)}  # of the tensors of each rank


def got(pending: Pending[Flat]) -> list[Tensor]:
    return pending.then(lambda tensors: [tensor.clone() for tensor in tensors]).wait()


def values(lengths: Sequence[int], rank: int, dtype: torch.dtype) -> list[Tensor]:
    return [((torch.arange(n) * 3 + 5 * rank + i) % 7).to(dtype) for i, n in enumerate(lengths)]


@on_ranks(4)
def test_what_is_of_one_size_is_packed_where_it_arrives() -> None:
    for comm in shared_and_gloo(4, 1 << 16):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            for lengths in ((3, 0, 4), (5,), (0, 0)):
                sent = values(lengths, comm.rank, dtype)
                rows = got(start_packed("all_gather", sent, comm, [sum(lengths)] * 4))
                for rank, row in enumerate(rows):
                    assert torch.equal(row, torch.cat(values(lengths, rank, dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [5, 100_000, 700_000])
@on_ranks(3)
def test_an_average_is_the_same_on_all_ranks_every_time(length: int, dtype: torch.dtype) -> None:
    # Regression: ranks that read one window together divided its elements of float32 repeatedly.
    comm = comm_over((0, 1, 2))
    terms = torch.full((length,), float(comm.rank + 1), dtype=dtype)
    for _ in range(10):
        for average in all_reduce_coalesced([terms, terms[:3]], comm, "avg"):
            assert torch.equal(average, torch.full_like(average, 2.0))
        (block,) = reduce_scatter_coalesced([terms.repeat(3)], comm, 0, "avg")
        assert torch.equal(block, torch.full_like(block, 2.0))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@on_ranks(2)
def test_a_reduction_of_any_size_uses_8_mib_of_each_rank(kind: str) -> None:
    comm, n = comm_over((0, 1)), 3 << 20  # 12 MiB
    ones = torch.ones(2, n // 2) if kind == "reduce_scatter" else torch.ones(n)
    (total, *_) = got(
        start_packed(kind, [ones], comm, [n // 2] * 2 if kind == "reduce_scatter" else ())
    )
    assert torch.equal(total, torch.full_like(total, 2.0))
    channel = channel_of(comm.group)
    assert channel is not None
    own = channel.background["reductions"]._slots[0, comm.rank]
    assert own[: 8 << 20].any() and not own[8 << 20 :].any()


@pytest.mark.parametrize("slot_bytes", [64 * 4, 1 << 16])
@on_ranks(4)
def test_as_one_tensor_through_gloo(slot_bytes: int) -> None:
    for comm in shared_and_gloo(4, slot_bytes):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            sizes = [sum(LENGTHS[rank]) for rank in range(4)]
            rows = got(
                start_packed(
                    "all_gather", values(LENGTHS[comm.rank], comm.rank, dtype), comm, sizes
                )
            )
            for rank, row in enumerate(rows):
                assert torch.equal(row, torch.cat(values(LENGTHS[rank], rank, dtype)))
        for dtype, op in (
            (torch.float32, "sum"),
            (torch.float64, "avg"),
            (torch.bfloat16, "max"),
            (torch.int64, "sum"),
        ):
            for lengths in ((100, 0, 7, 13), (0, 0, 0, 0), (1, 2, 3, 300)):
                whole = [torch.cat(values(lengths, rank, dtype)) for rank in range(4)]
                want = all_reduce(whole[comm.rank], comm, op)
                (block,) = got(
                    start_packed(
                        "reduce_scatter", values(lengths, comm.rank, dtype), comm, lengths, op
                    )
                )
                assert torch.equal(block, torch.split(want, list(lengths))[comm.rank])
                reduced = got(
                    start_packed("all_reduce", values(lengths, comm.rank, dtype), comm, op=op)
                )
                assert [len(tensor) for tensor in reduced] == list(lengths)
                assert torch.equal(torch.cat(reduced), want)


@pytest.mark.parametrize("slot_bytes", [64 * 4, 1 << 16])
@on_ranks(4)
def test_matrices_with_a_row_for_each_rank(slot_bytes: int) -> None:
    for comm in shared_and_gloo(4, slot_bytes):
        matrices = [torch.arange(4.0 * n).view(4, n) for n in (3, 0, 30)]
        (block,) = got(start_packed("reduce_scatter", [*matrices], comm, [33] * 4))
        assert torch.equal(block, 4 * torch.cat([matrix[comm.rank] for matrix in matrices]))
        assert got(start_packed("reduce_scatter", [torch.ones(4, 0)], comm, [0] * 4))[0].shape == (
            0,
        )
        rows = got(
            start_packed("all_gather", [torch.full((33,), float(comm.rank))], comm, [33] * 4)
        )
        assert [row.tolist() for row in rows] == [[float(rank)] * 33 for rank in range(4)]
        with pytest.raises(CollectiveError, match="flat tensors"):
            start_packed("reduce_scatter", [torch.ones(2, 2)], comm, [1] * 4)


@pytest.mark.parametrize("order", ["straight", "turned", "row"])
@on_ranks(4)
def test_in_the_order_of_the_communicator(order: str) -> None:
    comm = comm_of(order)
    sizes = [index + 1 for index in range(comm.size)]
    rows = got(
        start_packed("all_gather", [torch.full((comm.rank + 1,), float(comm.rank))], comm, sizes)
    )
    assert [row.tolist() for row in rows] == [[float(i)] * (i + 1) for i in range(comm.size)]
    (block,) = got(
        start_packed("reduce_scatter", [torch.full((n,), float(n)) for n in sizes], comm, sizes)
    )
    assert block.tolist() == [float(sizes[comm.rank] * comm.size)] * sizes[comm.rank]


@on_ranks(4)
def test_sums_have_the_bits_of_every_other_way() -> None:
    comm, _ = shared_and_gloo(4, 1 << 22)
    torch.manual_seed(comm.rank)
    for count in (5, 1 << 12, 1 << 18, 1 << 19):  # the last two in parts
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.randn(4 * count).to(dtype)
            want = all_reduce(mine, comm)
            assert torch.equal(got(start_packed("all_reduce", [mine], comm))[0], want)
            (block,) = got(start_packed("reduce_scatter", [mine], comm, [count] * 4))
            assert torch.equal(block, want[comm.rank * count :][:count])


@on_ranks(4)
def test_gathers_and_reductions_are_under_way_together_and_counted_once() -> None:
    comm, _ = shared_and_gloo(4, 1 << 10)
    with CommDebugMode() as counted:
        gathers = [
            start_packed("all_gather", [torch.full((9,), float(comm.rank + i))], comm, [9] * 4)
            for i in range(3)
        ]
        reduced = start_packed("all_reduce", [torch.ones(1000)], comm)  # of four rounds
        while not gathers[2].is_completed():
            pass
        assert all_gather(torch.ones(1), comm).sum() == 4
        sums = got(reduced)
    assert sums[0].tolist() == [4.0] * 1000
    # completed before anybody waited for them: what they brought was kept
    for i in (1, 2, 0):
        assert [row[8].item() for row in got(gathers[i])] == [float(rank + i) for rank in range(4)]
    assert {str(op).rpartition(".")[2]: n for op, n in counted.get_comm_counts().items()} == {
        "all_gather_into_tensor": 4,
        "all_reduce": 1,
    }


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    comm: Comm = shared_and_gloo(2, 1 << 10)[0]
    one = torch.ones(2)
    wrong: list[Callable[[], object]] = [
        lambda: start_packed("all_gather", [one], comm, [3, 3]),
        lambda: start_packed("reduce_scatter", [one], comm, [1, 2]),
        lambda: start_packed("all_reduce", [one, one.double()], comm),
        lambda: start_packed("all_reduce", [torch.ones(2, 2)], comm),
        lambda: start_packed("all_reduce", [], comm),
        lambda: start_packed("all_reduce", [torch.ones(2, requires_grad=True)], comm),
    ]
    for call in wrong:
        with pytest.raises(CollectiveError, match=r"packed|is not differentiable"):
            call()


@on_ranks(4)
def test_lists_travel_together() -> None:
    for order in ORDERS:
        comm = comm_of(order)
        shapes = [(4, 4), (8,), (4, 0), (4, 1, 2)]
        dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16]
        table = [
            [values_of(r, s, d) for s, d in zip(shapes, dtypes, strict=True)] for r in comm.ranks
        ]
        own = table[comm.rank]
        columns = list(zip(*table, strict=True))
        for got, column in zip(all_reduce_coalesced(own, comm), columns, strict=True):
            assert_near(got, torch.stack(column).sum(0).to(got.dtype))
        for got, column in zip(all_gather_coalesced(own, comm), columns, strict=True):
            assert_same(got, torch.cat(column))
        for got, column in zip(
            all_gather_coalesced(own[:1] + own[3:], comm, 1), (columns[0], columns[3]), strict=True
        ):
            assert_same(got, torch.cat(column, 1))
        for got, column in zip(reduce_scatter_coalesced(own, comm), columns, strict=True):
            assert_near(got, torch.stack(column).sum(0).to(got.dtype).chunk(comm.size)[comm.rank])
        assert all_reduce_coalesced([], comm) == []
        with pytest.raises(CollectiveError, match="does not divide"):
            reduce_scatter_coalesced([torch.ones(5)], comm)
