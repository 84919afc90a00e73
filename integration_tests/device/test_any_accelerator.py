"""Functions that use the available accelerator instead of CUDA.

Covers: {accelerator,topology,testing,world,pool,launch,worker,c10d_transport}.py,
rng/{state,draw,streams}.py, api/random.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal_dtensor as sd
from shoal_data_parallel import fully_shard
from shoal_dtensor import Replicate, Shard
from shoal_dtensor.errors import RandomStateError
from shoal_mesh import (
    all_gather,
    all_reduce,
    init_device_mesh,
    launch,
    measure_topology,
    reduce_scatter,
)
from shoal_mesh.testing import default_world_size, device_type, on_ranks

from .simulated import is_registered, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not is_registered(), reason="needs the simulated accelerator: nox -s device"
    ),
]


def mesh() -> Any:
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("data", "tensor"))


def test_ranks_get_a_device_and_its_backend_each() -> None:
    assert (device_type(), default_world_size()) == ("sim", 4)
    assert launch(_place, 3) == [(f"sim:{rank}", "cpu:gloo,sim:simccl") for rank in range(3)]
    assert launch(_place, 5) == [("sim:0", "cpu:gloo,cuda:gloo")] * 5, "more ranks than devices"


def _place() -> tuple[str, str]:
    return str(torch.ones(1, device="sim").device), dist.get_backend_config()


@on_ranks(4)
def test_links_are_measured_on_the_device() -> None:
    with watched() as events:
        measure_topology(mesh(), repeats=1)
    assert sum(event.kind == "COLLECTIVE" for event in events) >= 8, (
        "two sizes, twice, along two axes"
    )


@on_ranks(4)
def test_fully_shard_without_a_mesh_takes_the_accelerator() -> None:
    model: Any = fully_shard(nn.Linear(4, 4).to("sim"))
    assert model.weight.device_mesh.device_type == "sim"


@on_ranks(4)
def test_states_of_the_device_are_saved_and_restored() -> None:
    assert sd.is_rng_supported_mesh(mesh())
    sd.manual_seed(5, mesh())
    sd.check_random_state(mesh())
    state = sd.get_rng_state()
    assert sorted(state) == sorted(sd.get_rng_state("sim")) == ["cpu", "sim"]
    first = sd.randn(30, device_mesh=mesh(), placements=[Shard(0), Replicate()]).full_tensor()
    torch.manual_seed(7)
    sd.set_rng_state(state)
    again = sd.randn(30, device_mesh=mesh(), placements=[Replicate(), Shard(0)]).full_tensor()
    assert torch.equal(first, again)
    with pytest.raises(RandomStateError, match="does not have default_generators"):
        sd.get_rng_state("mps")


@on_ranks(4)
def test_generators_of_the_device_are_compared() -> None:
    torch.manual_seed(5)
    torch.sim.manual_seed(dist.get_rank() // 2)  # type: ignore[attr-defined]  # added to torch
    with pytest.raises(
        RandomStateError, match=r"sim:. generators are out of step: ranks \[0, 1\] agree"
    ):
        sd.check_random_state(mesh())


@on_ranks(4)
def test_the_generator_that_keys_are_taken_from_is_compared() -> None:
    torch.manual_seed(dist.get_rank())
    torch.sim.manual_seed(5)  # type: ignore[attr-defined]  # registered as torch is imported
    with (
        sd.random_mode("counter"),
        pytest.raises(RandomStateError, match="the cpu generators are out of step"),
    ):
        sd.rand(8, device_mesh=init_device_mesh("sim", (4,)), placements=[Shard(0)])


@on_ranks(4)
def test_modes_draw_on_the_device() -> None:
    x = sd.distribute_tensor(torch.ones(8, 6, device="sim"), mesh(), [Shard(0), Shard(1)])
    before = torch.get_rng_state()
    for mode in ("single_device", "local"):
        with sd.random_mode(mode):
            F.dropout(x, 0.5)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn on the CPU"
    with sd.random_mode("per_axis", axes=("data",)):
        drawn_like: Any = torch.rand_like(x)
    assert not torch.equal(*drawn_like.full_tensor().cpu().chunk(2))
    drawn = []
    for device in ("cpu", "sim"):
        torch.manual_seed(3)
        with sd.random_mode("counter"):
            made = sd.rand(8, 6, device_mesh=init_device_mesh(device, (4,)), placements=[Shard(0)])
        drawn.append(made.full_tensor().cpu())
    assert torch.equal(*drawn), "the same on every device"


@on_ranks(4)
@pytest.mark.parametrize("passed", [False, True])
def test_a_generator_of_the_device_moves_on(passed: bool) -> None:
    torch.manual_seed(3)
    generator = torch.Generator("sim").manual_seed(4) if passed else None
    states = set()
    with sd.random_mode("counter"):
        for _ in range(3):
            made = torch.empty(8, 6, device="sim")
            x: Any = sd.distribute_tensor(made, mesh(), [Shard(0), Shard(1)])
            x.uniform_(generator=generator)
            states.add(x.full_tensor().sum().item())
    assert len(states) == 3


@on_ranks(4)
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_reductions_that_the_backend_has_not_are_made_here(op: str) -> None:
    comm, own = (
        (mesh(), ("data", "tensor")),
        torch.arange(8, dtype=torch.int16) * (dist.get_rank() + 1),
    )
    for dtype in (torch.int32, torch.uint8, torch.int16):
        values = own.to(dtype)
        expected, part = all_reduce(values, _on_cpu(), op), reduce_scatter(values, _on_cpu(), op=op)
        pending = all_reduce(values.to("sim"), comm, op, async_op=True)
        assert torch.equal(pending.wait().cpu(), expected)
        assert torch.equal(reduce_scatter(values.to("sim"), comm, op=op).cpu(), part)


def _on_cpu() -> Any:
    return init_device_mesh("cpu", (4,)), 0


@on_ranks(4)
def test_any_dtype_and_any_strides_are_sent() -> None:
    comm, rank = (mesh(), ("data", "tensor")), dist.get_rank()
    for dtype in (torch.int16, torch.complex64, torch.uint16, torch.bool, torch.float8_e4m3fn):
        x = (torch.arange(6).view(2, 3).t() + rank).to(dtype).to("sim")
        whole = all_gather(x, comm)
        expected = torch.cat(
            [(torch.arange(6).view(2, 3).t() + other).to(dtype) for other in range(4)]
        )
        assert torch.equal(whole.cpu().view(torch.uint8), expected.view(torch.uint8)), dtype
