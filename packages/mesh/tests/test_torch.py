"""Covers: _torch.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_mesh.internal import constant_when_compiled


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
    assert [len(calls) for calls in traced] == [1, 1], (
        "an equal constant has the graph of the first"
    )
