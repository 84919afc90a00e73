"""Covers: collectives.py, uneven.py, rooted.py, coalesced.py, kernels.py, carriers.py, on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_mesh import (
    CollectiveError,
    Comm,
    DeviceMesh,
    Pending,
    all_gather,
    all_gather_coalesced,
    all_gather_v,
    all_reduce,
    all_reduce_,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_v,
    broadcast,
    gather,
    init_device_mesh,
    permute,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.testing import fake_world, on_ranks

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
EVERY = [*FLOATS, *INTS, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.uint16]
# The group's own order, c10d's order turned round, and one axis of two.
ORDERS: dict[str, tuple[list[list[int]], tuple[int, ...]]] = {
    "straight": ([[0, 1], [2, 3]], (0, 1)),
    "turned": ([[3, 1], [0, 2]], (1, 0)),
    "row": ([[0, 1], [2, 3]], (1,)),
}


def _comm(order: str) -> Comm:
    ranks, axes = ORDERS[order]
    return DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")).comm(axes)


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank puts in: small numbers, different on each rank and element."""
    count = torch.Size(shape).numel()
    base = (torch.arange(count).view(shape) * 3 + rank * 5) % 7
    return (base % 2 == 0) if dtype is torch.bool else base.to(dtype)


def _every(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [_values(rank, shape, dtype) for rank in comm.ranks]


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_data_moves_in_every_dtype_and_order(order: str) -> None:
    comm = _comm(order)
    n, me = comm.size, comm.rank
    for dtype in EVERY:
        own, every = _every(comm, (4, 4), dtype)[me], _every(comm, (4, 4), dtype)
        for dim in (0, 1, -1):
            _same(all_gather(own, comm, dim), torch.cat(every, dim))
            _same(all_gather(own.t(), comm, dim), torch.cat([x.t() for x in every], dim))
        for split in (0, 1):
            for join in (0, 1):
                want = torch.cat([x.chunk(n, split)[me] for x in every], join)
                _same(all_to_all(own, comm, split, join), want)
        for root in range(n):
            _same(broadcast(own, comm, root), every[root])
            _same(broadcast(own[:, ::2], comm, root), every[root][:, ::2])
            got = scatter(every if me == root else None, comm, root, out=torch.empty_like(own))
            _same(got, own)
            listed = gather(own, comm, root)
            assert (listed is None) == (me != root)
            for x, y in zip(listed or [], every, strict=False):
                _same(x, y)
        shift = [(i + 1) % n for i in range(n)]
        _same(permute(own, comm, shift), every[(me - 1) % n])


def _same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    bits = got.dtype if not got.dtype.is_floating_point else torch.float64
    assert torch.equal(got.to(bits), want.to(bits))


WANT: dict[str, Any] = {
    "sum": lambda s: s.sum(0),
    "avg": lambda s: s.sum(0) / s.shape[0],
    "min": lambda s: s.amin(0),
    "max": lambda s: s.amax(0),
    "product": lambda s: s.prod(0),
    "band": lambda s: _fold(s, torch.bitwise_and),
    "bor": lambda s: _fold(s, torch.bitwise_or),
    "bxor": lambda s: _fold(s, torch.bitwise_xor),
}


def _fold(stack: Tensor, op: Any) -> Tensor:
    total = stack[0]
    for row in stack[1:]:
        total = op(total, row)
    return total


def _legal(op: str, dtype: torch.dtype) -> bool:
    if op in {"band", "bor", "bxor"}:
        return dtype in INTS or dtype is torch.bool or dtype is torch.uint16
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op != "sum")


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_reductions_of_every_dtype(order: str) -> None:
    comm = _comm(order)
    for dtype in EVERY:
        for op, want_of in WANT.items():
            every = _every(comm, (4, 4), dtype)
            if not _legal(op, dtype):
                with pytest.raises(CollectiveError):
                    all_reduce(every[comm.rank], comm, op)
                with pytest.raises(CollectiveError):
                    reduce_scatter(every[comm.rank], comm, 0, op)
                continue
            wide = torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else dtype
            wide = torch.int32 if dtype is torch.uint16 else wide
            want = want_of(torch.stack([x.to(wide) for x in every])).to(dtype)
            if dtype is torch.bool and op in {"sum", "product"}:
                want = want_of(torch.stack(every).to(torch.int32)).to(torch.bool)
            _near(all_reduce(every[comm.rank], comm, op), want)
            _near(all_reduce(every[comm.rank].t(), comm, op), want.t())
            for dim in (0, 1):
                _near(reduce_scatter(every[comm.rank], comm, dim, op), want.chunk(comm.size, dim)[comm.rank])
            for view in (every[comm.rank].clone(), every[comm.rank].repeat(1, 2)[:, ::2].clone().t()):
                expected = want if view.stride() == (4, 1) else None
                got = all_reduce_(view, comm, op)
                assert got is view
                if expected is not None:
                    _near(got, expected)
    with pytest.raises(CollectiveError, match="no reduction 'median'"):
        all_reduce(torch.ones(1), comm, "median")


def _near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wide = torch.float64 if got.dtype.is_floating_point else got.dtype
    tolerance = 0.15 if got.dtype is torch.float8_e4m3fn else 1e-2 if got.element_size() <= 2 else 1e-6
    if got.is_floating_point() or got.is_complex():
        torch.testing.assert_close(got.to(wide), want.to(wide), rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_uneven_blocks(order: str) -> None:
    comm = _comm(order)
    n, me = comm.size, comm.rank
    for sizes in ([3, 1, 2, 0][:n], [9, 0, 0, 0][:n], [2, 2, 2, 2][:n], [0, 0, 0, 0][:n], [2, 3, 3, 3][:n]):
        for dim in (0, 1):
            for dtype in (torch.float32, torch.int16, torch.complex64):
                shape = [2, 2]
                blocks = []
                for rank, size in zip(comm.ranks, sizes, strict=True):
                    shape[dim] = size
                    blocks.append(_values(rank, tuple(shape), dtype))
                _same(all_gather_v(blocks[me], comm, sizes, dim), torch.cat(blocks, dim))
                shape[dim] = sum(sizes)
                every = _every(comm, tuple(shape), dtype)
                want = torch.split(torch.stack(every).sum(0).to(dtype), sizes, dim)[me]
                _near(reduce_scatter_v(every[me], comm, sizes, dim), want.contiguous())
    counts = [[(i * n + j) % 3 for j in range(n)] for i in range(n)]  # i sends counts[i][j] to j
    for dtype in (torch.float32, torch.int16):
        own = torch.cat([torch.full((counts[me][j],), 10 * me + j) for j in range(n)]).to(dtype)
        got = all_to_all_v(own, comm, counts[me], [counts[i][me] for i in range(n)])
        want = torch.cat([torch.full((counts[i][me],), 10 * i + me) for i in range(n)]).to(dtype)
        _same(got, want)


def wait_for(flag: str) -> None:
    """Until another rank has made the file: it can only do so if what it started did not wait for this rank."""
    import time
    from pathlib import Path

    end = time.monotonic() + 40
    while not Path(flag).exists():
        assert time.monotonic() < end, "the other rank never got past starting its collective"
        time.sleep(0.005)


UNEVEN: dict[str, Any] = {
    "all_gather_v": lambda c, **k: all_gather_v(
        torch.full((c.rank + 1, 2), float(c.rank)), c, range(1, c.size + 1), **k
    ),
    "all_gather_v, one rank": lambda c, **k: all_gather_v(
        torch.ones(2, 9 * (c.rank == 1)), c, [9 * (i == 1) for i in range(c.size)], 1, **k
    ),
    "reduce_scatter_v": lambda c, **k: reduce_scatter_v(torch.arange(10.0).view(1, 10), c, [1, 2, 3, 4], 1, "avg", **k),
    "reduce_scatter_v, one rank": lambda c, **k: reduce_scatter_v(torch.arange(9.0), c, [0, 9, 0, 0], **k),
    "all_to_all_v": lambda c, **k: all_to_all_v(
        torch.arange(float(c.rank * c.size)), c, [c.rank] * c.size, list(range(c.size)), **k
    ),
}


@pytest.mark.parametrize("order", ["straight", "turned"])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_collectives_go_on_while_the_program_does(name: str, order: str, tmp_path: Any) -> None:
    go_on_while_the_program_does(name, order, str(tmp_path / "started"))


@on_ranks(4)
def go_on_while_the_program_does(name: str, order: str, flag: str) -> None:
    from pathlib import Path

    comm = _comm(order)
    if comm.rank:
        wait_for(flag)
    pending = UNEVEN[name](comm, async_op=True)
    if comm.rank == 0:
        assert not pending.is_completed()
        Path(flag).touch()
    got = pending.wait()
    assert pending.wait() is got
    _same(got, UNEVEN[name](comm))


@on_ranks(4)
def test_scatter_of_different_shapes() -> None:
    comm = _comm("turned")
    parts = [torch.full((i + 1, 2), float(i)) for i in range(4)]
    out = scatter(parts if comm.rank == 2 else None, comm, 2, out=torch.empty(comm.rank + 1, 2))
    assert out.eq(comm.rank).all()


@on_ranks(4)
def test_lists_travel_together() -> None:
    for order in ORDERS:
        comm = _comm(order)
        shapes = [(4, 4), (8,), (4, 0), (4, 1, 2)]
        dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16]
        table = [[_values(r, s, d) for s, d in zip(shapes, dtypes, strict=True)] for r in comm.ranks]
        own = table[comm.rank]
        columns = list(zip(*table, strict=True))
        for got, column in zip(all_reduce_coalesced(own, comm), columns, strict=True):
            _near(got, torch.stack(column).sum(0).to(got.dtype))
        for got, column in zip(all_gather_coalesced(own, comm), columns, strict=True):
            _same(got, torch.cat(column))
        for got, column in zip(all_gather_coalesced(own[:1] + own[3:], comm, 1), (columns[0], columns[3]), strict=True):
            _same(got, torch.cat(column, 1))
        for got, column in zip(reduce_scatter_coalesced(own, comm), columns, strict=True):
            _near(got, torch.stack(column).sum(0).to(got.dtype).chunk(comm.size)[comm.rank])
        assert all_reduce_coalesced([], comm) == []
        with pytest.raises(CollectiveError, match="does not divide"):
            reduce_scatter_coalesced([torch.ones(5)], comm)


@on_ranks(4)
def test_handles() -> None:
    comm = _comm("turned")
    x = _values(comm.ranks[comm.rank], (4, 4), torch.float32)
    pairs = [
        (all_reduce(x, comm, "avg", async_op=True), all_reduce(x, comm, "avg")),
        (all_gather(x, comm, 1, async_op=True), all_gather(x, comm, 1)),
        (reduce_scatter(x, comm, 1, async_op=True), reduce_scatter(x, comm, 1)),
        (all_to_all(x, comm, 0, 1, async_op=True), all_to_all(x, comm, 0, 1)),
        (all_reduce_(x.clone(), comm, async_op=True), all_reduce(x, comm)),
        (all_reduce_(x.t().clone().t(), comm, "avg", async_op=True), all_reduce(x, comm, "avg")),
    ]
    for handle, now in pairs:
        assert isinstance(handle, Pending)
        got = handle.wait()
        assert handle.is_completed()
        assert handle.wait() is got
        torch.testing.assert_close(got, now)


@on_ranks(2)
def test_tensors_without_elements_or_dims() -> None:
    comm = init_device_mesh("cpu", (2,)).comm(0)
    none = torch.empty(0, 3)
    assert all_reduce(none, comm).shape == (0, 3)
    assert all_gather(none, comm).shape == (0, 3)
    assert all_gather(none, comm, 1).shape == (0, 6)
    assert reduce_scatter(none, comm).shape == (0, 3)
    assert all_to_all(none, comm, 0, 1).shape == (0, 6)
    assert broadcast(none, comm).shape == (0, 3)
    scalar = torch.tensor(float(comm.rank))
    assert all_reduce(scalar, comm).shape == ()
    assert all_gather(scalar, comm).tolist() == [0, 1]
    assert broadcast(scalar, comm, 1).item() == 1


def test_one_rank_sends_nothing_and_gives_fresh_tensors() -> None:
    with fake_world(1):
        comm = init_device_mesh("cpu", (1,)).comm(0)
        x = torch.randn(4, 2)
        for got in (
            all_reduce(x, comm, "avg"),
            all_gather(x, comm, 1),
            all_gather_v(x, comm, [4]),
            reduce_scatter(x, comm),
            reduce_scatter_v(x, comm, [4]),
            all_to_all(x, comm, 0, 1),
            broadcast(x, comm),
            permute(x, comm, [0]),
            scatter([x], comm, out=torch.empty(4, 2)),
            gather(x, comm)[0],  # type: ignore[index]  # this rank is the target
            all_to_all_v(x.view(-1), comm, [8], [8]).view(4, 2),
            all_reduce(x, comm, async_op=True).wait(),
            all_reduce_coalesced([x], comm)[0],
        ):
            assert torch.equal(got, x)
            assert got.data_ptr() != x.data_ptr()
        assert all_reduce_(x, comm) is x
        assert all_reduce_(x, comm, async_op=True).wait() is x


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: all_gather(torch.ones(2), c, 3), "dim 3 of a tensor"),
        (lambda c: reduce_scatter(torch.ones(3), c), "equal blocks"),
        (lambda c: all_to_all(torch.ones(4, 3), c, 1, 0), "use the form with sizes"),
        (lambda c: all_gather_v(torch.ones(3), c, [3]), "one non-negative count"),
        (lambda c: all_gather_v(torch.ones(3), c, [2, 3]), "gives 3 along dim 0"),
        (lambda c: reduce_scatter_v(torch.ones(3), c, [1, 1]), "sum of the blocks"),
        (lambda c: all_to_all_v(torch.ones(3), c, [1, 1], [1, 1]), "blocks of"),
        (lambda c: broadcast(torch.ones(1), c, 2), "rank index 2"),
        (lambda c: scatter(None, c, out=torch.ones(1)), "needs 2 tensors there, got None"),
        (lambda c: scatter([torch.ones(1)], c, out=torch.ones(1)), "got 1"),
        (lambda c: scatter([torch.ones(1)] * 2, c, out=torch.ones(1, dtype=torch.int)), "of tensors of"),
        (lambda c: permute(torch.ones(1), c, [0, 0]), "once"),
        (lambda c: all_reduce(torch.ones(1, requires_grad=True), c), "no gradient"),
        (lambda c: all_reduce_coalesced([torch.ones(1, requires_grad=True)], c), "no gradient"),
    ],
    ids=[str(i) for i in range(14)],
)
def test_what_cannot_be_right_is_refused(call: Any, text: str) -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        with pytest.raises(CollectiveError, match=text):
            call(comm)
        with torch.no_grad():
            all_reduce(torch.ones(1, requires_grad=True), comm)


@on_ranks(4)
def test_an_in_place_reduction_may_run_beside_other_work() -> None:
    comm = init_device_mesh("cpu", (4,)).comm(0)
    for dtype in (torch.float32, torch.bfloat16):
        for own in (torch.full((2, 3), 1.0 + comm.rank, dtype=dtype), torch.ones(3, 2, dtype=dtype).t()):
            expected = all_reduce(own, comm)
            pending = all_reduce_(own, comm, async_op=True)
            assert pending.wait() is own
            assert torch.equal(own, expected)
