"""Covers: kernels.py while torch.compile traces: the collectives become functional ones, without graph breaks.

And `constant_when_compiled` of _torch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal_mesh import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    constant_when_compiled,
    differentiable,
    init_device_mesh,
    reduce_scatter,
)
from shoal_mesh.testing import on_ranks


@constant_when_compiled
@dataclass(frozen=True, slots=True)
class Scale:
    """A value that a compiled function takes and makes."""

    by: float

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Scale({self.by})", {"Scale": Scale}

    def twice(self) -> Scale:
        return Scale(2 * self.by)


def test_a_constant_is_guarded_by_equality() -> None:
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        traced.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(lambda x, scale: x * scale.twice().by, backend=backend, fullgraph=True)
    x = torch.arange(3.0)
    for by in (3.0, 3.0, 5.0):
        torch.testing.assert_close(compiled(x, Scale(by)), 2 * by * x)
    assert [len(calls) for calls in traced] == [1, 1], "an equal constant has the graph of the first"


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_collectives_trace_into_one_graph() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    comm = mesh.comm(0)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def program(x: Tensor) -> Tensor:
        y = all_reduce(x, comm, "avg") + all_gather(x, comm, 1)[:, :4]
        z = reduce_scatter(y, comm, 1)
        z = all_to_all(z, comm, 0, 1)
        return broadcast(z, (mesh, "tp"), 1)

    x = torch.arange(16.0).view(4, 4) + comm.rank
    torch.testing.assert_close(torch.compile(program, backend=backend, fullgraph=True)(x), program(x))
    names = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    for op in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
        assert any(f"_c10d_functional.{op}" in name for name in names), (op, names)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_gradients_trace() -> None:
    comm = init_device_mesh("cpu", (2,)).comm(0)

    def program(x: Tensor) -> Tensor:
        return (differentiable.all_gather(x * x, comm) * (comm.rank + 1)).sum()

    x = torch.ones(4, requires_grad=True)
    torch.compile(program, backend="aot_eager", fullgraph=True)(x).backward()  # type: ignore[no-untyped-call]  # torch has no types here
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 4
