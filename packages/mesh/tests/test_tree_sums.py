"""Covers: reductions.py, sums in one tree, on real gloo ranks."""

from __future__ import annotations

import pytest
import torch

from rank_values import ORDERS, comm_of
from shoal_mesh import (
    Comm,
    DeviceMesh,
    all_reduce,
    comm_over,
    init_device_mesh,
    reduce_scatter,
    reduce_scatter_v,
    sums_in_tree,
)
from shoal_mesh.internal import all_reduce_, start_packed, tree_sum
from shoal_mesh.testing import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16]


def terms_of_all(dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """(count, ...): terms of very different sizes, the same on all ranks."""
    draw = torch.Generator().manual_seed(count)
    values = torch.randn(count, *shape, generator=draw) * 10.0 ** torch.randint(
        -3, 3, (count, *shape), generator=draw
    )
    return values.to(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 12, 100])
def test_halves_are_nodes_of_the_tree(count: int) -> None:
    terms = terms_of_all(torch.float32, 4 * count, (7,))
    whole = tree_sum(terms)
    assert torch.equal(whole, tree_sum(torch.stack([tree_sum(part) for part in terms.chunk(2)])))
    assert torch.equal(whole, tree_sum(torch.stack([tree_sum(part) for part in terms.chunk(4)])))
    torch.testing.assert_close(whole.double(), terms.double().sum(0), atol=1e-3, rtol=1e-5)


def test_no_terms() -> None:
    assert tree_sum(torch.empty(0, 2)).tolist() == [0, 0]


@pytest.mark.parametrize("order", list(ORDERS))
@on_ranks(4)
def test_sums_of_ranks_are_those_of_one(order: str) -> None:
    comm = comm_of(order)
    for dtype in DTYPES:
        for shape in [(8,), (8, 3), (8, 4001)]:  # one exchange, one exchange, two
            _same_bits(terms_of_all(dtype, 3 * comm.size, shape), comm)


def _same_bits(terms: torch.Tensor, comm: Comm) -> None:
    whole, own = tree_sum(terms), tree_sum(terms.chunk(comm.size)[comm.rank])
    with sums_in_tree():
        assert torch.equal(all_reduce(own, comm), whole)
        in_place = own.clone()
        all_reduce_(in_place, comm, async_op=True).wait()
        assert torch.equal(in_place, whole)
        assert torch.equal(reduce_scatter(own, comm), whole.chunk(comm.size)[comm.rank])
        pending = reduce_scatter(own, comm, async_op=True)
        assert torch.equal(pending.wait(), whole.chunk(comm.size)[comm.rank])
        sizes = [3, 0, 5, 0] if comm.size == 4 else [3, 5]
        assert torch.equal(reduce_scatter_v(own, comm, sizes), torch.split(whole, sizes)[comm.rank])
        if not terms.is_complex():
            _same_bits_packed(whole, own, comm)


def _same_bits_packed(whole: torch.Tensor, own: torch.Tensor, comm: Comm) -> None:
    got = start_packed("all_reduce", [own.flatten(), own.flatten()], comm).wait()
    assert torch.equal(got[0], whole.flatten())
    assert torch.equal(got[1], whole.flatten())
    own_rows, rows = own.reshape(comm.size, -1), whole.reshape(comm.size, -1)
    sizes = (rows.shape[1],) * comm.size
    block = start_packed("reduce_scatter", [own_rows], comm, sizes).wait()[0]
    assert torch.equal(block, rows[comm.rank])


@on_ranks(4)
def test_two_axes_one_after_the_other() -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    terms = terms_of_all(torch.float32, 8, (5,))
    data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    own = tree_sum(terms.chunk(2)[data].chunk(2)[tensor])
    with sums_in_tree():
        assert torch.equal(
            all_reduce(all_reduce(own, (mesh, "tensor")), (mesh, "data")), tree_sum(terms)
        )


@on_ranks(2)
def test_integers_and_maxima_and_the_time_after_are_as_ever() -> None:
    comm = comm_over((0, 1))
    with sums_in_tree():
        assert all_reduce(torch.tensor([2, 3]), comm).tolist() == [4, 6]
        assert all_reduce(torch.tensor([float(comm.rank)]), comm, "max").tolist() == [1.0]
        assert all_reduce(torch.tensor([1.0 + comm.rank]), comm, "avg").tolist() == [1.5]
    assert all_reduce(torch.tensor([1.0]), comm).tolist() == [2.0]
