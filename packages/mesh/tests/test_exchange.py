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
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    broadcast,
    comm_over,
    launch,
    permute,
    reduce_scatter,
    reduce_scatter_v,
)
from shoal_mesh.errors import CollectiveError
from shoal_mesh.shared_memory import channel
from shoal_mesh.shared_memory.channel import OPT_OUT
from shoal_mesh.shared_memory.recorder import DTYPES
from shoal_mesh.testing import on_ranks


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
    "permute": lambda x, comm: permute(x, comm, [(i + 1) % comm.size for i in range(comm.size)]),
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
        match=r"rank 1 of the group sends 4 bytes to rank 0, which expects 8|given up",
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
