"""The library in a block that sets torch's default device.

Covers: tensor/spec_arguments.py, host_memory.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

import shoal_dtensor
import shoal_mesh
from shoal_dtensor import DTensor, Shard, clip_grad_norm_, distribute_tensor, full_tensor
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks


def make_from_checked_local(x: Any) -> Any:
    return DTensor.from_local(x.to_local(), x.device_mesh, [Shard(0)], run_check=True)


CALLS: dict[str, Callable[[Any], Any]] = {
    "a list as index": lambda x: x[[0, 3]],
    "from_local with run_check": make_from_checked_local,
    "gather": lambda x: x.sort(0)[0].full_tensor(),
    "random numbers": lambda x: torch.rand_like(x) + torch.randint_like(x, 5),
    "norm of gradients": lambda x: clip_grad_norm_([_with_gradient(x)], 1.0),
    "distribution": lambda x: distribute_tensor(x.full_tensor(), x.device_mesh, [Shard(1)]),
}


def _with_gradient(x: Any) -> Any:
    leaf = x.detach().clone().requires_grad_()
    (leaf * leaf).sum().backward()
    return leaf


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_calls_on_real_tensors_in_a_block_of_the_meta_device(name: str) -> None:
    """Tensors that the library makes for itself were on the meta device, and could not be read."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    torch.manual_seed(0)
    expected = CALLS[name](x)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = CALLS[name](x)
    assert torch.equal(_whole(found), _whole(expected))


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = full_tensor(value)
    return whole


@on_ranks(2)
def test_a_group_is_first_used_in_a_block_of_the_meta_device() -> None:
    """Ranks exchange facts about their machines and processes at the first use of a group."""
    group = dist.new_group([0, 1])
    with torch.device("meta"):
        mesh = DeviceMesh.from_group(group, "cpu")
        local = torch.full((2,), float(mesh.get_rank()), device="cpu")
        assert DTensor.from_local(local, mesh, [Shard(0)]).full_tensor().tolist() == [0, 0, 1, 1]


def _calls_without_device(source: Path) -> Iterator[str]:
    """The calls of torch's constructors in a file that leave the device to the caller's block."""
    constructors = {function.__name__ for function in _device_constructors()}
    for node in ast.walk(ast.parse(source.read_text())):
        function = node.func if isinstance(node, ast.Call) else None
        if not (isinstance(node, ast.Call) and isinstance(function, ast.Attribute)):
            continue
        is_constructor = ast.unparse(function.value) == "torch" and function.attr in constructors
        if is_constructor and all(keyword.arg != "device" for keyword in node.keywords):
            yield f"{source.name}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", [shoal_mesh, shoal_dtensor], ids=["mesh", "dtensor"])
def test_every_tensor_that_the_library_makes_names_its_device(package: Any) -> None:
    sources = Path(package.__file__).parent.rglob("*.py")
    assert [call for source in sources for call in _calls_without_device(source)] == []
