"""DTensors among fake tensors, and while make_fx records operators.

Covers: is_unrecorded in _torch/compiling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    local_map,
    rand,
)
from shoal_dtensor.errors import NoRuleError
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import on_ranks


def of_rows(x: Tensor) -> Any:
    """A DTensor of 5 rows, 3 and 2 on two ranks."""
    return DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(0)], shape=(5, 4))


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [*result]


def gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = of_rows(x).redistribute(placements=[Replicate()]).to_local()
    return torch.autograd.grad((y * y * (dist.get_rank() + 1)).sum(), x)[0]


def of_partial(x: Tensor) -> tuple[Tensor, Tensor]:
    part = DTensor.from_local(x[:2], init_device_mesh("cpu", (2,)), [Partial()])
    return part.redistribute(placements=[Shard(0)]).to_local(), part.full_tensor()


def distributed(x: Tensor) -> Tensor:
    return distribute_tensor(
        x[:2].contiguous(), init_device_mesh("cpu", (2,)), [Shard(1)]
    ).to_local()


def of_both(program: Callable[[Any], Any], outer: Any, x: Tensor) -> Any:
    return program(outer) + x


def operators(x: Tensor) -> Any:
    return (of_rows(x) * 2).softmax(0).to_local(), of_rows(x).sum(0).full_tensor()


def mapped(x: Tensor) -> Any:
    doubled: Any = local_map(lambda part: part * 2, out_placements=[Shard(0)])(of_rows(x))
    return doubled.full_tensor()


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "gather": lambda x: of_rows(x).full_tensor(),
    "exchange": lambda x: of_rows(x).redistribute(placements=[Shard(1)]).to_local(),
    "partial": of_partial,
    "distribute_tensor": distributed,
    "gradient": gradient,
    "operators": operators,
    "local_map": mapped,
}


@on_ranks(2)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_dtensors_of_its_inputs(mode: Any) -> None:
    rows = 3 - dist.get_rank()
    example, other = (
        torch.arange(4.0 * rows).view(rows, 4) * (dist.get_rank() + k) for k in (1, 3)
    )
    for name, program in PROGRAMS.items():
        found, expected = make_fx(program, tracing_mode=mode)(example)(other), program(other)
        for one, other_one in zip(leaves(found), leaves(expected), strict=True):
            assert torch.equal(one, other_one), name


@on_ranks(2)
@pytest.mark.parametrize(
    "how", [{}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}]
)
def test_shards_that_make_fx_would_take_for_constants_are_refused(how: dict[str, Any]) -> None:
    outer = of_rows(torch.ones(3 - dist.get_rank(), 4))
    given: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.redistribute(placements=[Replicate()]).to_local(),
        lambda x: x.to_local() + 1,
        lambda x: x.full_tensor(),
    )
    for program in given:
        with pytest.raises(
            NoRuleError, match=r"constants of the record\. Pass local tensors to make_fx"
        ):
            make_fx(program, **how)(outer)
        with pytest.raises(
            NoRuleError, match=r"constants of the record\. Pass local tensors to make_fx"
        ):
            make_fx(partial(of_both, program, outer), **how)(torch.ones(4))
    if "pre_dispatch" not in how:
        with pytest.raises(NoRuleError, match=r"aten.*of a DTensor while torch.fx records"):
            make_fx(lambda x: (outer * 2).to_local() + x, **how)(torch.ones(4))


@on_ranks(4)
def test_a_step_among_fake_tensors_sends_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    with FakeTensorMode():
        x = distribute_tensor(torch.randn(5, 8), mesh, [Shard(0), Shard(1)])
        weight: Any = distribute_tensor(
            torch.randn(8, 8), mesh, [Shard(0), Shard(1)]
        ).requires_grad_()
        (x @ weight).relu().softmax(0).sort(1)[0].cumsum(0).sum().backward()
        clip_grad_norm_([weight], 1.0)
        torch.optim.AdamW([weight]).step()
        drawn: Any = torch.nn.functional.dropout(
            rand(5, 3, device_mesh=mesh, placements=[Shard(0), Replicate()])
        )
        mapped = local_map(lambda a: a[: dist.get_rank()], out_placements=[Shard(0), Shard(0)])(
            drawn
        )
        checked = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)], run_check=True)
        assert mapped.shape == (5, 3)
        for tensor in (weight.grad, drawn, mapped, checked):
            assert isinstance(tensor.to_local(), FakeTensor)
    assert all_reduce(torch.ones(1), (mesh, 0)).item() == 2
