"""Covers: exchange.py: every collective against gloo's, in one round and in many."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rank_values import assert_same, over_gloo, values_of_all
from shoal_mesh import (
    Comm,
    CommDebugMode,
    all_gather,
    all_gather_coalesced,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_blocks,
    all_to_all_v,
    broadcast,
    comm_over,
    differentiable,
    launch,
    permute,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.errors import CollectiveError, PeerError
from shoal_mesh.internal import all_reduce_
from shoal_mesh.shared_memory import channel
from shoal_mesh.shared_memory.channel import OPT_OUT
from shoal_mesh.testing import on_ranks
from shoal_mesh.watch.recorder import DTYPES


def both(size: int, slot_bytes: int) -> tuple[Comm, Comm]:
    """Communicators of all ranks: through shared memory with small slots, and through gloo."""
    ranks = tuple(range(size))
    group = dist.new_group(list(ranks))
    comm = Comm.over(group, ("ranks",), ranks)
    usual, channel.SLOT_BYTES = channel.SLOT_BYTES, slot_bytes
    try:
        shared = channel.channel_of(group)
    finally:
        channel.SLOT_BYTES = usual
    assert shared is not None
    assert shared.foreground.slot_bytes == slot_bytes
    return comm, over_gloo(comm)


def permute_to_the_next(x: Tensor, comm: Comm) -> Tensor:
    return permute(x, comm, [(i + 1) % comm.size for i in range(comm.size)])


CALLS: dict[str, Callable[[Tensor, Comm], Tensor]] = {
    "all_gather": all_gather,
    "all_gather dim 1": lambda x, comm: all_gather(x, comm, 1),
    "reduce_scatter": reduce_scatter,
    "reduce_scatter max dim 1": lambda x, comm: reduce_scatter(x, comm, 1, "max"),
    "all_to_all": lambda x, comm: all_to_all(x, comm, 0, 1),
    "broadcast": lambda x, comm: broadcast(x, comm, comm.size - 1),
    "sum": all_reduce,
    "min": lambda x, comm: all_reduce(x, comm, "min"),
    "max": lambda x, comm: all_reduce(x, comm, "max"),
    "permute": permute_to_the_next,
}


@pytest.mark.parametrize("slot_bytes", [64 * 4, 1 << 16])
@on_ranks(4)
def test_as_gloo(slot_bytes: int) -> None:
    shared, gloo = both(4, slot_bytes)
    for call, dtype, shape in product(CALLS.values(), DTYPES[:8], [(4, 4), (12, 20), (0, 4)]):
        x = values_of_all(shared, shape, dtype)[shared.rank]
        assert_same(call(x, shared), call(x, gloo))
    for op in ("product", "band", "bxor", "avg"):
        x = torch.arange(1, 300) % 7 + shared.rank
        x = x.double() if op == "avg" else x
        assert torch.equal(all_reduce(x, shared, op), all_reduce(x, gloo, op))


@on_ranks(3)
def test_uneven_blocks_and_large_messages() -> None:
    shared, gloo = both(3, 64 * 4)
    for sizes in [(1, 0, 7), (300, 2, 0), (0, 0, 0), (513, 514, 515)]:
        x = torch.randn(sizes[shared.rank], 2)
        assert torch.equal(all_gather_v(x, shared, sizes), all_gather_v(x, gloo, sizes))
        whole = torch.randn(2, sum(sizes)).round(decimals=1).mul(10).round()
        got, want = (
            reduce_scatter_v(whole, shared, sizes, 1),
            reduce_scatter_v(whole, gloo, sizes, 1),
        )
        assert torch.equal(got, want)
        send = [sizes[(shared.rank + j) % 3] for j in range(3)]
        receive = [sizes[(i + shared.rank) % 3] for i in range(3)]
        flat = torch.randn(sum(send))
        assert torch.equal(
            all_to_all_v(flat, shared, send, receive), all_to_all_v(flat, gloo, send, receive)
        )
        pending = all_to_all_v(flat, shared, send, receive, async_op=True)
        assert torch.equal(pending.wait(), all_to_all_v(flat, gloo, send, receive))


@on_ranks(4)
def test_sums_have_the_same_bits_on_all_ranks_and_are_counted_once() -> None:
    comm = comm_over((0, 1, 2, 3))
    torch.manual_seed(dist.get_rank())
    for dtype, count in product((torch.float32, torch.bfloat16), (5, 1 << 14, 1 << 17, 1 << 19)):
        mine = torch.randn(count).to(dtype)
        with CommDebugMode() as debug:
            reduced = all_reduce(mine, comm)
        assert debug.get_total_counts() == 1
        later = all_reduce(mine, comm, async_op=True).wait()
        # those are gloo's, in another order
        assert torch.equal(later, reduced) or later.nbytes > channel.SLOT_BYTES
        everywhere = all_gather(reduced, comm).view(4, -1)
        assert all(torch.equal(everywhere[0], row) for row in everywhere)
        exact = all_gather(mine, comm).view(4, -1).double().sum(0)
        torch.testing.assert_close(
            reduced.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2
        )


@on_ranks(4)
def test_large_messages_in_the_background_need_nothing_more_of_a_rank_that_does_not_wait() -> None:
    comm = comm_over((0, 1, 2, 3))
    tensor = torch.arange(1 << 20, dtype=torch.float32) * (comm.rank + 1)  # 4 MiB
    calls: list[Callable[..., Any]] = [
        all_gather,
        reduce_scatter,
        all_reduce,
        partial(all_to_all, split_dim=0, concat_dim=0),
    ]
    wanted = [call(tensor, comm) for call in calls]
    under_way = [call(tensor, comm, async_op=True) for call in calls]
    assert comm.rank or all(map(torch.equal, [pending.wait() for pending in under_way], wanted))
    dist.barrier()  # over gloo
    assert all(map(torch.equal, [pending.wait() for pending in under_way], wanted))


@on_ranks(2)
def test_counts_that_do_not_fit_are_refused() -> None:
    shared, _ = both(2, 1 << 16)
    rank = shared.rank
    with pytest.raises(
        CollectiveError,
        match=r"rank 1 of the group sends 4 bytes to rank 0, but it expects 8|given up",
    ):
        all_to_all_v(
            torch.ones(1), shared, [0, 1] if rank == 0 else [1, 0], [0, 2] if rank == 0 else [1, 0]
        )
        all_reduce(torch.ones(1), shared)


def opted_out() -> bool:
    os.environ[OPT_OUT] = "0"
    comm = comm_over((0, 1))
    return channel.channel_of(comm.group) is None and all_reduce(torch.ones(1), comm).item() == 2.0


def test_one_variable_opts_out() -> None:
    assert launch(opted_out, 2) == [True, True]


class Marked(Tensor):
    """A tensor subclass that changes nothing."""


class Boxed(Tensor):
    """A tensor subclass that computes its values."""

    plain: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Boxed:
        result: Boxed = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        result.plain = inner
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is that of a function
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [each.plain if isinstance(each, Boxed) else each for each in args]
        if op is torch.ops.aten.detach.default:
            return Boxed(plain[0])
        return op(*plain, **(kwargs or {}))


def frozen(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x, requires_grad=False)


def shared_with_numpy(x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(x.numpy()), dtype=x.dtype).view_as(x)


HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "a subclass": lambda x: x.as_subclass(Marked),
    "a wrapper": Boxed,
    "a parameter": frozen,
    "an expanded tensor": lambda x: x[:1].expand(x.shape),
    "a transposed tensor": lambda x: x.t().contiguous().t(),
    "a conjugate": lambda x: torch.complex(x, x).conj().real,
    "a shared tensor": shared_with_numpy,
}


def exchange_halves(x: Tensor, comm: Comm) -> Any:
    out = [[torch.empty(2, 2)], [torch.empty(2, 2)]]
    return all_to_all_blocks([[x[:2]], [x[2:]]], comm, out)[0][0]


SENT: dict[str, Callable[[Tensor, Comm], Any]] = {
    **CALLS,
    "all_reduce": all_reduce,
    "all_gather in the background": lambda x, comm: all_gather(x, comm, async_op=True).wait(),
    "all_reduce in the background": lambda x, comm: all_reduce(x, comm, async_op=True).wait(),
    "permute": lambda x, comm: permute(x, comm, [1, 0]),
    "all_gather_v": lambda x, comm: all_gather_v(x, comm, [4, 4]),
    "scatter": lambda x, comm: scatter([x, x], comm, out=torch.zeros(x.shape)),
    "all_gather_coalesced": lambda x, comm: all_gather_coalesced([x], comm)[0],
    "all_reduce_coalesced": lambda x, comm: all_reduce_coalesced([x], comm)[0],
    "blocks": exchange_halves,
}


# the rank with another kind of tensor called gloo, the others waited in shared memory
@pytest.mark.parametrize("name", SENT)
@on_ranks(2)
def test_what_one_rank_holds_does_not_choose_the_transport(name: str) -> None:
    comm, call = comm_over((0, 1)), SENT[name]
    x = torch.arange(8.0).view(4, 2) + comm.rank
    for kind, of_kind in HELD.items():
        if kind == "an expanded tensor":
            x = x[:1].repeat(4, 1)
        if kind == "a wrapper" and name == "blocks":
            # a wrapper without views
            continue
        want = call(x.clone(), comm)
        held = of_kind(x.clone()) if comm.rank == 0 else x.clone()
        result = call(held, comm)
        assert torch.equal(torch.empty(want.shape).copy_(result), want), kind


@on_ranks(2)
def test_a_subclass_is_reduced_in_place() -> None:
    comm = comm_over((0, 1))
    for kind in (Marked, Boxed, frozen):
        x = torch.ones(3)
        held = x.as_subclass(Marked) if kind is Marked else kind(x)
        with torch.no_grad():
            result = all_reduce_(held if comm.rank == 0 else x, comm)
        assert x.tolist() == [2.0] * 3
        assert type(result) is (type(held) if comm.rank == 0 else Tensor)


def quantized_by_channels() -> Tensor:
    return torch.quantize_per_channel(
        torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.qint8
    )


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)


REFUSED: dict[str, Callable[[], Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "quantized by channels": quantized_by_channels,
    "of another library": lambda: torch.ones(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
    "jagged": jagged,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "rows": lambda: torch.eye(4).to_sparse_csr(),
    "columns": lambda: torch.eye(4).to_sparse_csc(),
    "blocks of rows": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "blocks of columns": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


# an exception inside of a step closed the group for the rest of the process
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_what_cannot_be_sent_is_refused_and_the_group_goes_on() -> None:
    comm = comm_over((0, 1))
    calls = {name: call for name, call in SENT.items() if name not in ("scatter", "blocks")}
    for kind, make in REFUSED.items():
        for name, call in calls.items():
            with pytest.raises(CollectiveError, match=r"collectives send|cannot be reduced"):
                call(make(), comm)
            assert all_reduce(torch.ones(2), comm).tolist() == [2.0, 2.0], (kind, name)
        with pytest.raises(CollectiveError, match="collectives send"):
            all_to_all_blocks([[make()], []], comm, [[], []])
        with pytest.raises(CollectiveError, match="collectives send"):
            differentiable.all_gather(make(), comm)


# elements of equal width were taken for those of the other dtype, silently
@on_ranks(2)
def test_exact_blocks_of_different_dtypes_are_an_error() -> None:
    comm, _ = both(2, 1 << 10)
    x = torch.ones(2, dtype=[torch.float32, torch.int32][comm.rank])
    with pytest.raises(PeerError, match=r"dtypes: rank 0: torch.float32, rank 1: torch.int32"):
        all_to_all_v(x, comm, [1, 1], [1, 1])
