"""torch's own data parallelism and sharded tensors over a mesh or parameters of shoal.

They are right, or refused at the call.

Covers: parallel modules in torch's own wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from shoal_dtensor import Replicate, full_tensor
from shoal_dtensor.errors import MixedTensorError
from shoal_dtensor.interop import mesh_to_torch
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.errors import MeshTypeError
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

ALL: dict[str, ParallelStyle] = {
    "0": ColwiseParallel(output_layouts=Replicate()),
    "1": ColwiseParallel(),
    "3": RowwiseParallel(),
}
SOME: dict[str, ParallelStyle] = {"1": ColwiseParallel(), "3": RowwiseParallel()}


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def model(plan: dict[str, ParallelStyle] | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)).double()
    return parallelize_module(made, mesh_of()["tensor"], plan) if plan else made


def wrap_by_group(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh_of()["data"].get_group())


def wrap_by_mesh(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, device_mesh=mesh_of()["data"])


@pytest.mark.parametrize("wrap", [wrap_by_group, wrap_by_mesh])
@pytest.mark.parametrize("plan", [ALL, None])
@on_ranks(4)
def test_ddp_of_modules_of_one_kind_trains_as_one_device(wrap: Any, plan: Any) -> None:
    coordinate = mesh_of().get_local_rank("data")
    # the ranks start from the values of the first
    plain, wrapped = model(), wrap(model(plan, seed=coordinate))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, wrapped)]
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        plain(x).square().mean().backward()
        wrapped(x.chunk(2)[coordinate]).square().mean().backward()
        for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
            grad: Any = other.grad
            torch.testing.assert_close(full_tensor(grad), one.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_ddp_of_a_module_of_both_kinds_is_refused_when_it_is_made() -> None:
    with pytest.raises(MixedTensorError, match=r"shoal_data_parallel\.replicate"):
        wrap_by_group(model(SOME))


SHARDED = r"shoal_data_parallel\.fully_shard"
TENSORS = r"function of the same name of shoal_dtensor"
PARALLELIZE = r"shoal_tp_styles\.parallelize_module"


def shard_by_torch(mesh: Any) -> Any:
    return torch_tensor.distribute_tensor(torch.ones(4), mesh["data"], [torch_tensor.Shard(0)])


def replicate_by_torch(mesh: Any) -> Any:
    return torch_tensor.distribute_tensor(
        torch.ones(4), mesh["data"], [torch_tensor.Replicate()], src_data_rank=None
    )


def parallelize_by_torch(mesh: Any) -> Any:
    return torch_parallel.parallelize_module(
        model(), mesh["data"], {"0": torch_parallel.ColwiseParallel()}
    )


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fully_shard": (lambda mesh: torch_fully_shard(model(), mesh=mesh["data"]), SHARDED),
    "fully_shard on two axes": (lambda mesh: torch_fully_shard(model(), mesh=mesh), SHARDED),
    "replicate": (lambda mesh: torch_replicate(model(), mesh=mesh["data"]), SHARDED),
    "distribute_tensor": (
        shard_by_torch,
        TENSORS,
    ),
    "distribute_tensor, replicated": (
        replicate_by_torch,
        TENSORS,
    ),
    "from_local": (
        lambda mesh: torch_tensor.DTensor.from_local(torch.ones(4), mesh["data"]),
        TENSORS,
    ),
    "zeros": (lambda mesh: torch_tensor.zeros(4, device_mesh=mesh["data"]), TENSORS),
    "distribute_module": (
        lambda mesh: torch_tensor.distribute_module(model(), mesh["data"]),
        TENSORS,
    ),
    "parallelize_module": (
        parallelize_by_torch,
        PARALLELIZE,
    ),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(4)
def test_what_takes_a_mesh_of_torch_refuses_one_of_shoal(name: str) -> None:
    call, ours = CALLS[name]
    with pytest.raises(MeshTypeError, match=ours):
        call(mesh_of())
    call(mesh_to_torch(mesh_of()))  # the way out that the error names


@on_ranks(4)
def test_context_parallel_refuses_a_mesh_of_shoal() -> None:
    mesh: Any = mesh_of()["data"]
    with (
        pytest.raises(MeshTypeError, match="mesh_to_torch"),
        context_parallel(mesh, buffers=[torch.randn(2, 2, 8, 4)], buffer_seq_dims=[2]),
    ):
        pass


@pytest.mark.parametrize("wrap", [torch_fully_shard, torch_replicate])
@on_ranks(4)
def test_sharding_by_torch_refuses_parameters_of_shoal(wrap: Any) -> None:
    mesh = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with pytest.raises(TypeError, match=SHARDED):
        wrap(model(SOME), mesh=mesh["data"])


@on_ranks(4)
def test_functional_collectives_take_a_group_of_the_mesh() -> None:
    mesh: Any = mesh_of()
    assert functional.all_reduce(torch.ones(2), "sum", mesh.get_group("data")).tolist() == [2, 2]
    with pytest.raises(MeshTypeError, match=r"collectives of shoal_mesh.*mesh\.get_group\(axis\)"):
        functional.all_reduce(torch.ones(2), "sum", mesh["data"])
    # torch looks at the types of a pair alone
    with pytest.raises(ValueError, match=r"\(DeviceMesh"):
        functional.all_reduce(torch.ones(2), "sum", (mesh, 0))
    assert functional.all_reduce(torch.ones(2), "sum", mesh_to_torch(mesh["data"])).tolist() == [
        2,
        2,
    ]
