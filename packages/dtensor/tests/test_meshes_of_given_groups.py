"""DTensors on equal meshes over different groups: each sends on the groups of its own mesh.

Covers: layout/spec.py, tensor/{spec_arguments,dtensor}.py, redistribute/scatter.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from shoal_mesh import DeviceMesh
from shoal_mesh.testing import observed, on_ranks

S0, R = Shard(0), Replicate()


def two_meshes() -> list[DeviceMesh]:
    """Equal meshes of two ranks, each over a group of its own."""
    return [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in "ab"]


MAKERS: dict[str, Callable[[DeviceMesh], Any]] = {
    "from_local": lambda mesh: DTensor.from_local(torch.ones(2), mesh, [S0]),
    "from_local, checked": lambda mesh: DTensor.from_local(
        torch.ones(2), mesh, [S0], run_check=True
    ),
    "distribute_tensor": lambda mesh: distribute_tensor(torch.ones(4), mesh, [S0]),
    "zeros": lambda mesh: zeros(4, device_mesh=mesh, placements=[S0]),
    "an operator": lambda mesh: distribute_tensor(torch.ones(4), mesh, [S0]) * 2,
    "a sum": lambda mesh: distribute_tensor(torch.ones(4), mesh, [S0]).sum(),
    "a view": lambda mesh: distribute_tensor(torch.ones(4), mesh, [S0]).view(2, 2),
}


@pytest.mark.parametrize("maker", MAKERS)
@on_ranks(2)
def test_tensors_are_on_the_groups_that_their_mesh_was_given(maker: str) -> None:
    # once the second tensor was on the first mesh's group
    for mesh in two_meshes():
        made = MAKERS[maker](mesh)
        assert made.device_mesh.get_group() is mesh.get_group()
        with observed() as events:
            made.redistribute(placements=[R])
        groups = {event.comm.group for event in events}
        assert groups <= {mesh.get_group()}


@on_ranks(2)
def test_tensors_on_equal_meshes_mix_and_move_between_them() -> None:
    a, b = two_meshes()
    whole = torch.arange(4.0)
    x: Any
    y: Any
    x, y = (distribute_tensor(whole, mesh, [S0]) for mesh in (a, b))
    assert x.spec is not y.spec and x.spec.same_layout(y.spec)
    assert torch.equal((x + y).full_tensor(), whole * 2)
    assert (x + y).device_mesh is a and (y + x).device_mesh is b
    moved = x.redistribute(b, [S0])
    assert moved.device_mesh is b and torch.equal(moved.to_local(), x.to_local())
    gathered = x.redistribute(b, [R])
    assert gathered.device_mesh is b and torch.equal(gathered.to_local(), whole)
    leaf = y.detach().requires_grad_()
    (x * leaf).sum().full_tensor().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad.full_tensor(), whole)


@on_ranks(2, timeout=120)
def test_two_threads_have_a_mesh_and_a_group_each() -> None:
    # once half of the results were those of the other thread, and then both waited for ever
    rank = dist.get_rank()
    wrong: list[Any] = []

    def work(first: float, mesh: DeviceMesh) -> None:
        for step in range(20):
            value = first + 2 * step
            local = torch.full((3,), value + rank)
            x: Any = DTensor.from_local(local, mesh, [S0])
            whole = torch.tensor([value] * 3 + [value + 1] * 3)
            if not torch.equal(x.full_tensor(), whole):
                wrong.append((first, step, "full_tensor"))
            if (x * 2).sum().full_tensor() != 2 * whole.sum():
                wrong.append((first, step, "sum"))

    threads = [
        threading.Thread(target=work, args=(1000.0 * i, mesh))
        for i, mesh in enumerate(two_meshes())
    ]
    for thread in threads if rank == 0 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@on_ranks(2)
def test_compiled_code_sends_on_the_group_of_its_argument() -> None:
    def total(x: DTensor) -> Any:
        return x.redistribute(placements=[R]).to_local() * 2

    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    for mesh in two_meshes():
        x = distribute_tensor(torch.arange(4.0), mesh, [S0])
        with observed() as events:
            out = compiled(x)
        assert torch.equal(out, torch.arange(4.0) * 2)
        assert {event.comm.group for event in events} <= {mesh.get_group()}
