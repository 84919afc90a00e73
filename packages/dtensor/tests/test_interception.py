"""Operators reach the class by rules, and import no DTensor of torch.

Covers: _torch/interception.py.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal_dtensor._torch.interception import register_dispatch

CALLS: list[tuple[Any, ...]] = []


class Logged(torch.Tensor):
    """Says which way its operators take."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        CALLS.append(("method", cls, func))
        return torch.ones(2)


class Below(Logged):
    pass


def by_rule(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    CALLS.append(("rule", cls, func, types, tuple(map(id, args)), kwargs or {}))
    return torch.ones(2)


register_dispatch(Logged, by_rule)


def new(cls: type[torch.Tensor]) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(cls, (2, 2))


def test_operators_of_the_class_take_their_rule() -> None:
    aten, one, two, plain = torch.ops.aten, new(Logged), new(Logged), torch.ones(2)
    CALLS.clear()
    torch.mm(one, two)
    torch.add(plain, one, alpha=2)
    assert [
        ("rule", Logged, aten.mm.default, (Logged,), (id(one), id(two)), {}),
        ("rule", Logged, aten.add.Tensor, (Logged,), (id(plain), id(one)), {"alpha": 2}),
    ] == CALLS


def test_subclasses_and_operators_with_out_take_the_method() -> None:
    below, one = new(Below), new(Logged)
    CALLS.clear()
    torch.relu(below)
    torch.mm(one, one, out=one)
    assert [
        ("method", Below, torch.ops.aten.relu.default),
        ("method", Logged, torch.ops.aten.mm.out),
    ] == CALLS
