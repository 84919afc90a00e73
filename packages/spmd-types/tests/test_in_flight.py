"""Covers: in_flight.py, moves.py, dtypes.py: collectives that overlap with the program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal_spmd_types as spmd
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_spmd_types import I, P, R, S, V
from shoal_spmd_types.moves.in_flight import InFlight

Move = Callable[..., Tensor]
# each with the shape of its operand on three ranks
MOVES: dict[str, tuple[Move, tuple[int, ...]]] = {
    "all_reduce to R": (partial(spmd.all_reduce, dst=R), (2, 3)),
    "all_reduce to I": (partial(spmd.all_reduce, dst=I), (2, 3)),
    "all_gather": (partial(spmd.all_gather, src=S(1), dst=R), (2, 3)),
    "all_gather, stacked": (partial(spmd.all_gather, dst=R), (2, 3)),
    "reduce_scatter": (partial(spmd.reduce_scatter, dst=S(1)), (2, 6)),
    "reduce_scatter, stacked": (spmd.reduce_scatter, (3, 2)),
    "reduce_scatter, uneven": (
        partial(spmd.reduce_scatter, dst=S(0), split_sizes=(2, 0, 1)),
        (3, 2),
    ),
    "all_to_all": (partial(spmd.all_to_all, src=S(0), dst=S(1)), (2, 6)),
    "all_to_all, rows": (
        partial(spmd.all_to_all, src=S(0), dst=S(0)),
        (6, 2),
    ),
    "redistribute": (partial(spmd.redistribute, src=S(0), dst=I), (2, 3)),
    "unshard": (partial(spmd.unshard, src=S(0), dst=R), (2, 3)),
}


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("of_gradient", [False, True])
def test_the_program_goes_on_while_ranks_are_missing(of_gradient: bool) -> None:
    axis = _mesh().comm(0)
    options: dict[str, Any] = {"backward_options": {"async_op": True}}
    if not of_gradient:
        options = {"async_op": True}

    def wait_for_the_other_rank() -> None:
        """Rank 1 joins a collective only after rank 0 has started it."""
        if dist.get_rank():
            dist.recv(torch.empty(1), 0)

    def go_on() -> None:
        if not dist.get_rank():
            dist.send(torch.ones(1), 1)

    x = torch.ones(3, requires_grad=True) * 2
    # the first collective sets up the memory that ranks share
    spmd.all_reduce(x.detach(), axis, dst=R)
    if not of_gradient:
        wait_for_the_other_rank()
        total = spmd.all_reduce(x, axis, dst=R, **options)
        go_on()
        assert total.shape == (3,)
        assert (total + 1).tolist() == [5.0] * 3
        return
    seen: list[type] = []

    def on_gradient(grad: Tensor) -> None:
        seen.append(type(grad))
        go_on()

    x.register_hook(on_gradient)  # type: ignore[no-untyped-call]  # of torch
    total = spmd.all_reduce(x, axis, dst=R, **options)
    waiting: Any = lambda _: wait_for_the_other_rank()  # noqa: E731  # a hook
    total.register_hook(waiting)  # type: ignore[no-untyped-call]  # of torch
    torch.autograd.backward((total * 3).sum())
    assert seen == [InFlight]


@on_ranks(3)
@pytest.mark.parametrize("name", MOVES)
def test_values_and_gradients_are_those_of_a_complete_collective(name: str) -> None:
    axis = _mesh().comm(0)
    run, shape = MOVES[name]
    torch.manual_seed(dist.get_rank())
    x = torch.randn(shape, dtype=torch.double)
    weights = None
    found = []
    variants: list[dict[str, Any]] = [{}, {"async_op": True}]
    variants.append({"backward_options": {"async_op": True}})
    for options in variants:
        leaf = x.clone().requires_grad_()
        out = run(leaf * 1, axis, **options)
        assert isinstance(out, InFlight) == ("async_op" in options)
        size = out.shape
        weights = torch.randn(size, dtype=torch.double) if weights is None else weights
        (grad,) = torch.autograd.grad((out * weights).square().sum(), leaf)
        found.append((size, out.detach().clone(), grad.clone()))
    for size, value, grad in found[1:]:
        assert size == found[0][0] == value.shape
        assert torch.equal(value, found[0][1])
        assert torch.equal(grad, found[0][2])


@on_ranks(2)
def test_dtypes_apply_when_the_result_arrives() -> None:
    axis = _mesh().comm(0)
    x = torch.full((2,), 1.5)
    options: dict[str, Any] = {"op_dtype": torch.float64, "out_dtype": torch.bfloat16}
    options["backward_options"] = {"op_dtype": torch.float32}
    total = spmd.all_reduce(x, axis, dst=R, async_op=True, **options)
    assert isinstance(total, InFlight)
    assert total.dtype is torch.bfloat16
    assert total.wait().dtype is torch.bfloat16
    assert total.tolist() == [3.0, 3.0]


@on_ranks(2)
def test_a_result_in_flight_is_used_like_a_tensor() -> None:
    axis = _mesh().comm(0)
    x = torch.arange(4.0).requires_grad_()

    def gathered() -> Tensor:
        return spmd.all_gather(x * 1, axis, src=S(0), dst=R, async_op=True)

    whole = gathered()
    assert "tensor([0., 1., 2., 3., 0., 1., 2., 3.]" in repr(whole)
    assert whole.detach().numpy().tolist() == [0.0, 1.0, 2.0, 3.0] * 2
    assert isinstance(whole, InFlight)
    assert whole.is_completed()
    assert whole.wait().data_ptr() == whole.data_ptr()
    assert type(copy.deepcopy(whole.detach())) is Tensor
    # a view, a write in place, and another collective
    view = gathered().view(2, 4)
    view.mul_(2)
    scattered = spmd.reduce_scatter(gathered(), axis, dst=S(0), async_op=True)
    torch.autograd.backward(view.sum() + scattered.sum())
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 4
    written = gathered().detach()
    written.add_(1)
    assert written.tolist() == [1.0, 2.0, 3.0, 4.0] * 2


@on_ranks(2)
def test_a_result_in_flight_has_its_type() -> None:
    mesh = _mesh()
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        x = spmd.assert_type(torch.ones(2, requires_grad=True), {"tp": P})
        total = spmd.all_reduce(x, "tp", dst=I, async_op=True)
        assert isinstance(total, InFlight)
        spmd.assert_type(total, {"tp": I})
        doubled = total * 2
        spmd.assert_type(doubled, {"tp": I})
        with pytest.raises(spmd.SpmdTypeError):
            spmd.all_reduce(total, "tp", dst=I)
        assert V not in spmd.get_local_type(doubled).values()
    assert doubled.tolist() == [4.0, 4.0]
