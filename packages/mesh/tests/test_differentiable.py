"""<A g, x> == <g, A' x> over the sum of all ranks, in float64; traced by torch.compile.

Covers: differentiable.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shoal_mesh import (
    CollectiveError,
    Comm,
    DeviceMesh,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_blocks,
    broadcast,
    differentiable,
    differentiable as d,
    gather,
    init_device_mesh,
    permute,
    reduce_scatter,
)
from shoal_mesh.internal import start_packed
from shoal_mesh.testing import fake_world, on_ranks

SIZES = (3, 0, 2, 1)
COUNTS = [[(i + 2 * j) % 3 for j in range(4)] for i in range(4)]


def exchange_by_counts(x: Tensor, comm: Comm) -> Tensor:
    received = [row[comm.rank] for row in COUNTS]
    return d.all_to_all_v(x, comm, COUNTS[comm.rank], received)


# the shapes of the input on ranks 0 to 3, and the map
MAPS: dict[str, tuple[list[tuple[int, ...]], Callable[[Tensor, Comm], Tensor]]] = {
    "all_reduce": ([(3, 2)] * 4, lambda x, c: d.all_reduce(x, c)),
    "all_reduce avg": ([(3, 2)] * 4, lambda x, c: d.all_reduce(x, c, "avg")),
    "all_gather": ([(2, 3)] * 4, lambda x, c: d.all_gather(x, c, 1)),
    "all_gather_v": ([(2, size) for size in SIZES], lambda x, c: d.all_gather_v(x, c, SIZES, 1)),
    "reduce_scatter": ([(2, 4)] * 4, lambda x, c: d.reduce_scatter(x, c, 1)),
    "reduce_scatter avg": ([(4, 2)] * 4, lambda x, c: d.reduce_scatter(x, c, 0, "avg")),
    "reduce_scatter_v": ([(6, 2)] * 4, lambda x, c: d.reduce_scatter_v(x, c, SIZES)),
    "reduce_scatter_v avg": (
        [(6, 2)] * 4,
        lambda x, c: d.reduce_scatter_v(x, c, SIZES, 0, "avg"),
    ),
    "all_to_all": ([(4, 3)] * 4, lambda x, c: d.all_to_all(x, c, 0, 1)),
    "all_to_all_v": ([(sum(counts),) for counts in COUNTS], exchange_by_counts),
    "broadcast": ([(3,)] * 4, lambda x, c: d.broadcast(x, c, 2)),
    "scatter": ([(4, 2)] * 4, lambda x, c: d.scatter(x, c, 1)),
    "gather": ([(2, 2)] * 4, lambda x, c: d.gather(x, c, 3)),
    "permute": ([(2, 2)] * 4, lambda x, c: d.permute(x, c, [2, 0, 3, 1])),
}


@pytest.mark.parametrize("name", list(MAPS))
@on_ranks(4)
def test_the_gradient_is_the_adjoint(name: str) -> None:
    shapes, run = MAPS[name]
    for comm in (
        init_device_mesh("cpu", (4,)).comm(0),
        DeviceMesh("cpu", [[3, 1], [0, 2]]).comm((1, 0)),
    ):
        torch.manual_seed(comm.rank)
        x = torch.randn(shapes[comm.rank], dtype=torch.float64, requires_grad=True)
        v = torch.randn(shapes[comm.rank], dtype=torch.float64)
        out = run(x, comm)
        g = torch.randn(out.shape, dtype=torch.float64, requires_grad=True)
        (back,) = torch.autograd.grad(out, x, g, create_graph=True)
        sides = torch.stack([(g * run(v, comm)).sum(), (back * v).sum()])
        left, right = all_reduce(sides.detach(), comm).tolist()
        assert left == pytest.approx(right, abs=1e-12)
        # the gradient is linear too: its gradient is the map
        (again,) = torch.autograd.grad(back, g, v)
        torch.testing.assert_close(again, run(v, comm))


@on_ranks(4)
def test_the_replicated_pair() -> None:
    comm = init_device_mesh("cpu", (4,)).comm(0)
    x = torch.full((2,), float(comm.rank), requires_grad=True)
    out = d.all_reduce_replicated(x, comm)
    assert out.tolist() == [6, 6]
    out.sum().backward()  # type: ignore[no-untyped-call]  # torch has no types here
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]
    y = torch.ones(2, requires_grad=True)
    total = (d.sum_gradients(y, comm) * comm.rank).sum()
    total.backward()  # type: ignore[no-untyped-call]  # torch has no types here
    assert y.grad is not None
    assert y.grad.tolist() == [6, 6]


def test_what_has_no_adjoint_is_refused() -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        for call in (d.all_reduce, d.reduce_scatter):
            with pytest.raises(CollectiveError, match="not linear"):
                call(torch.ones(2), comm, op="max")
        with pytest.raises(CollectiveError, match="one block for each"):
            d.scatter(torch.ones(3), comm)


@on_ranks(2, timeout=200)
def test_gradients_trace() -> None:
    comm = init_device_mesh("cpu", (2,)).comm(0)

    def program(x: Tensor) -> Tensor:
        return (differentiable.all_gather(x * x, comm) * (comm.rank + 1)).sum()

    x = torch.ones(4, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    compiled(x).backward()  # type: ignore[no-untyped-call]  # torch has no types here
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 4


PLAIN: dict[str, Callable[[Tensor, Comm], Any]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": lambda x, comm: all_to_all(x, comm, 0, 0),
    "broadcast": broadcast,
    "permute": lambda x, comm: permute(x, comm, [1, 0]),
    "gather": gather,
    "packed": lambda x, comm: start_packed(
        "all_reduce", [torch.ones(4), x], comm, (), "sum"
    ).wait(),
    "blocks": lambda x, comm: all_to_all_blocks([[x], [x]], comm, [[x.clone()], [x.clone()]]),
    "differentiable": d.all_reduce,
}


def with_tangent(f: Callable[[Tensor], Any]) -> Any:
    dual = forward_ad.make_dual(  # type: ignore[no-untyped-call]  # torch has no types here
        torch.ones(4), torch.ones(4)
    )
    return f(dual)


def grad_of_sum(f: Callable[[Tensor], Any]) -> Any:
    return torch.func.grad(lambda x: f(x * 1).sum())(torch.ones(4))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Any]], object]] = {
    "grad": grad_of_sum,
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 4)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(4),), (torch.ones(4),)),
    "tangent": with_tangent,
}


# of torch.jit, which forward-mode AD imports
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PLAIN)
@on_ranks(2)
def test_collectives_in_transforms_are_refused(name: str, transform: str) -> None:
    """A tangent was lost, or was the rank's own where the value was the sum."""
    comm = init_device_mesh("cpu", (2,)).comm(0)
    context = forward_ad.dual_level() if transform == "tangent" else nullcontext()
    with context, pytest.raises(CollectiveError, match=r"transforms of torch\.func"):
        TRANSFORMS[transform](lambda x: PLAIN[name](x, comm))
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(CollectiveError, match=r"transforms of torch\.func"):
        rows = torch.ones(2, 4)
        torch.autograd.grad(d.all_reduce(x, comm), x, rows, is_grads_batched=True)
    # the group is usable, also for other tensors inside of a level
    with forward_ad.dual_level():
        assert all_reduce(torch.ones(1), comm).item() == 2
