"""Collectives of torch.distributed on shards, or refused.

Covers: dispatch/composites.py, _torch/operators.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` and some of its functions no types.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from shoal_dtensor import DTensor, Partial, Replicate, Shard, communication, distribute_tensor
from shoal_dtensor.errors import MixedTensorError, NoRuleError, PlacementError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

FULL = torch.arange(24.0).view(6, 4)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _own(mesh: DeviceMesh, placement: Any = None) -> DTensor:
    """A gradient of this data-parallel rank: on its own tensor-parallel mesh."""
    local = FULL * (dist.get_rank() // 2 + 1)
    return distribute_tensor(local, mesh["tp"], [placement or Shard(0)], src_data_rank=None)


@on_ranks(4)
def test_gradients_of_data_parallel_replicas_are_reduced_by_hand() -> None:
    mesh = _mesh()
    group = mesh.get_group("dp")
    with communication("forbid"):  # explicit calls always may
        for placement in (Shard(0), Shard(1), Replicate()):
            grad = _own(mesh, placement)
            version = grad._version
            dist.all_reduce(grad, group=group)
            assert grad._version > version
            handle = dist.all_reduce(grad, op=dist.ReduceOp.MAX, group=group, async_op=True)
            handle.wait()
            dist.broadcast(grad, src=mesh["dp"].mesh.tolist()[0], group=group)
            torch.testing.assert_close(grad.full_tensor(), FULL * 3)


@on_ranks(4)
def test_a_replicated_axis_of_one_mesh() -> None:
    mesh = _mesh()
    grad = distribute_tensor(FULL.clone(), mesh, [Replicate(), Shard(1)], src_data_rank=None)
    dist.all_reduce(grad, group=mesh.get_group("dp"))
    torch.testing.assert_close(grad.full_tensor(), FULL * 2)
    partial = DTensor.from_local(FULL.clone(), mesh, [Replicate(), Partial()])
    dist.all_reduce(partial, op=dist.ReduceOp.SUM, group=mesh.get_group("dp"))
    torch.testing.assert_close(partial.full_tensor(), FULL * 4)


@on_ranks(4)
def test_functional_collectives() -> None:
    mesh = _mesh()
    grad = _own(mesh)
    for reduced in (
        functional.all_reduce(grad, "sum", mesh.get_group("dp")),
        functional.all_reduce_coalesced([grad], "sum", mesh.get_group("dp"))[0],
    ):
        result: Any = reduced + 0
        torch.testing.assert_close(result.full_tensor(), FULL * 3)
    torch.testing.assert_close(grad.full_tensor(), FULL * (dist.get_rank() // 2 + 1))


@on_ranks(4)
def test_parameters_broadcast_in_buckets() -> None:
    """One flat tensor, copied back afterwards.

    ZeroRedundancyOptimizer and DistributedDataParallel do this.
    """
    mesh = _mesh()
    for placement in (Shard(0), Replicate()):
        weights: list[Any] = [_own(mesh, placement), _own(mesh, placement)]
        broadcast = dist._broadcast_coalesced  # type: ignore[attr-defined]  # private
        broadcast(mesh.get_group("dp"), weights, 1 << 20, 0)
        for weight in weights:
            torch.testing.assert_close(weight.full_tensor(), FULL)


@dataclass(frozen=True)
class RefusedOperands:
    """What the refused calls get.

    Attributes:
        x: replicated over the axis dp, columns over the axis tp.
        partial: replicated over the axis dp, a sum over the axis tp.
        dp, tp: the groups of the axes.
    """

    x: DTensor
    partial: DTensor
    dp: dist.ProcessGroup
    tp: dist.ProcessGroup


def take_the_maximum_of_partial_sums(g: RefusedOperands) -> object:
    return dist.all_reduce(g.partial, op=dist.ReduceOp.MAX, group=g.dp)


def gather_into_plain_tensors(g: RefusedOperands) -> object:
    return dist.all_gather([torch.empty(6, 2) for _ in range(2)], g.x, group=g.dp)


def reduce_with_plain_tensors(g: RefusedOperands) -> object:
    return functional.all_reduce_coalesced([g.x, torch.ones(2)], "sum", g.dp)


OTHER_SHARDS: dict[str, Callable[[RefusedOperands], object]] = {
    "other shards": lambda g: dist.all_reduce(g.x, group=g.tp),
    "the default group": lambda g: dist.all_reduce(g.x),
    "broadcast of other shards": lambda g: dist.broadcast(g.x, src=0),
    "sum of partial values": lambda g: dist.all_reduce(g.partial, group=g.tp),
    "maximum of partial sums": take_the_maximum_of_partial_sums,
}
WITHOUT_RULE: dict[str, Callable[[RefusedOperands], object]] = {
    "gathered into plain tensors": gather_into_plain_tensors,
    "gathered into one": lambda g: dist.all_gather_into_tensor(torch.empty(12, 4), g.x, group=g.dp),
    "scattered": lambda g: dist.reduce_scatter_tensor(torch.empty(3, 4), g.x, group=g.dp),
    "reduced to one rank": lambda g: dist.reduce(g.x, 0),
    "gathered functionally": lambda g: functional.all_gather_tensor(g.x, 0, g.dp),
    "sent": lambda g: dist.send(g.x, (dist.get_rank() + 2) % 4),
}
REFUSED: dict[str, tuple[type[Exception], Callable[[RefusedOperands], object]]] = {
    **{name: (PlacementError, call) for name, call in OTHER_SHARDS.items()},
    **{name: (NoRuleError, call) for name, call in WITHOUT_RULE.items()},
    "with plain tensors": (MixedTensorError, reduce_with_plain_tensors),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(4)
def test_what_is_not_a_collective_of_equal_shards_is_refused(name: str) -> None:
    mesh = _mesh()
    error, call = REFUSED[name]
    x = distribute_tensor(FULL.clone(), mesh, [Replicate(), Shard(1)], src_data_rank=None)
    partial = DTensor.from_local(FULL.clone(), mesh, [Replicate(), Partial()])
    operands = RefusedOperands(x, partial, dp=mesh.get_group("dp"), tp=mesh.get_group("tp"))
    with pytest.raises(error, match=r"got a DTensor|do not hold|which is partial|plain tensor"):
        call(operands)
    torch.testing.assert_close(x.full_tensor(), FULL)


@on_ranks(4)
def test_half_an_axis_is_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x: Tensor = distribute_tensor(FULL.clone(), mesh, [Replicate()], src_data_rank=None)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.raises(
        PlacementError, match=r"do not hold the same shard.*call shoal_data_parallel\.replicate"
    ):
        dist.all_reduce(x, group=halves[dist.get_rank() // 2])
