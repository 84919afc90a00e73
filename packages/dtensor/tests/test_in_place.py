"""Operators that write to a tensor, or change its shape, in place.

Covers: dispatch/results.py, dispatch/dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal_dtensor import Placement, Replicate, Shard, distribute_tensor
from shoal_dtensor.errors import InPlaceError
from shoal_dtensor.internal import local_shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

USES: dict[str, Callable[[Any], Any]] = {
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ dim": lambda x: x.squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
    "t_": lambda x: x[0].t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "vector times matrix": lambda x: torch.matmul(x[0, 0], x[0].t()),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
@on_ranks(4)
def test_views_in_place(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for name, use in USES.items():
        values = torch.arange(30.0).view(1, 5, 6)
        x = distribute_tensor(values, mesh, [placement], src_data_rank=None)
        got, expected = use(x), use(values)
        assert got.shape == expected.shape, name
        assert got._spec.shape == expected.shape, name
        torch.testing.assert_close(got.full_tensor(), expected)
        torch.testing.assert_close((got + 1).full_tensor(), expected + 1)


@pytest.mark.parametrize("base_is_written", [False, True])
def test_a_view_that_is_transposed_in_place_takes_no_write_that_needs_a_gradient(
    base_is_written: bool,
) -> None:
    """Autograd repeats the views that led to it without the transpose.

    So the gradient would be silently wrong.
    """
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        leaf: Any = distribute_tensor(
            torch.randn(4, 4), mesh, [Shard(0)], src_data_rank=None
        ).requires_grad_()
        base = leaf * 1
        view = base.view(4, 4).t_()
        assert (view * 2).shape == (4, 4)
        with pytest.raises(
            RuntimeError, match=r"replace the inplace operation by an out-of-place one"
        ):
            (base if base_is_written else view).mul_(leaf.detach())
            view.sum().backward()
        with torch.no_grad():
            base.detach().view(16).unsqueeze_(0).zero_()
        own = (leaf * 1).t_()
        own.mul_(leaf.detach())
        own.sum().backward()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_tensor_with_views_is_not_transposed_in_place(gradients: bool) -> None:
    """The views would be repeated on the new shape, and silently give other elements' gradients."""
    with fake_world(2):
        leaf: Any = distribute_tensor(
            torch.randn(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        base = leaf.requires_grad_(gradients) * 1
        view = base[1:3]
        with pytest.raises(
            InPlaceError, match=r"aten.t_.default changes the shape .* as in x = x\.t\("
        ):
            base.t_()
        with torch.no_grad():
            assert (leaf.detach() * 1).t_().shape == (4, 4)
        del view
        base.t_()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_windows_that_overlap_take_no_write(placement: Placement) -> None:
    """Of elements that are one place in memory a kernel's order would say which write stays."""
    with fake_world(2):
        x: Any = distribute_tensor(
            torch.randn(4, 6), init_device_mesh("cpu", (2,)), [placement], src_data_rank=None
        )
        with pytest.raises(
            InPlaceError, match="one place in memory; write to the tensor before expand or unfold"
        ):
            x.unfold(1, 4, 1).mul_(2)
        x.unfold(1, 2, 2).mul_(2)
        x.t()[1:4:2].mul_(2)


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "a number": lambda x, y: x.add_(1),
    "a tensor": lambda x, y: x.mul_(y),
    "another layout": lambda x, y: x.copy_(y.redistribute(placements=[Replicate()])),
    "a fill": lambda x, y: torch.nn.init.zeros_(x),
    "an index": lambda x, y: x.__setitem__(0, 1.0),
    "out": lambda x, y: torch.add(y, y, out=x),
    "a list": lambda x, y: torch._foreach_mul_([x], 2.0),
}


@pytest.mark.parametrize("trained", [True, False], ids=["a parameter", "data"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_counted_for_the_shard_too(name: str, trained: bool) -> None:
    """A module that computes on the shard got gradients of the new values, without an error."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        y = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
        values: Any = torch.nn.Parameter(y.clone(), requires_grad=trained)
        shard = local_shard(values)
        product = torch.ones(2, requires_grad=True).matmul(shard).sum()
        with torch.no_grad():
            WRITES[name](values, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
