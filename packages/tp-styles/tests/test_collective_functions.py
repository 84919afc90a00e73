"""Each function's values, and its backward as the adjoint.

Covers: lowering/collective_functions.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` and some of its functions no types.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import Partial, Replicate, Shard
from shoal_mesh import Comm, all_reduce, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles.lowering import collective_functions as functions
from shoal_tp_styles.lowering.shared_reduction import copy, gather_partial

SIZES = (3, 0, 2, 1)  # six rows on four ranks


@dataclass(frozen=True)
class Move:
    """A collective function, and what it gives.

    Attributes:
        run: of a rank's tensor.
        expected: what a rank gets of the tensors of all ranks.
    """

    run: Callable[[Tensor, Comm], Tensor]
    expected: Callable[[list[Tensor], int], Tensor]


def added(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


MOVES: dict[str, Move] = {
    "reduce": Move(functions.reduce, expected=lambda xs, rank: added(xs)),
    "scatter": Move(
        lambda x, comm: functions.scatter(x, comm, 0),
        expected=lambda xs, rank: added(xs).chunk(4)[rank],
    ),
    "gather": Move(
        lambda x, comm: functions.gather(x, comm, 0), expected=lambda xs, rank: torch.cat(xs)
    ),
    "gather_partial": Move(
        lambda x, comm: gather_partial(x, comm, 0), expected=lambda xs, rank: torch.cat(xs)
    ),
    "split": Move(
        lambda x, comm: functions.split(x, comm, 0),
        expected=lambda xs, rank: xs[0].chunk(4)[rank],
    ),
    "copy": Move(copy, expected=lambda xs, rank: xs[0]),
}
REPLICATED_INPUT = ("split", "copy")
# of the output: complete and equal on all ranks
REPLICATED_GRAD = ("reduce", "gather")


def seeded(seed: int) -> Tensor:
    return torch.randn(8, 3, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MOVES)
@on_ranks(4)
def test_values_and_adjoint(name: str) -> None:
    move = MOVES[name]
    comm = all_ranks().comm(0)
    inputs = [seeded(0 if name in REPLICATED_INPUT else rank) for rank in range(4)]
    x = inputs[comm.rank].clone().requires_grad_()
    out = move.run(x * 1, comm)
    torch.testing.assert_close(out, move.expected(inputs, comm.rank))
    grad = torch.randn(
        out.shape,
        dtype=out.dtype,
        generator=torch.Generator().manual_seed(9 if name in REPLICATED_GRAD else 9 + comm.rank),
    )
    out.backward(grad)
    # <A x, g> == <x, A' g>; what is replicated counts once.
    left = (out * grad).sum().detach()
    right = (x * x.grad).sum().detach()  # type: ignore[operator]  # there is a gradient
    left = left if name in REPLICATED_GRAD else all_reduce(left, comm)
    right = right if name in REPLICATED_INPUT else all_reduce(right, comm)
    torch.testing.assert_close(left, right)


@on_ranks(4)
def test_shards_of_different_sizes() -> None:
    comm = all_ranks().comm(0)
    rows = seeded(0)[:6]
    own = functions.split(rows, comm, 0, SIZES)
    assert own.shape[0] == SIZES[comm.rank]
    assert torch.equal(functions.gather(own, comm, 0, SIZES), rows)
    torch.testing.assert_close(functions.scatter(rows, comm, 0, SIZES), 4 * own)


@on_ranks(4)
def test_sums_take_one_collective_for_each_dtype() -> None:
    comm = all_ranks().comm(0)
    tensors: list[Any] = [torch.ones(2), None, torch.ones(3, 1), torch.ones(2, dtype=torch.double)]
    summed = functions.sum_over_ranks(tensors, comm)
    assert [None if each is None else each.flatten().tolist() for each in summed] == [
        [4, 4],
        None,
        [4, 4, 4],
        [4, 4],
    ]
    assert torch.equal(tensors[0], torch.ones(2))


@fake_world(4)
def test_layouts_that_need_dtensor_have_no_sharded_dim() -> None:
    comm = init_device_mesh("cpu", (4,)).comm(0)
    assert functions.sharded_dim(Shard(1, sizes=(1, 1, 1, 1)), comm) == (comm, 1, (1, 1, 1, 1))
    assert all(
        functions.sharded_dim(each, comm) is None
        for each in (Replicate(), Partial(), Shard(0, multiple_of=2))
    )
