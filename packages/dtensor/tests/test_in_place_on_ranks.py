"""Writes in place, on gloo ranks.

Covers: dispatch/results.py, redistribute/execution/execute.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    TensorMeta,
    communication,
    distribute_tensor,
)
from shoal_dtensor.dispatch.results import check_outs
from shoal_dtensor.errors import CommunicationForbiddenError, InPlaceError
from shoal_dtensor.tensor.autograd import move_to
from shoal_mesh import CommDebugMode, DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
OPS = ("sum", "avg", "max", "min", "product", "norm2")

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: x.relu_(),
    "add a number": lambda x: x.add_(1),
    "subtract": lambda x: x.sub_(2.5),
    "clamp": lambda x: x.clamp_(-0.5, 0.5),
    "square": lambda x: x.pow_(2),
    "times itself": lambda x: x.mul_(x.detach().clone()),
    "fill": lambda x: x.fill_(3),
    "fill where": lambda x: x.masked_fill_(x > 0, 2.0),
    "set a row": lambda x: x.__setitem__(0, 1.0),
    "set a column": lambda x: x.__setitem__((slice(None), 1), 3.0),
    "set where": lambda x: x.__setitem__(x > 0, 7.0),
    "a row": lambda x: x[1].relu_(),
    "transposed": lambda x: x.t().sigmoid_(),
    "a chunk": lambda x: x.chunk(2)[0].exp_(),
    "cumulated": lambda x: x.cumsum_(0),
    "lower triangle": lambda x: x.tril_(),
    "flipped": lambda x: x.copy_(x.flip(0)),
    "matrix product": lambda x: x.addmm_(x.detach().clone(), x.detach().clone()),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.exp(x.clone(), out=x),
    "draw": lambda x: x.uniform_(),
}


def laid(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    """A DTensor of some values, partial ones among the placements."""
    spread = distribute_tensor(whole, mesh, [R] * mesh.ndim)
    return move_to(DTensor, spread, spread._spec.with_(placements=placements))


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(4)
def test_writes_to_partial_tensors(name: str) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[DeviceMesh, list[Placement]]] = [(line, [Partial(op)]) for op in OPS]
    layouts += [
        (square, [Partial(), S0]),
        (square, [Shard(1), Partial("max")]),
        (square, [Partial(), Partial()]),
    ]
    layouts.append((line, [S0]))
    for mesh, placements in layouts:
        torch.manual_seed(1)
        one = torch.randn(5, 5, dtype=torch.float64)
        one = one.abs() if Partial("norm2") in placements else one
        many = laid(one, mesh, placements)
        before = many.full_tensor()
        torch.manual_seed(2)
        PROGRAMS[name](one)
        torch.manual_seed(2)
        PROGRAMS[name](many)
        assert many.placements == tuple(placements)
        torch.testing.assert_close(
            many.full_tensor(), one, msg=f"{placements} {before}: {many.full_tensor()}, {one}"
        )


@on_ranks(4)
def test_such_a_write_communicates_once_and_obeys_the_policy() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = laid(torch.randn(5, 5), mesh, [Partial()])
    with CommDebugMode() as counted:
        x.relu_()
    assert counted.get_total_counts() == 1
    with (
        pytest.raises(CommunicationForbiddenError, match="needs implicit communication"),
        communication("forbid"),
    ):
        x.relu_()


@on_ranks(4)
def test_gradients_pass_such_a_write() -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, many = (
        whole.clone().requires_grad_(),
        distribute_tensor(whole, mesh, [S0]).requires_grad_(),
    )
    x: Any
    for x in (one, many):
        y = x.sum(0)
        y.relu_()
        (y * y).sum().backward()
    grad: Any = many.grad
    torch.testing.assert_close(grad.full_tensor(), one.grad)


# --- views that had to be copied follow their base ------------------------------------------------

FOLLOWING: dict[str, Callable[[Any], Any]] = {
    "flat": lambda x: x.view(-1),
    "part of the flat": lambda x: x.view(-1)[5:20],
    "regrouped": lambda x: x.view(4, 9)[1],
    "split of the flat": lambda x: x.view(-1).split([10, 26])[1],
    "windows": lambda x: x.unfold(0, 3, 1),
    "detached": lambda x: x.view(-1).detach(),
    "strided": lambda x: x.as_strided((4,), (7,)),
    "diagonal": lambda x: x.diagonal(1),
    "row": lambda x: x[4],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x.add_(1),
    "a part": lambda x: x[1:3].mul_(2),
    "listed": lambda x: torch._foreach_mul_([x], 3.0),
    "detached": lambda x: x.detach().zero_(),
    "twice": lambda x: (x.mul_(2), x.view(-1).sum(), x.sub_(1)),
}


@pytest.mark.parametrize("name", FOLLOWING)
@on_ranks(4)
def test_views_follow_writes_to_their_base(name: str) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[DeviceMesh, list[Placement]]] = [
        (line, [S0]),
        (line, [S1]),
        (line, [Shard(0, sizes=(1, 5, 0, 0))]),
        (square, [S0, S1]),
        (square, [S1, R]),
    ]
    for mesh, placements in layouts:
        for write in WRITES.values():
            one = torch.arange(36.0, dtype=torch.float64).sin().reshape(6, 6)
            many = distribute_tensor(one.clone(), mesh, placements, src_data_rank=None)
            seen: list[Any] = []
            for x in (one, many):
                view = FOLLOWING[name](x)
                write(x)
                seen += [view, view + 0, view.sum()]
            for expected, got in zip(seen[:3], seen[3:], strict=True):
                torch.testing.assert_close(got.full_tensor(), expected)


@on_ranks(4)
def test_a_copied_view_of_a_tensor_that_has_changed_shape_is_refused() -> None:
    x = distribute_tensor(torch.ones(6, 6), init_device_mesh("cpu", (4,)), [S1])
    view = x.view(4, 9)
    with torch.no_grad():  # else the change is refused
        x.unsqueeze_(0)
    x.add_(1)
    with pytest.raises(InPlaceError, match="make the view again"):
        view.sum()


# --- the same memory in several places of one call ------------------------------------------------

LISTS: dict[str, Callable[[Any], Any]] = {
    "twice": lambda x: torch._foreach_add_([x, x], 1.0),
    "twice, scalars": lambda x: torch._foreach_mul_([x, x], [2.0, 3.0]),
    "both lists": lambda x: torch._foreach_mul_([x, x.clone()], [x.clone(), x]),
    "itself": lambda x: torch._foreach_add_([x, x], [x, x]),
    "overlapping views": lambda x: torch._foreach_mul_([x[:4], x[2:]], 2.0),
    "view and base": lambda x: torch._foreach_mul_([x[1], x], 2.0),
    "reads what was written": lambda x: torch._foreach_add_([x, x[0]], [x.clone(), x[1]]),
    "parts": lambda x: torch._foreach_copy_([x[:2], x[2:4]], [x[3:5], x[4:6]]),
    "lerp": lambda x: torch._foreach_lerp_([x, x], [x * 2, x * 3], 0.5),
}


@pytest.mark.parametrize("name", LISTS)
@on_ranks(4)
def test_lists_that_hold_one_tensor_twice(name: str) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[DeviceMesh, list[Placement]]] = [
        (line, [p]) for p in (S0, S1, Partial(), Partial("max"), R)
    ]
    layouts += [
        (line, [Shard(0, sizes=(1, 4, 0, 1))]),
        (square, [Partial(), S0]),
        (square, [S0, S1]),
    ]
    for mesh, placements in layouts:
        one = torch.arange(36.0, dtype=torch.float64).sin().reshape(6, 6)
        many = laid(one.clone(), mesh, placements)
        for x in (one, many):
            LISTS[name](x)
        torch.testing.assert_close(many.full_tensor(), one, msg=f"{placements}")


@on_ranks(4)
def test_assignments_of_elements_to_themselves() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for placements in ([R], [S0], [S1]):
        one = torch.arange(36.0).reshape(6, 6)
        many = distribute_tensor(one.clone(), mesh, placements, src_data_rank=None)
        x: Any
        for x in (one, many):
            x[0, 2:5] += 1
            x[None, -2, 5:] *= 2
            x[1:4, 3] -= 5
        assert torch.equal(many.full_tensor(), one)


# --- what torch refuses is refused, on every rank -------------------------------------------------

REFUSED: dict[str, Callable[[Any], Any]] = {
    "expanded": lambda x: x[0].expand(3, 6).add_(1),
    "expanded from 1": lambda x: x[:1].expand(4, 6).mul_(2),
    "expanded, copied to": lambda x: x.unsqueeze(0).expand(2, 6, 6).copy_(x),
    "expanded in a list": lambda x: torch._foreach_add_([x[0].expand(3, 6)], 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(4)
def test_writes_to_expanded_tensors_are_refused(name: str) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    ragged: list[Placement] = [Shard(0, sizes=(3, 3)), Shard(1, sizes=(0, 6))]
    for mesh, placements in ((line, [S0]), (line, [S1]), (line, [R]), (square, ragged)):
        one = torch.ones(6, 6)
        many = distribute_tensor(one, mesh, placements, src_data_rank=None)
        for x in (one, many):
            with pytest.raises(RuntimeError, match=r"writes to|written-to tensor"):
                REFUSED[name](x)
        assert torch.equal(many.full_tensor(), torch.ones(6, 6))


@on_ranks(4)
def test_overlaps_do_not_stop_some_ranks_only() -> None:
    """Torch refuses these; here the arguments are read first, whether they have to move or not."""
    mesh = init_device_mesh("cpu", (4,))
    for placements in ([Shard(1, sizes=(0, 0, 6, 0))], [S0]):
        one = torch.arange(36.0).reshape(6, 6)
        many = distribute_tensor(one.clone(), mesh, placements, src_data_rank=None)
        many[1:].add_(many[:-1])
        one[1:] += one[:-1].clone()
        assert torch.equal(many.full_tensor(), one)


@pytest.mark.parametrize("rows", [3, 4, 6])
@on_ranks(4)
def test_a_tensor_may_be_written_from_a_view_of_all_of_its_elements(rows: int) -> None:
    """Kernels compare strides, also of dims of one element, which a view of a shard may change.

    Some ranks raised an error while the others waited.
    """
    mesh = init_device_mesh("cpu", (4,))
    for write in WRITES_FROM_A_VIEW:
        one = torch.arange(6.0 * rows).reshape(6, rows)
        many = distribute_tensor(one.clone(), mesh, [Shard(1)], src_data_rank=None)
        for x in (one, many):
            x.t_()
            write(x, x.view(rows, 6))
        assert torch.equal(many.full_tensor(), one)


WRITES_FROM_A_VIEW: list[Callable[[Any, Any], Any]] = [
    lambda x, view: torch.add(view, view, out=x),
    lambda x, view: torch.addcmul(view, view, view, out=x),
    lambda x, view: x.add_(view),
    lambda x, view: x.addcmul_(view, view),
]


@on_ranks(4)
def test_out_of_uneven_shards_may_overlap_what_is_read() -> None:
    """Ranks without a row returned, and the others raised an error."""
    mesh = init_device_mesh("cpu", (4,))
    one = torch.arange(36.0).reshape(6, 6)
    rows = Shard(0, sizes=(1, 5, 0, 0))
    many = distribute_tensor(one.clone(), mesh, [rows], src_data_rank=None)
    torch.add(many[:, :-1], 1, out=many[:, 1:])
    expected = torch.cat([one[:, :1], one[:, :-1] + 1], dim=1)
    assert torch.equal(many.full_tensor(), expected)


def test_out_of_another_shape_is_refused() -> None:
    mesh = abstract_mesh((4,), rank=0)
    with pytest.raises(InPlaceError, match="cannot be resized"):
        check_outs(
            torch.ops.aten.add.out,
            [Spec(mesh, (S0,), (0,))],
            [TensorMeta((6, 6), (6, 1), torch.float32)],
        )


# --- what autograd has saved ----------------------------------------------------------------------


def listed_views(y: Any) -> None:
    torch._foreach_mul_([y[0], y[1]], 2.0)


def descended(y: Any) -> None:
    options: Any = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    torch._fused_sgd_(
        [y], [y.clone()], [], **options, nesterov=False, maximize=False, is_first_step=False
    )


SPOILING: dict[str, Callable[[Any], Any]] = {
    "in place": lambda y: y.add_(1),
    "a view": lambda y: y[1:].add_(1),
    "detached": lambda y: y.detach().add_(1),
    "assigned": lambda y: y.__setitem__(0, 1.0),
    "out": lambda y: torch.add(y, 1, out=y),
    "listed": lambda y: torch._foreach_add_([y], 1.0),
    "listed views": listed_views,
    "an optimizer's": descended,
}


@pytest.mark.parametrize("name", SPOILING)
@on_ranks(4)
def test_a_write_to_what_was_saved_for_backward_is_found(name: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for placement in (R, S0, S1):
        x: Any = distribute_tensor(torch.ones(6, 6), mesh, [placement]).requires_grad_()
        y = x * 1
        z = y * y
        with torch.no_grad():
            SPOILING[name](y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@on_ranks(4)
def test_writes_to_leaves_are_refused() -> None:
    x = distribute_tensor(torch.ones(6, 6), init_device_mesh("cpu", (4,)), [S0]).requires_grad_()
    for write in (lambda: x.add_(1), lambda: x[0].add_(1), lambda: x.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            write()


@on_ranks(2)
def test_an_element_of_a_view_is_written_after_another_view_has_got_a_gradient() -> None:
    """`view[0] *= leaf`: a slice that is all of the view is the view.

    torch has not asked for its history.
    """
    mesh, values = init_device_mesh("cpu", (2,)), torch.arange(8.0).view(4, 2)
    results = []
    both: tuple[Any, ...] = values.clone(), distribute_tensor(values, mesh, [Shard(0)]).clone()
    for one in both:
        leaf: Any = torch.ones_like(one).requires_grad_()
        with torch.no_grad():  # where torch gives views no history
            flat = leaf.view(-1)
            flat[:1] += 1
        view: Any = one.view(1, 4, 2)
        view[0] *= leaf * 3
        one.sum().backward()
        results.append((one, leaf.grad))
    for plain, many in zip(*results, strict=True):
        assert torch.equal(many.full_tensor(), plain)
