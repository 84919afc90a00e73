"""Covers: blocks.py: exact blocks between real gloo ranks, and their packing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shoal_mesh import (
    CollectiveError,
    Comm,
    CommDebugMode,
    all_to_all_blocks,
    comm_over,
    init_device_mesh,
    lockstep,
)
from shoal_mesh.internal import pack_blocks, unpack_blocks
from shoal_mesh.testing import fake_world, on_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.complex64,
    torch.bool,
    torch.float8_e5m2,
]


def _global(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.arange(torch.Size(shape).numel()).remainder(7)
    return values.view(shape).to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)])
@on_ranks(4)
def test_rows_become_columns(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    comm = comm_over(ranks)
    # rank 1 holds no row, rank 2 gets no column
    rows, columns = [3, 0, 2, 2], [1, 4, 0, 3]
    whole = _global((7, 8), dtype)
    mine = torch.split(whole, rows)[comm.rank].clone()
    out = whole.new_empty((7, columns[comm.rank]))
    blocks = [[block] for block in torch.split(mine, columns, 1)]
    with CommDebugMode() as debug, lockstep():
        result = all_to_all_blocks(blocks, comm, [[place] for place in torch.split(out, rows)])
    assert debug.get_total_counts() == 1
    assert [len(places) for places in result] == [1] * 4
    torch.testing.assert_close(
        out.float(), torch.split(whole, columns, 1)[comm.rank].float(), atol=0, rtol=0
    )


@on_ranks(4)
def test_several_blocks_for_a_rank_and_none() -> None:
    comm = init_device_mesh("cpu", (4,)).comm(0)
    nobody: list[list[Tensor]] = [[] for _ in range(4)]
    # Rank 0 sends the even and then the odd elements of 0..7 to rank 2, in reverse; ranks 1 and 3
    # do not have a block at all.
    blocks, out = list(nobody), list(nobody)
    x, y = torch.arange(8.0), torch.zeros(2, 4)
    if comm.rank == 0:
        blocks[2] = [x[0::2].flip(0), x.new_empty(0, 3), x[1::2]]
    if comm.rank == 2:
        out[0] = [y[0], y.new_empty(0, 3), y[1]]
    all_to_all_blocks(blocks, comm, out)
    assert y.tolist() == ([[6, 4, 2, 0], [1, 3, 5, 7]] if comm.rank == 2 else [[0] * 4] * 2)


def spied(comm: Comm, seen: list[tuple[int, int]]) -> Comm:
    """The communicator, whose all-to-alls note where they write to and read from."""

    class Group:
        def alltoall_base(self, output: Tensor, source: Tensor, *rest: object) -> object:
            seen.append((output.data_ptr(), source.data_ptr()))
            passed: Any = comm.group
            return passed.alltoall_base(output, source, *rest)

    group = cast("torch.distributed.ProcessGroup", Group())
    return replace(comm, _group=group, backend="a spy", on_gloo=False)


@on_ranks(2)
def test_blocks_that_follow_one_another_are_not_copied() -> None:
    comm = init_device_mesh("cpu", (2,)).comm(0)
    x, out = torch.arange(6.0) + 10 * comm.rank, torch.empty(4)
    seen: list[tuple[int, int]] = []
    spy = spied(comm, seen)
    places: list[list[Tensor]] = [[], []]
    sends: list[list[Tensor]] = [[], []]
    sends[1 - comm.rank] = [x[1:3], x[3:5]]
    places[1 - comm.rank] = [out[:2], out[2:]]
    all_to_all_blocks(sends, spy, places)
    assert seen == [(out.data_ptr(), x[1:].data_ptr())]
    assert out.tolist() == [n + 10 * (1 - comm.rank) for n in (1, 2, 3, 4)]


@on_ranks(4)
def test_blocks_around_the_own_one_are_not_copied() -> None:
    comm = init_device_mesh("cpu", (4,)).comm(0)
    seen: list[tuple[int, int]] = []
    spy = spied(comm, seen)
    matrix = torch.arange(72.0).view(8, 9)
    for rows in ([2, 2, 2, 2], [1, 5, 1, 1]):
        mine = torch.split(matrix, [3, 1, 3, 2], 1)[comm.rank].contiguous()
        out = matrix.new_empty(rows[comm.rank], 9)
        blocks = torch.split(mine, rows)
        with CommDebugMode() as debug:
            all_to_all_blocks(
                [[each] for each in blocks],
                spy,
                [[each] for each in torch.split(out, [3, 1, 3, 2], 1)],
            )
        assert out.equal(torch.split(matrix, rows)[comm.rank])
        kept = blocks[comm.rank].nbytes
        assert debug.get_bytes() == {comm.axes: mine.nbytes - kept}
        # In front of the others' blocks, or between those; not where it is more than all of them.
        around = mine.data_ptr() + (kept if comm.rank == 0 else 0)
        _, sent = seen.pop()
        assert (sent == around) == (2 * kept <= mine.nbytes)


def test_one_rank_keeps_its_blocks() -> None:
    with fake_world(1):
        comm, out = init_device_mesh("cpu", (1,)).comm(0), torch.zeros(2, 2)
        all_to_all_blocks([[torch.ones(2)]], comm, [[out[:, 1]]])
        assert out.tolist() == [[0, 1], [0, 1]]


def test_packing() -> None:
    x = torch.arange(12).view(3, 4)
    assert pack_blocks([x[1], x[2]]).data_ptr() == x[1].data_ptr()
    assert pack_blocks([x[2], x[1]]).tolist() == [8, 9, 10, 11, 4, 5, 6, 7]
    assert pack_blocks([x[:, 1], x[:, :0], x[:1]]).tolist() == [1, 5, 9, 0, 1, 2, 3]
    assert pack_blocks([x[:0]]).shape == pack_blocks([], like=x).shape == (0,)
    y = torch.zeros_like(x)
    unpack_blocks(torch.arange(1, 6), [y[:, 3], y[:0], y[0, :2]])
    assert y.tolist() == [[4, 5, 0, 1], [0, 0, 0, 2], [0, 0, 0, 3]]


@pytest.mark.parametrize(
    ("blocks", "out", "text"),
    [
        ([[]], [[], []], "one list of blocks and one of outputs per rank, got 1 and 2"),
        (
            [[], [torch.ones(1)]],
            [[], [torch.ones(1).int()]],
            "one dtype, got torch.float32, torch.int32",
        ),
        (
            [[torch.ones(2)], []],
            [[torch.ones(3)], []],
            r"keeps blocks of shapes \[\(2,\)\], .* have \[\(3,\)\]",
        ),
        ([[], [torch.ones(1, requires_grad=True)]], [[], []], "is not differentiable"),
    ],
)
def test_wrong_blocks(blocks: list[list[Tensor]], out: list[list[Tensor]], text: str) -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        with pytest.raises(CollectiveError, match=text):
            all_to_all_blocks(blocks, comm, out)
    with pytest.raises(CollectiveError, match="like= is a tensor"):
        pack_blocks([])


@on_ranks(2)
def test_one_column_of_a_matrix() -> None:
    comm = init_device_mesh("cpu", (2,)).comm(0)
    matrix, out = torch.arange(6.0).view(3, 2) + 10 * comm.rank, torch.empty(3)
    sends: list[list[Tensor]] = [[], []]
    places: list[list[Tensor]] = [[], []]
    sends[1 - comm.rank], places[1 - comm.rank] = [matrix[:, 1:]], [out[:, None]]
    all_to_all_blocks(sends, comm, places)
    assert out.tolist() == [11 - 10 * comm.rank, 13 - 10 * comm.rank, 15 - 10 * comm.rank]
    assert pack_blocks([matrix[:, 1:]]).is_contiguous()
