"""Values and gradients on ranks.

Covers: collectives.py, conversions.py, moves.py, dtypes.py, line.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal_spmd_types as spmd
from shoal_dtensor.errors import ArgumentTypeError, ArgumentValueError, SpmdTypeError
from shoal_dtensor.testing import simulate_ranks
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.errors import NoGroupError
from shoal_mesh.testing import on_ranks
from shoal_spmd_types import I, P, R, S, V

Move = Callable[[Tensor, Any], Tensor]
RANKS = 3


def moved(move: Move) -> list[Any]:
    """Return results and gradients of a move on simulated ranks.

    Rank r has the numbers 0 to 17 times 10 ** r; the gradient is 1, 10 or 100 times the
    numbers of the result's positions from 1 on.
    """

    def on_rank(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        scale = 10 ** mesh.get_local_rank()
        numbers = torch.arange(18)
        x = (numbers.double().view(3, 6) * scale).requires_grad_()
        with spmd.set_current_mesh(mesh), torch.enable_grad():
            y = move(x, "tp")
            weights = torch.arange(1, 1 + y.numel()).double().view(y.shape) * scale
            (y * weights).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    return simulate_ranks(abstract_mesh((RANKS,), ("tp",)), on_rank)


NUMBERS = torch.arange(18).double().view(3, 6)
ONES = torch.arange(1, 19).double().view(3, 6)


def test_sums_for_different_and_for_equal_continuations() -> None:
    results = moved(lambda x, tp: spmd.all_reduce(x, tp, dst=R))
    for y, grad in results:
        assert torch.equal(y, NUMBERS * 111)
        assert torch.equal(grad, ONES * 111)
    for rank, (y, grad) in enumerate(moved(lambda x, tp: spmd.all_reduce(x, tp, src=V, dst=I))):
        assert torch.equal(y, NUMBERS * 111)
        assert torch.equal(grad, ONES * 10**rank)


def test_a_maximum_is_reduced_by_its_own_operator() -> None:
    def largest(mesh: DeviceMesh) -> Tensor:
        x = torch.tensor([1.0, -1.0]) * 10 ** mesh.get_local_rank()
        with spmd.set_current_mesh(mesh):
            return spmd.all_reduce(x, "tp", src=spmd.pending("max"), dst=R)

    for result in simulate_ranks(abstract_mesh((RANKS,), ("tp",)), largest):
        assert result.tolist() == [100, -1]
    with (
        pytest.raises(ArgumentValueError, match="is not differentiable"),
        spmd.set_current_mesh(abstract_mesh((RANKS,), ("tp",))),
    ):
        x = torch.empty(2, device="meta", requires_grad=True)
        spmd.all_reduce(x, "tp", src=spmd.pending("max"), dst=R)
    with pytest.raises(ArgumentValueError, match="median"):
        spmd.pending("median")


def test_a_sum_in_place() -> None:
    def in_place(mesh: DeviceMesh) -> tuple[bool, Tensor, Tensor]:
        leaf = torch.ones(2, requires_grad=True)
        with spmd.set_current_mesh(mesh), torch.enable_grad():
            x = leaf * 2
            y = spmd.all_reduce(x, "tp", dst=R, inplace=True)
            y.sum().backward()  # type: ignore[no-untyped-call]  # of torch
        assert leaf.grad is not None
        return y is x, y.detach(), leaf.grad

    for same, y, grad in simulate_ranks(abstract_mesh((RANKS,), ("tp",)), in_place):
        assert same
        assert y.tolist() == [6, 6]
        assert grad.tolist() == [6, 6]


def test_gathers_join_shards_or_stack_tensors() -> None:
    whole = torch.cat([NUMBERS, NUMBERS * 10, NUMBERS * 100], 1)
    weights = torch.arange(1, 55).double().view(3, 18)
    for rank, (y, grad) in enumerate(moved(lambda x, tp: spmd.all_gather(x, tp, src=S(1), dst=R))):
        assert torch.equal(y, whole)
        assert torch.equal(grad, weights.chunk(3, 1)[rank] * 111)
    for rank, (_, grad) in enumerate(moved(lambda x, tp: spmd.unshard(x, tp, src=S(-1), dst=I))):
        assert torch.equal(grad, weights.chunk(3, 1)[rank] * 10**rank)
    stacked = torch.stack([NUMBERS, NUMBERS * 10, NUMBERS * 100], 1)
    gather = moved(lambda x, tp: spmd.all_gather(x, tp, dst=R, gather_dim=1))
    for rank, (y, grad) in enumerate(gather):
        assert torch.equal(y, stacked)
        assert torch.equal(grad, torch.arange(1, 55).double().view(3, 3, 6)[:, rank] * 111)


def test_scatters_shard_the_sum_or_take_entries_of_it() -> None:
    for rank, (y, grad) in enumerate(moved(lambda x, tp: spmd.reduce_scatter(x, tp, dst=S(1)))):
        assert torch.equal(y, NUMBERS.chunk(3, 1)[rank] * 111)
        ones = torch.arange(1, 7).double().view(3, 2)
        assert torch.equal(grad, torch.cat([ones, ones * 10, ones * 100], 1))
    for rank, (y, _) in enumerate(moved(lambda x, tp: spmd.reduce_scatter(x, tp))):
        assert torch.equal(y, NUMBERS[rank] * 111)
    with (
        pytest.raises(ArgumentValueError, match="one entry for each"),
        spmd.set_current_mesh(abstract_mesh((2,), ("tp",))),
    ):
        spmd.reduce_scatter(torch.empty(3, 6, device="meta"), "tp")


def test_exchanges_move_the_sharding_to_another_dim() -> None:
    exchange = moved(lambda x, tp: spmd.all_to_all(x, tp, src=S(0), dst=S(1)))
    for rank, (y, _) in enumerate(exchange):
        parts = [(NUMBERS * 10**other).chunk(3, 1)[rank] for other in range(3)]
        assert torch.equal(y, torch.cat(parts))
    for rank, (y, _) in enumerate(moved(lambda x, tp: spmd.all_to_all(x, tp))):
        assert torch.equal(y, torch.stack([NUMBERS[rank] * 10**other for other in range(3)]))


def test_uneven_blocks() -> None:
    sizes = (1, 0, 2)

    def uneven(mesh: DeviceMesh) -> list[Tensor]:
        rank = mesh.get_local_rank()
        x = torch.arange(3.0) + 10 * rank
        mine = x[: sizes[rank]].clone().requires_grad_()
        with spmd.set_current_mesh(mesh), torch.enable_grad():
            gathered = spmd.all_gather(mine, "tp", src=S(0), dst=R, split_sizes=sizes)
            total = (gathered * torch.arange(3.0)).sum()
            total.backward()  # type: ignore[no-untyped-call]  # of torch
            scattered = spmd.reduce_scatter(x, "tp", dst=S(0), split_sizes=sizes)
            incoming = [sizes[rank]] * 3
            sent = spmd.all_to_all(
                x, "tp", src=S(0), dst=S(0), output_split_sizes=incoming, input_split_sizes=sizes
            )
        assert mine.grad is not None
        return [gathered.detach(), mine.grad, scattered, sent]

    first, second, third = simulate_ranks(abstract_mesh((RANKS,), ("tp",)), uneven)
    assert first[0].tolist() == [0, 20, 21]
    assert [rank[1].tolist() for rank in (first, second, third)] == [[0], [], [3, 6]]
    assert [rank[2].tolist() for rank in (first, second, third)] == [[30], [], [33, 36]]
    assert [rank[3].tolist() for rank in (first, second, third)] == [
        [0, 10, 20],
        [],
        [1, 2, 11, 12, 21, 22],
    ]


def test_conversions_keep_the_meaning() -> None:
    for rank, (y, grad) in enumerate(moved(lambda x, tp: spmd.convert(x, tp, src=I, dst=R))):
        assert torch.equal(y, NUMBERS * 10**rank)
        assert torch.equal(grad, ONES * 111)
    for rank, (y, grad) in enumerate(moved(lambda x, tp: spmd.shard(x, tp, src=R, dst=S(1)))):
        assert torch.equal(y, (NUMBERS * 10**rank).chunk(3, 1)[rank])
        assert grad.count_nonzero() == 6
        assert torch.equal(grad.chunk(3, 1)[rank].flatten(), torch.arange(1.0, 7) * 10**rank)
    for _, grad in moved(lambda x, tp: spmd.convert(x, tp, src=I, dst=V)):
        row = torch.arange(1, 7).double()
        assert torch.equal(grad, torch.stack([row, row * 10, row * 100]))
    for rank, (y, grad) in enumerate(moved(lambda x, tp: spmd.convert(x, tp, src=R, dst=P))):
        assert torch.equal(y, NUMBERS * (rank == 0))
        assert torch.equal(grad, ONES * (rank == 0))
    pad = moved(lambda x, tp: spmd.convert(x, tp, src=S(1), dst=P, expert_mode=True))
    for rank, (y, grad) in enumerate(pad):
        assert torch.equal(y.chunk(3, 1)[rank], NUMBERS * 10**rank)
        assert y.count_nonzero() == 17
        weights = torch.arange(1, 55).double().view(3, 18)
        assert torch.equal(grad, weights.chunk(3, 1)[rank] * 10**rank)
    for rank, (_, grad) in enumerate(
        moved(lambda x, tp: spmd.convert(x, tp, src=I, dst=P, expert_mode=True))
    ):
        assert torch.equal(grad, ONES * 10**rank)
    for rank, (_, grad) in enumerate(
        moved(lambda x, tp: spmd.convert(x, tp, src=R, dst=I, expert_mode=True))
    ):
        assert torch.equal(grad, ONES * 10**rank * (rank == 0))


@pytest.mark.parametrize(
    ("src", "dst", "sums"),
    [(V, P, False), (R, V, False), (R, P, False), (I, V, True), (I, P, True), (I, R, True)],
)
def test_reinterpretations_keep_the_bytes(src: Any, dst: Any, sums: bool) -> None:
    results = moved(lambda x, tp: spmd.reinterpret(x, tp, src=src, dst=dst, expert_mode=True))
    for rank, (y, grad) in enumerate(results):
        assert torch.equal(y, NUMBERS * 10**rank)
        assert torch.equal(grad, ONES * (111 if sums else 10**rank))


@pytest.mark.parametrize(
    ("src", "dst", "name"),
    [
        (S(0), R, "all_gather"),
        (S(0), I, "all_gather"),
        (P, R, "all_reduce"),
        (P, I, "all_reduce"),
        (P, S(0), "reduce_scatter"),
        (S(0), S(1), "all_to_all"),
        (R, S(0), "convert"),
        (R, I, "convert"),
    ],
)
def test_redistribute_selects_the_move(src: Any, dst: Any, name: str) -> None:
    options = {"expert_mode": True} if name == "convert" else {}
    by_name = moved(lambda x, tp: getattr(spmd, name)(x, tp, src=src, dst=dst, **options))
    selected = moved(lambda x, tp: spmd.redistribute(x, tp, src=src, dst=dst))
    for one, other in zip(selected, by_name, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)


def test_moves_that_are_refused() -> None:
    x = meta(6, 6)
    refused: list[tuple[Callable[[Tensor, str], object], str]] = [
        (partial(spmd.all_reduce, src=R, dst=R), "src must be P or V"),
        (partial(spmd.all_reduce, dst=V), "dst must be R or I"),
        (
            partial(spmd.all_reduce, dst=R, inplace=True, op_dtype=x.dtype),
            "cannot be combined with dtypes",
        ),
        (partial(spmd.all_gather, src=R, dst=R), "V or S"),
        (partial(spmd.all_gather, src=S(0), dst=P), "R or I"),
        (partial(spmd.all_gather, src=S(0), dst=R, gather_dim=1), "contradicts"),
        (partial(spmd.all_gather, src=V, dst=R, split_sizes=[1, 2]), "split_sizes"),
        (partial(spmd.reduce_scatter, src=I, dst=S(0)), "src must be P or V"),
        (partial(spmd.reduce_scatter, dst=S(0), scatter_dim=1), "contradicts"),
        (partial(spmd.all_to_all, src=R), "V or S"),
        (partial(spmd.all_to_all, src=S(0), dst=S(1), split_dim=0), "split_dim must be 1"),
        (partial(spmd.all_to_all, output_split_sizes=[3, 3]), "split sizes"),
        (
            partial(spmd.all_to_all, src=S(0), dst=S(0), input_split_sizes=[3, 2]),
            "add up to 5",
        ),
        (partial(spmd.convert, src=P, dst=R), "all_reduce"),
        (partial(spmd.convert, src=R, dst=I), "expert_mode"),
        (partial(spmd.convert, src=S(0), dst=P), "expert_mode"),
        (partial(spmd.reinterpret, src=R, dst=P), "expert_mode"),
        (partial(spmd.reinterpret, src=S(0), dst=P), "convert, which keeps the meaning"),
        (partial(spmd.reinterpret, src=P, dst=R), "claim more"),
        (partial(spmd.shard, src=R, dst=V), "dst must be S"),
        (partial(spmd.unshard, src=V, dst=R), "src must be S"),
    ]
    # of five rows on two ranks
    uneven = [partial(spmd.convert, src=R, dst=S(0)), partial(spmd.all_to_all, src=S(0), dst=S(1))]
    with spmd.set_current_mesh(abstract_mesh((2,), ("tp",))):
        for call, message in refused:
            with pytest.raises(ArgumentValueError, match=message):
                call(x, "tp")
        for move in uneven:
            with pytest.raises(ArgumentValueError, match="not a multiple"):
                move(meta(5, 5), "tp")
        with pytest.raises(NoGroupError, match="abstract"):
            spmd.all_reduce(torch.ones(2), "tp", dst=R)
        with pytest.raises(SpmdTypeError, match="does not have an axis 'cp'"):
            spmd.all_reduce(x, "cp", dst=R)
    with pytest.raises(ArgumentTypeError, match="mesh axis"):
        spmd.all_reduce(x, 3, dst=R)
    with pytest.raises(SpmdTypeError, match="no mesh is current"):
        spmd.all_reduce(x, "tp", dst=R)


def test_dtypes_of_moves_and_of_their_gradients() -> None:
    low = torch.bfloat16
    with spmd.set_current_mesh(abstract_mesh((2,), ("tp",))):
        x = meta(4)
        assert spmd.all_reduce(x, "tp", dst=I, op_dtype=low).dtype is low
        assert spmd.all_reduce(x, "tp", dst=I, op_dtype=low, out_dtype=x.dtype).dtype is x.dtype
        assert spmd.all_gather(x, "tp", src=S(0), dst=I, out_dtype=low).dtype is low
        with pytest.raises(ArgumentValueError, match="backward reduces gradients"):
            spmd.all_gather(x, "tp", src=S(0), dst=R, out_dtype=low)
        with pytest.raises(ArgumentValueError, match="backward_options has unknown keys dtype"):
            spmd.all_gather(x, "tp", src=S(0), dst=R, backward_options={"dtype": low})
        y = spmd.all_gather(
            x, "tp", src=S(0), dst=R, out_dtype=low, backward_options={"op_dtype": torch.float32}
        )
        y.sum().backward()  # type: ignore[no-untyped-call]  # of torch
        assert x.grad is not None
        assert x.grad.dtype is torch.float32

    def rounded(mesh: DeviceMesh) -> list[float]:
        # 257 is 256 in bfloat16
        x = torch.full((2,), 257.0, requires_grad=True)
        with spmd.set_current_mesh(mesh), torch.enable_grad():
            options = {"op_dtype": torch.bfloat16}
            y = spmd.all_reduce(
                x, "tp", dst=R, op_dtype=low, out_dtype=torch.float32, backward_options=options
            )
            (y * 257).sum().backward()  # type: ignore[no-untyped-call]  # of torch
        assert x.grad is not None
        return [y[0].item(), x.grad[0].item()]

    assert simulate_ranks(abstract_mesh((2,), ("tp",)), rounded)[1] == [512, 512]


@pytest.mark.parametrize(
    ("name", "src", "dst"),
    [
        ("all_reduce", P, R),
        ("all_gather", S(0), R),
        ("reduce_scatter", P, S(0)),
        ("all_to_all", S(0), S(1)),
        ("unshard", S(0), R),
        ("redistribute", P, R),
        ("redistribute", S(0), I),
        ("redistribute", P, S(0)),
        ("redistribute", S(0), S(1)),
        ("redistribute", R, S(0)),
        ("convert", R, S(0)),
        ("shard", R, S(0)),
    ],
)
def test_every_move_takes_dtypes(name: str, src: Any, dst: Any) -> None:
    # no move with these options had a test, except all_reduce and all_gather
    low = torch.bfloat16

    def rounded(mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        move = partial(getattr(spmd, name), axis="tp", src=src, dst=dst)
        backward = {"op_dtype": low}
        # 257 is 256 in bfloat16
        x = torch.full((2, 2), 257.0, requires_grad=True)
        with spmd.set_current_mesh(mesh), torch.enable_grad():
            wide = move(x, out_dtype=torch.float64, backward_options=backward)
            narrow = move(x, op_dtype=low, backward_options=backward)
            both = move(x, op_dtype=low, out_dtype=torch.float32, backward_options=backward)
            (both * 257).sum().backward()
        assert x.grad is not None
        return wide, narrow, both, x.grad

    for wide, narrow, both, grad in simulate_ranks(abstract_mesh((2,), ("tp",)), rounded):
        assert wide.dtype is torch.float64
        assert not (wide % 257).any()
        assert narrow.dtype is low
        assert both.dtype is torch.float32
        assert not (both % 256).any()
        assert not (grad % 256).any()


def test_gradients_of_gradients() -> None:
    def second(mesh: DeviceMesh) -> Tensor:
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        with spmd.set_current_mesh(mesh), torch.enable_grad():
            y = spmd.all_reduce(x * x, "tp", dst=R)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(first.sum(), x)
        return again

    # every rank's loss counts each addend: 2 ranks of d2(x * x) = 2
    assert simulate_ranks(abstract_mesh((2,), ("tp",)), second)[0].tolist() == [4, 4]


@on_ranks(4)
def test_groups_meshes_and_names_are_the_same_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    x = torch.full((2,), float(rank))
    group = mesh.get_group("tp")
    expected = [1.0, 1.0] if rank < 2 else [5.0, 5.0]
    assert spmd.all_reduce(x, group, dst=R).tolist() == expected
    assert spmd.all_reduce(x, mesh.comm("tp"), dst=R).tolist() == expected
    with spmd.set_current_mesh(mesh):
        assert spmd.all_reduce(x, "tp", dst=R).tolist() == expected
        assert spmd.all_reduce(x, spmd.normalize_axis("tp"), dst=R).tolist() == expected
    axes = {"dp": spmd.MeshAxis.of(mesh.get_group("dp")), "tp": spmd.MeshAxis.of(group)}
    with spmd.set_current_mesh(axes), pytest.raises(NoGroupError):
        spmd.all_reduce(x, "tp", dst=R)
    with spmd.set_current_mesh(init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))):
        assert spmd.all_reduce(x, "tp", dst=R).tolist() == x.tolist()
        assert spmd.all_gather(x, "tp", src=S(0), dst=R).tolist() == x.tolist()


@pytest.mark.parametrize("sizes", [[3], [1, 1], []])
def test_split_sizes_that_do_not_fit_are_refused_on_one_rank_and_without_memory(
    sizes: list[int],
) -> None:
    # One rank got copies of its row from an all-gather, and lost rows in a reduce-scatter.
    one, two = abstract_mesh((1,), ("tp",)), abstract_mesh((2,), ("tp",))
    with spmd.set_current_mesh(one), pytest.raises(ArgumentValueError, match="split_sizes"):
        spmd.all_gather(torch.ones(1, 2), "tp", src=S(0), dst=R, split_sizes=sizes)
    with spmd.set_current_mesh(one), pytest.raises(ArgumentValueError, match="split_sizes"):
        spmd.reduce_scatter(torch.ones(4, 2), "tp", dst=S(0), split_sizes=sizes)
    x = torch.ones(4, 2, device="meta")
    with spmd.set_current_mesh(two), pytest.raises(ArgumentValueError, match="split_sizes"):
        spmd.reduce_scatter(x, "tp", dst=S(0), split_sizes=sizes)


def test_one_rank_receives_the_rows_that_it_sends() -> None:
    # Output sizes that differ were ignored.
    with spmd.set_current_mesh(abstract_mesh((1,), ("tp",))):
        x = torch.ones(3, 2)
        exchange = partial(spmd.all_to_all, x, "tp", src=S(0), dst=S(0))
        assert torch.equal(exchange(output_split_sizes=[3]), x)
        with pytest.raises(ArgumentValueError, match=r"must be \(3,\), got \(5,\)"):
            exchange(output_split_sizes=[5])
