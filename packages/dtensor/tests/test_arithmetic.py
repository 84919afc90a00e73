"""Covers: the mode of arithmetic of modules/forwards.py."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal_dtensor.modules.forwards import (
    DataDtypes,
    arithmetic,
    complete_forwards,
    current_arithmetic,
)
from shoal_mesh import DeviceMesh, abstract_mesh


class Mode:
    """Writes down what it is asked to complete."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def own_blocks(self, ranks: int, size: int, what: str) -> int:
        return 1

    def form_of(self, lowering: type[Any], sharding: Any, module: nn.Module) -> type[Any]:
        return lowering

    def complete(self, mesh: DeviceMesh, module: nn.Module, over_data: Any) -> None:
        self.asked.append((mesh, module, over_data))


def test_the_mode_that_is_entered_completes_modules() -> None:
    mesh, one, other = abstract_mesh((2,)), nn.Identity(), nn.Identity()
    outer, inner = Mode(), Mode()
    complete_forwards(mesh, one)  # no mode: nothing to do
    with arithmetic(outer):
        complete_forwards(mesh, one, other)
        with arithmetic(inner):
            complete_forwards(mesh, one, over_data=DataDtypes(None, None))
        assert current_arithmetic() is outer
    assert current_arithmetic() is None
    assert outer.asked == [(mesh, one, None), (mesh, other, None)]
    assert inner.asked == [(mesh, one, (None, None))]
