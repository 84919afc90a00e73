"""Collectives of fake tensors send nothing, recorders see collectives as operators.

Covers: _torch.py, `is_traced`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal_mesh import (
    CollectiveError,
    CommDebugMode,
    DeviceMesh,
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_blocks,
    broadcast,
    comm_over,
    init_device_mesh,
    permute,
    reduce_scatter,
    reduce_scatter_v,
)
from shoal_mesh._torch import on_plain_kernels, unseen
from shoal_mesh.internal import all_reduce_, start_packed
from shoal_mesh.testing import on_ranks

AXIS = (0, 1)


def received(pending: Any) -> list[Tensor]:
    copied: list[Tensor] = pending.then(lambda tensors: [t.clone() for t in tensors]).wait()
    return copied


def packed(op: Any, x: Tensor, sizes: Sequence[int] = ()) -> list[Tensor]:
    """What a packed collective of one row brings."""
    return received(start_packed(op, [x.view(-1)], comm_over(AXIS), sizes))


def sum_conjugates(x: Tensor) -> Any:
    return all_reduce(torch.view_as_complex(x.view(2, 2, 2)).conj(), comm_over(AXIS))


def blocks(x: Tensor) -> Tensor:
    out = torch.empty(4)
    all_to_all_blocks(
        [[x[:1, :2]], [x[1:, :2]]], comm_over(AXIS), [[out[:2].view(1, 2)], [out[2:].view(1, 2)]]
    )
    return out


def in_place(x: Tensor) -> Tensor:
    own = x.clone()
    all_reduce_(own, comm_over(AXIS))
    all_reduce_(own, comm_over(AXIS), async_op=True).wait()
    return own


# Of a tensor (2, 4), which is another one on each rank.
COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: all_reduce(x, comm_over(AXIS), "avg"),
    "all_reduce complex": sum_conjugates,
    "all_reduce_": in_place,
    "all_reduce_coalesced": lambda x: all_reduce_coalesced([x, x.double()], comm_over(AXIS)),
    "packed all_reduce": lambda x: packed("all_reduce", x),
    "all_gather": lambda x: all_gather(x, comm_over(AXIS), 1, async_op=True).wait(),
    "all_gather_v": lambda x: all_gather_v(x[: dist.get_rank() + 1], comm_over(AXIS), (1, 2)),
    "packed all_gather": lambda x: packed("all_gather", x, (8, 8)),
    "reduce_scatter": lambda x: reduce_scatter(x, comm_over(AXIS)),
    "reduce_scatter_v": lambda x: reduce_scatter_v(x, comm_over(AXIS), (3, 1), 1),
    "packed reduce_scatter": lambda x: packed("reduce_scatter", x, (3, 5)),
    "all_to_all": lambda x: all_to_all(x, comm_over(AXIS), 0, 1),
    "all_to_all_blocks": blocks,
    "broadcast": lambda x: broadcast(x, comm_over(AXIS), 1),
    "permute": lambda x: permute(x, comm_over((1, 0)), (1, 0)),
}


def leaves(result: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(result)


@on_ranks(2)
def test_fake_tensors_reach_no_wire() -> None:
    for name, collective in COLLECTIVES.items():
        expected = leaves(collective(torch.ones(2, 4)))
        with FakeTensorMode():
            found = leaves(collective(torch.ones(2, 4)))
        assert all(isinstance(tensor, FakeTensor) for tensor in found), name
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected], name
    with FakeTensorMode():
        fake = torch.ones(2, 4)
    for name, collective in COLLECTIVES.items():  # they stay fake outside
        if name != "all_to_all_blocks":  # whose result is made there
            assert all(isinstance(tensor, FakeTensor) for tensor in leaves(collective(fake))), name
    assert all_reduce(torch.ones(3), comm_over(AXIS)).tolist() == [2, 2, 2]


@on_ranks(2)
def test_meshes_are_made_and_collectives_counted_among_fake_tensors() -> None:
    with FakeTensorMode(), CommDebugMode() as inside:
        all_reduce(torch.ones(2), (init_device_mesh("cpu", (2,)), 0))
    with CommDebugMode() as outside, FakeTensorMode():
        all_reduce(torch.ones(2) * 2, comm_over(AXIS))
    assert inside.get_total_counts() == outside.get_total_counts() == 1


@on_ranks(2)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic", "pre_dispatch"])
def test_make_fx_records_collectives(mode: str) -> None:
    example, other = (torch.arange(8.0).view(2, 4) * (dist.get_rank() + k) for k in (1, 3))
    how = {"pre_dispatch": True} if mode == "pre_dispatch" else {"tracing_mode": mode}
    for name, collective in COLLECTIVES.items():
        graph = make_fx(collective, **how)(example)
        for found, expected in zip(leaves(graph(other)), leaves(collective(other)), strict=True):
            assert torch.equal(found, expected), name


@on_ranks(2)
def test_a_recorded_collective_loses_no_tangent() -> None:
    x = torch.ones(2)
    with pytest.raises(CollectiveError, match="do not support forward-mode derivatives"):
        torch.func.linearize(lambda x: all_reduce(x, comm_over(AXIS)), x)
    assert all_reduce(x, comm_over(AXIS)).tolist() == [2, 2]


def test_what_starts_collectives_of_its_own_does_not_keep_the_interpreters_lock() -> None:
    """Python's dispatcher keeps it in all that it calls.

    A thread of gloo may need it to let the next one start.
    """
    make_library: Any = torch.library.Library
    library = make_library("shoal_test_lock", "DEF")
    library.define("held(Tensor x) -> Tensor")
    library.impl("held", torch.clone, "CPU")
    x, operator = torch.ones(2), torch.ops.shoal_test_lock.held.default
    dispatched: list[Tensor] = []

    @operator.py_impl(torch._C.DispatchKey.CPU)
    def seen(x: Tensor) -> Tensor:
        dispatched.append(x)
        return x.clone()

    with enable_python_dispatcher():
        operator(x)
        assert len(dispatched) == 1
        with unseen():
            operator(x)
        on_plain_kernels(operator, x)
    assert len(dispatched) == 1
    del library


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Bytes of the storages of what operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [
            each.untyped_storage().nbytes() for each in tree_leaves(out) if isinstance(each, Tensor)
        ]
        return out


@on_ranks(2)
def test_a_mode_does_not_see_the_memory_that_a_group_gets_at_its_first_collective() -> None:
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    with Sizes() as sizes:
        total = all_reduce(torch.ones(4), mesh.comm(0))
    assert total.tolist() == [2.0] * 4 and max(sizes.seen) <= 64, sizes.seen
