"""Changes of parameters reach compiled code.  Covers: lowering/parameters.py.

The gradients of a compiled module are those of the eager one, in `.grad` and wherever else autograd
is asked for them.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_marks import COMPILED
from shoal_dtensor import full_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from toy_modules import FeedForward

pytestmark = COMPILED
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def model() -> Any:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return parallelize_module(start, all_ranks(), PLAN)


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def gradients(module: Any) -> list[Tensor]:
    return [full_tensor(p.grad) for p in module.parameters()]


def same_as_eager(change: Callable[[Any], object]) -> None:
    """After a change between two steps the compiled module still does what the eager one does."""
    x = torch.linspace(-1, 1, 12, dtype=torch.double).view(3, 4)
    eager = model()
    module = copy.deepcopy(eager)
    fast = compiled(module)
    for step in range(2):
        if step:
            change(eager)
            change(module)
        for each, run in ((eager, eager), (module, fast)):
            each.zero_grad()
            run(x.to(each[0].weight.dtype)).square().sum().backward()
        torch.testing.assert_close(gradients(module), gradients(eager))
        torch.testing.assert_close(
            fast(x.to(module[0].weight.dtype)), eager(x.to(eager[0].weight.dtype))
        )


def step_of_sgd(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters(), 0.1).step()


def other_data(module: Any) -> None:
    for param in module.parameters():
        param.data = param.detach() * 2


@torch.no_grad()
def other_memory(module: Any) -> None:
    for param in module.parameters():
        shard = param.to_local()
        shard.data = shard * 2


def other_parameter(module: Any) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)


def hooked(module: Any) -> None:
    module[0].weight.register_hook(lambda grad: grad * 3)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a step": step_of_sgd,
    "other data": other_data,
    "other memory of a shard": other_memory,
    "another parameter": other_parameter,
    "another dtype": lambda module: module.float(),
    "a hook": hooked,
    "accumulated": lambda module: None,
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, timeout=100)
def test_changes_of_parameters_reach_compiled_code(change: str) -> None:
    same_as_eager(CHANGES[change])


@on_ranks(2, timeout=100)
def test_gradients_go_where_autograd_is_asked_for_them() -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.double).view(3, 4)
    eager = model()
    module = copy.deepcopy(eager)
    fast = compiled(module)
    expected: Any
    got: Any
    (expected,) = torch.autograd.grad(eager(x).square().sum(), [eager[0].weight])
    (got,) = torch.autograd.grad(fast(x).square().sum(), [module[0].weight])
    torch.testing.assert_close(got.full_tensor(), expected.full_tensor())
    assert all(param.grad is None for param in module.parameters())
    fast(x).square().sum().backward(inputs=[module[0].weight])
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), expected.full_tensor())
    assert module[0].bias.grad is None
    module[0].weight.requires_grad_(False)
    module.zero_grad()
    fast(x).square().sum().backward()
    assert module[0].weight.grad is None
    assert module[0].bias.grad is not None


def test_a_compiled_module_dies_with_its_last_reference() -> None:
    with fake_world(2):
        module = model()
        fast = compiled(module)
        fast(torch.randn(3, 4, dtype=torch.double)).sum().backward()
        known = weakref.ref(module[0].weight)
        del module, fast
        torch._dynamo.reset()
        gc.collect()
        assert known() is None


def blocks_of(count: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    return parallelize_module(nn.Sequential(*(FeedForward(4, 8) for _ in range(count))), mesh, plan)


def test_a_module_that_left_its_block_is_forgotten() -> None:
    with fake_world(2):
        module = blocks_of(1)
        fast, x = compiled(module), torch.randn(3, 4)
        fast(x).sum().backward()
        left = weakref.ref(module[0].up.weight)
        module[0].up = nn.Linear(4, 4, bias=False)
        # it forgets the graph before, whose guards held the module
        compiled(module)(x).sum().backward()
        gc.collect()
        assert left() is None
        assert module[0].down.weight.grad is not None


def test_blocks_of_equal_structure_share_one_graph() -> None:
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        blocks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)]
        torch._dynamo.reset()
        x = torch.randn(3, 4, requires_grad=True) * 2
        for block in blocks:
            fast: Any = torch.compile(
                parallelize_module(block, mesh, PLAN), backend=keep, fullgraph=True
            )
            x = fast(x)
        assert len(graphs) == 1
