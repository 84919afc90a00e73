"""Covers: scopes.py: nothing communicates on its own where that is forbidden."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from operator_calls import recorded
from shoal_dtensor import (
    CommunicationForbiddenError,
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShoalTensorError,
    clear_cache,
    communication,
    distribute_tensor,
)
from shoal_dtensor.internal import pytree
from shoal_dtensor.rng.state import count_as_checked
from shoal_dtensor.rules import Row, Rule, S, all_rules
from shoal_dtensor.rules.language.rule import overlay
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import fake_world, observed


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    clear_cache()
    with fake_world(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    clear_cache()


def _image(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.ones(2, 3, 8, 8), mesh, [Shard(2)], src_data_rank=None)


def convolve_image(x: Any, p: Any) -> object:
    return F.conv2d(_image(x.device_mesh), _image(x.device_mesh)[:, :, :3, :3], padding=1)


# x: 8 x 8, sharded along dim 0; p: 8 x 8, a partial sum.
COMMUNICATING: dict[str, Callable[[Any, Any], object]] = {
    "sort": lambda x, p: x.sort(0),
    "cumsum": lambda x, p: x.cumsum(0),
    "nonzero": lambda x, p: x.nonzero(),
    "unique": lambda x, p: x.unique(),
    "boolean mask": lambda x, p: x[x > 0],
    "argmax": lambda x, p: x.argmax(0),
    "topk": lambda x, p: x.topk(2, 0),
    "roll": lambda x, p: x.roll(1, 0),
    "flip": lambda x, p: x.flip(0),
    "median": lambda x, p: x.median(0),
    "conv2d": convolve_image,
    "max_pool2d": lambda x, p: F.max_pool2d(_image(x.device_mesh), 3, 1),
    "softmax": lambda x, p: x.softmax(0),
    "layer_norm": lambda x, p: F.layer_norm(x.t(), (8,)),
    "repeat": lambda x, p: x.repeat(2, 1),
    "relu of a partial sum": lambda x, p: p.relu(),
    "tolist": lambda x, p: x.tolist(),
    "item": lambda x, p: x[0, 0].item(),
    "item of a partial sum": lambda x, p: p.sum().item(),
    "bool": lambda x, p: bool(p.sum()),
    "format": lambda x, p: f"{p.sum():.1f}",
    "numpy": lambda x, p: x.numpy(force=True),
    "torch.equal": lambda x, p: torch.equal(x, x.clone()),
    "allclose": lambda x, p: torch.allclose(x, x.clone()),
    "gradient of a leaf": lambda x, p: _backward(x),
    "gradient of from_local": lambda x, p: _backward_to_local(x),
    "norm": lambda x, p: torch.linalg.vector_norm(p),
    "write of a shard": lambda x, p: x.copy_(p),
    "first draw": lambda x, p: F.dropout(x),
}


def redistribute_backward(x: Any, p: Any) -> object:
    return (
        x.detach().requires_grad_().redistribute(placements=[Replicate()]).mul(2).sum().backward()
    )


ALLOWED: dict[str, Callable[[Any, Any], object]] = {
    "redistribute": lambda x, p: x.redistribute(placements=[Replicate()]),
    "full_tensor": lambda x, p: p.full_tensor(),
    "redistribute, backward": redistribute_backward,
    "collective of the mesh layer": lambda x, p: all_reduce(x.to_local(), (x.device_mesh, 0)),
    "elementwise": lambda x, p: (x * 2 + x).relu_().sum(1),
    "repr": lambda x, p: repr(p),
}


def _backward(x: DTensor) -> None:
    weight = distribute_tensor(
        torch.ones(8), x.device_mesh, [Replicate()], src_data_rank=None
    ).requires_grad_()
    (x * weight).sum().backward()  # type: ignore[no-untyped-call]  # torch gives it no types


def _backward_to_local(x: DTensor) -> None:
    local = torch.ones(8, requires_grad=True)
    other = DTensor.from_local(local, x.device_mesh, [Replicate()])
    (other * x).sum().backward()  # type: ignore[no-untyped-call]  # torch


def _operands(mesh: DeviceMesh) -> tuple[DTensor, DTensor]:
    values = torch.arange(64.0).view(8, 8)
    return (
        distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None),
        DTensor.from_local(values, mesh, [Partial()]),
    )


@pytest.mark.parametrize("name", COMMUNICATING)
def test_what_communicates_on_its_own_is_forbidden_before_it_does(
    mesh: DeviceMesh, name: str
) -> None:
    x, p = _operands(mesh)
    for _ in range(2):  # decided, then remembered
        with (
            communication("forbid"),
            observed() as seen,
            pytest.raises(CommunicationForbiddenError, match="tp"),
        ):
            COMMUNICATING[name](x, p)
        assert seen == []


@pytest.mark.parametrize("name", COMMUNICATING)
def test_a_warning_names_what_communicates(mesh: DeviceMesh, name: str) -> None:
    x, p = _operands(mesh)
    with communication("warn"), pytest.warns(UserWarning, match="needs implicit communication"):
        COMMUNICATING[name](x, p)


@pytest.mark.parametrize("name", ALLOWED)
def test_explicit_calls_always_may(mesh: DeviceMesh, name: str) -> None:
    with observed() as events:
        ALLOWED[name](*_operands(mesh))
    with communication("forbid"), observed() as events_of_policy:
        ALLOWED[name](*_operands(mesh))
    assert [event.op for event in events_of_policy] == [event.op for event in events]


def test_a_collective_that_no_rule_declares_is_refused(mesh: DeviceMesh) -> None:
    x, _ = _operands(mesh)
    undeclared = Rule(
        lambda call: [Row((S(0),), (S(0),))],
        local=lambda local_call: lambda t: all_reduce(t, (mesh, 0), "sum"),
    )
    with overlay({torch.ops.aten.neg.default: undeclared}):
        with (
            communication("forbid"),
            pytest.raises(CommunicationForbiddenError, match="all_reduce of 64 bytes along tp"),
        ):
            x.neg()
        with (
            communication("warn"),
            pytest.warns(UserWarning, match="all_reduce of 64 bytes along tp"),
        ):
            x.neg()


def _forbidden_anywhere(mesh: DeviceMesh, calls: list[Any]) -> tuple[set[str], set[str], list[str]]:
    """Run calls freely, then where communication is forbidden.

    Return which need it, which are refused, which leak.
    """
    # the first draw of a mesh compares generators, the next does not
    count_as_checked(mesh)
    needing, refused, leaks = set(), set(), []

    def placed(value: Any, dim: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placement = Shard(dim % value.ndim) if value.ndim else Replicate()
        return distribute_tensor(value, mesh, [placement], src_data_rank=None)

    for call in calls:
        for dim in (0, -1):
            where = f"{call} along {dim}"
            for policy in ("allow", "forbid"):
                args, kwargs = pytree.tree_map(
                    lambda value, dim=dim: placed(value, dim), (call.args, dict(call.kwargs))
                )
                with communication(policy), observed() as seen:
                    try:
                        call.op(*args, **kwargs)
                    except CommunicationForbiddenError:
                        refused.add(where)
                    except (
                        ShoalTensorError,
                        RuntimeError,
                        ValueError,
                        IndexError,
                        NotImplementedError,
                    ):
                        pass
                if seen and policy == "allow":
                    needing.add(where)
                elif seen:
                    leaks.append(f"{where}: {[event.op for event in seen]}")
            if any(
                isinstance(value, torch.Tensor) and not value.numel()
                for value in pytree.tree_leaves(call.args)
            ):
                # a plan that would send something is refused, though here nothing travels
                needing.discard(where)
                refused.discard(where)
    return needing, refused, leaks


@pytest.mark.parametrize(
    "share", [pytest.param(8, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_no_rule_communicates_where_it_is_forbidden(mesh: DeviceMesh, share: int) -> None:
    ops = sorted(all_rules.TABLE, key=str)
    chosen = ops if share == 1 else random.Random(share).sample(ops, len(ops) // share)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = [
            call
            for found in recorded(frozenset(chosen), samples=1, per_op=2).values()
            for call in found
        ]
        needing, refused, leaks = _forbidden_anywhere(mesh, calls)
    assert leaks == []
    assert needing <= refused
    # Windows that may read of a neighbour's shard are refused also where its border happens to lie
    # between two windows.
    spared = {"avg_pool2d", "avg_pool2d_backward"}
    assert {where.split(".")[1] for where in refused - needing} <= spared
