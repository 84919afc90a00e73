"""Covers: {calls,transport}.py: refused calls, and handles, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_values import comm_of, values_of
from shoal_mesh import (
    CollectiveError,
    Comm,
    all_gather,
    all_gather_coalesced,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_blocks,
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
from shoal_mesh.internal import Pending, all_reduce_
from shoal_mesh.testing import fake_world, on_ranks

REFUSED: dict[str, tuple[Callable[[Comm], object], str]] = {
    "dim beyond the tensor": (lambda c: all_gather(torch.ones(2), c, 3), "no dim 3 in a tensor"),
    "blocks that differ": (lambda c: reduce_scatter(torch.ones(3), c), "equal blocks"),
    "columns that do not divide": (
        lambda c: all_to_all(torch.ones(4, 3), c, 1, 0),
        "use the form with sizes",
    ),
    "one count for two ranks": (
        lambda c: all_gather_v(torch.ones(3), c, [3]),
        "one non-negative count",
    ),
    "another count than there is": (
        lambda c: all_gather_v(torch.ones(3), c, [2, 3]),
        "gives 3 along dim 0",
    ),
    "sizes with another sum": (
        lambda c: reduce_scatter_v(torch.ones(3), c, [1, 1]),
        "sum of the blocks",
    ),
    "counts that do not fit": (
        lambda c: all_to_all_v(torch.ones(3), c, [1, 1], [1, 1]),
        "blocks of",
    ),
    "source beyond the axis": (
        lambda c: broadcast(torch.ones(1), c, 2),
        "src 2 is not a rank along 0: indices are 0 to 1",
    ),
    "no tensors at the source": (
        lambda c: scatter(None, c, out=torch.ones(1)),
        "needs 2 tensors there, got None",
    ),
    "one tensor for two ranks": (lambda c: scatter([torch.ones(1)], c, out=torch.ones(1)), "got 1"),
    "another dtype of out": (
        lambda c: scatter([torch.ones(1)] * 2, c, out=torch.ones(1, dtype=torch.int)),
        "of tensors of",
    ),
    "two to one target": (lambda c: permute(torch.ones(1), c, [0, 0]), "once"),
    "a gradient": (
        lambda c: all_reduce(torch.ones(1, requires_grad=True), c),
        "is not differentiable",
    ),
    "a gradient in a list": (
        lambda c: all_reduce_coalesced([torch.ones(1, requires_grad=True)], c),
        "is not differentiable",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        with pytest.raises(CollectiveError, match=text):
            call(comm)
        with torch.no_grad():
            all_reduce(torch.ones(1, requires_grad=True), comm)


def scatter_from_the_first(x: Tensor, c: Comm) -> Any:
    return scatter([torch.ones(4, 4)] * 4 if c.rank == 0 else None, c, out=x)


COLLECTIVES: dict[str, Callable[[Tensor, Comm], Any]] = {
    "all_reduce": all_reduce,
    "all_reduce_": all_reduce_,
    "all_reduce async": lambda x, c: all_reduce(x, c, async_op=True),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": lambda x, c: all_to_all(x, c, 0, 1),
    "broadcast": broadcast,
    "scatter": scatter_from_the_first,
    "gather": gather,
    "permute": lambda x, c: permute(x, c, [1, 2, 3, 0]),
    "all_gather_v": lambda x, c: all_gather_v(x, c, [4] * 4),
    "reduce_scatter_v": lambda x, c: reduce_scatter_v(x, c, [1] * 4),
    "all_to_all_v": lambda x, c: all_to_all_v(x.view(-1), c, [4] * 4, [4] * 4),
    "all_to_all_blocks": lambda x, c: all_to_all_blocks([[x]] * 4, c, [[x.clone()]] * 4),
    "all_reduce_coalesced": lambda x, c: all_reduce_coalesced([x, x], c),
    "all_gather_coalesced": lambda x, c: all_gather_coalesced([x, x], c),
    "reduce_scatter_coalesced": lambda x, c: reduce_scatter_coalesced([x, x], c),
}


@on_ranks(4)
def test_a_gradient_on_one_rank_leaves_the_group_usable() -> None:
    comm = comm_of("turned")
    for call in COLLECTIVES.values():
        x = torch.ones(4, 4, requires_grad=comm.rank == 1)
        with (
            pytest.raises(CollectiveError, match="is not differentiable")
            if x.requires_grad
            else nullcontext()
        ):
            call(x, comm)
        # the refused tensor is not written to
        assert not x.requires_grad or bool((x == 1).all())
        assert all_reduce(torch.ones(()), comm).item() == 4


@on_ranks(4)
def test_torch_jit_trace_is_refused_and_leaves_the_group_usable() -> None:
    """A trace would have the values that arrive now as constants."""
    comm = comm_of("turned")
    trace: Any = torch.jit.trace
    for name, call in COLLECTIVES.items():

        def traced(x: Tensor, call: Callable[[Tensor, Comm], Any] = call) -> Tensor:
            call(x, comm)
            return x

        # sizes of blocks are tensors in a trace
        refused_earlier = name in ("all_gather_coalesced", "reduce_scatter_coalesced")
        text = "sizes of blocks" if refused_earlier else r"torch.jit.trace.*torch.export.export"
        with pytest.raises(CollectiveError, match=text):
            trace(traced, torch.ones(4, 4), check_trace=False)
        assert all_reduce(torch.ones(()), comm).item() == 4, name


@on_ranks(4)
def test_handles() -> None:
    comm = comm_of("turned")
    x = values_of(comm.ranks[comm.rank], (4, 4), torch.float32)
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
