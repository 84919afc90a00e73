"""Covers: tensor/gradients.py: the parts of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal_dtensor.internal import in_backward, running_pass


class Noted:
    """A part that notes what becomes of it."""

    def __init__(
        self, name: str = "own", notes: list[str] | None = None, raises: bool = False
    ) -> None:
        self.name, self.notes, self.raises = name, [] if notes is None else notes, raises

    def finish(self) -> None:
        assert in_backward()
        self.notes.append(f"{self.name} finishes")
        if self.raises:
            raise ValueError(f"{self.name} on purpose")

    def fail(self) -> None:
        self.notes.append(f"{self.name} fails")


def seen(x: Tensor, hook: Callable[[], Any]) -> Any:
    """The tensor, whose gradient, if it has one, calls a hook when it is computed."""
    out: Any = x * 1
    if out.requires_grad:
        out.register_hook(lambda _: hook() and None)
    return out


def leaf() -> Any:
    return torch.ones(2, requires_grad=True)


def fail() -> None:
    raise ValueError("on purpose")


def test_parts_finish_in_the_order_in_which_they_joined() -> None:
    notes: list[str] = []
    x = seen(leaf(), lambda: running_pass().join(Noted("second", notes)))
    seen(x, lambda: running_pass().join(Noted("first", notes))).sum().backward()
    assert notes == ["first finishes", "second finishes"]


def test_a_pass_has_one_part_of_a_class_and_the_next_pass_another() -> None:
    found: list[Noted] = []
    for _ in range(2):
        x = seen(leaf(), lambda: found.append(running_pass().part(Noted)))
        seen(x, lambda: found.append(running_pass().part(Noted))).sum().backward()
    assert found[0] is found[1] and found[2] is found[3] and found[0] is not found[2]
    assert found[0].notes == found[2].notes == ["own finishes"]


def test_parts_of_a_pass_that_raises_fail() -> None:
    notes: list[str] = []
    x = seen(leaf(), fail)
    for name in ("second", "first"):
        part = Noted(name, notes)
        x = seen(x, lambda part=part: running_pass().join(part))  # type: ignore[misc]  # this turn
    with pytest.raises(ValueError, match="on purpose"):
        x.sum().backward()
    assert notes == ["second fails", "first fails"]


def test_parts_after_one_that_raises_fail_while_the_error_is_at_hand() -> None:
    notes: list[str] = []
    x = leaf()
    for name in ("third", "second", "first"):
        part = Noted(name, notes, raises=name == "second")
        x = seen(x, lambda part=part: running_pass().join(part))  # type: ignore[misc]  # this turn
    with pytest.raises(ValueError, match="second on purpose") as raised:
        x.sum().backward()
    assert raised.value.__traceback__ is not None
    assert notes == ["first finishes", "second finishes", "third fails", "second fails"]


def test_a_pass_inside_of_another_has_parts_of_its_own() -> None:
    notes: list[str] = []

    def inner(x: Tensor) -> Any:
        return seen(x, lambda: running_pass().join(Noted("inner", notes))) * 2

    out: Any = checkpoint(inner, leaf(), use_reentrant=True)
    seen(out, lambda: running_pass().join(Noted("outer", notes))).sum().backward()
    assert notes == ["inner finishes", "outer finishes"]


def test_there_is_no_pass_outside_of_one() -> None:
    with pytest.raises(RuntimeError, match="backward pass"):
        running_pass()
