"""`clip_grad_norm_` has the same result inside and outside of a graph.

Covers: optim/clip_grad.py.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, Shard, clip_grad_norm_, distribute_tensor
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

pytestmark = [
    pytest.mark.skipif(
        torch.__version__ < "2.12",
        reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
    ),
    # torch's own
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
# Sharded evenly, unevenly with nothing on rank 1, replicated; a plain one; one without a gradient.
LAYOUTS: list[Any] = [
    ((4, 3), [Shard(0)]),
    ((1, 3), [Shard(0)]),
    ((5,), [Replicate()]),
    ((2,), None),
    ((3,), None),
]


def parameters(mesh: DeviceMesh, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    found = []
    for shape, placements in LAYOUTS:
        start, grad = torch.randn(2, *shape, dtype=torch.double)
        there = [
            each if placements is None else distribute_tensor(each, mesh, placements)
            for each in (start, grad)
        ]
        found.append(nn.Parameter(there[0]))
        found[-1].grad = there[1]
    found[-1].grad = None
    return found


def local(tensors: Any) -> list[Tensor]:
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def update(params: list[Any], order: float) -> Tensor:
    """Clipping, and what reads the gradients after it."""
    norm = clip_grad_norm_(params, 0.5, order)
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)
    return norm


@pytest.mark.parametrize("order", [2.0, inf, 3.0])
@on_ranks(2, timeout=200)
def test_one_graph_for_two_sets_of_parameters(order: float) -> None:
    mesh = init_device_mesh("cpu", (2,))
    graphs: list[object] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        # not while this file is collected: it takes seconds
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(update, backend=keep, fullgraph=True)
    for seed in (0, 1):
        got, expected = parameters(mesh, seed), parameters(mesh, seed)
        for _ in range(3):
            torch.testing.assert_close(
                compiled(got, order), update(expected, order), rtol=0, atol=0
            )
            for each in ([p.grad for p in got[:-1]], [p.grad for p in expected[:-1]]):
                assert [type(grad) for grad in each] == [DTensor, DTensor, DTensor, Tensor]
            torch.testing.assert_close(
                local(p.grad for p in got[:-1]), local(p.grad for p in expected[:-1])
            )
            torch.testing.assert_close(local(got), local(expected))
    assert len(graphs) == 1


@on_ranks(2, timeout=200)
def test_a_norm_that_is_not_finite_is_an_error_between_graphs() -> None:
    params = parameters(init_device_mesh("cpu", (2,)), 0)
    params[0].grad.mul_(inf)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda: clip_grad_norm_(params, 0.5, error_if_nonfinite=True), backend="aot_eager"
    )
    with pytest.raises(RuntimeError, match="order"):
        compiled()
