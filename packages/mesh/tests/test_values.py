"""Covers: values.py, beside the standard library's dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest
import torch

from shoal_mesh.internal import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list, compare=False)
    cached: int = field(default=7, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Point3(Point):
    z: int = 1


def define(decorator: Any) -> tuple[type, ...]:
    @decorator(frozen=True, slots=True)
    class Frozen:
        a: int
        b: int = 2
        c: list[int] = field(default_factory=list, repr=False)
        d: str = field(default="d", init=False)

    @decorator(frozen=True, slots=True)
    class Below(Frozen):
        e: int = field(default=5, kw_only=True)

    @decorator(slots=True)
    class Changing:
        a: int
        _default_a: int = 3
        b: int = field(default=4, compare=False)

    @decorator(unsafe_hash=True, kw_only=True, repr=False)
    class Keywords:
        b: int = 1
        a: int

        def __post_init__(self) -> None:
            self.a = self.a + 1

    @decorator(frozen=True, eq=False)
    class Identity:
        a: object = None

    @decorator(frozen=True)
    class Empty:
        pass

    @decorator(frozen=True)
    class Own:
        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 3

        def __repr__(self) -> str:
            return "own"

    return Frozen, Below, Changing, Keywords, Identity, Empty, Own


PAIRS = list(zip(define(dataclass), define(dataclasses.dataclass), strict=True))
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 3), {}),
    ((1,), {"c": [1]}),
    ((1,), {"e": 6}),
    ((), {"a": 1}),
    ((), {"a": 2}),
    ((1,), {"z": 1}),
]


def outcome(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return run(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        return type(error)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: cls.__name__)
def test_classes_are_as_those_of_the_standard_library(ours: Any, theirs: Any) -> None:
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs)).replace("<factory>", "Ellipsis")
    assert ours.__dataclass_params__.frozen == theirs.__dataclass_params__.frozen
    pairs = [(outcome(ours, *args, **kwargs), outcome(theirs, *args, **kwargs)) for args, kwargs in CALLS]
    made = [(mine, its) for mine, its in pairs if not isinstance(its, type)]
    assert [mine for mine, its in pairs if isinstance(its, type)] == [its for _, its in pairs if isinstance(its, type)]
    for mine, its in made:
        assert without_address(mine) == without_address(its)
        assert dataclasses.asdict(mine) == dataclasses.asdict(its)
        assert [mine == other for other, _ in made] == [its == other for _, other in made]
        assert isinstance(outcome(hash, mine), type) == isinstance(outcome(hash, its), type)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("name", ["a", "new"])
def test_fields_are_frozen_as_those_of_the_standard_library(ours: Any, theirs: Any, name: str) -> None:
    given = {field.name: 1 for field in dataclasses.fields(theirs) if field.init}
    mine, its = ours(**given), theirs(**given)
    for change in (lambda of: setattr(of, name, 1), lambda of: delattr(of, name)):
        assert isinstance(outcome(change, mine), type) == isinstance(outcome(change, its), type)


def without_address(of: object) -> str:
    return re.sub(r"0x\w+", "", repr(of))


def test_equal_values_have_one_hash() -> None:
    assert hash(Point(1)) == hash(Point(1, 0, ["compared is x and y"]))
    assert len({Point(1), Point(1, 0), Point(1, 1)}) == 2
    assert Point(1) != Point3(1)


def test_values_can_be_pickled_copied_and_replaced() -> None:
    point = Point3(1, 2, ["a"], z=3)
    for copied in (pickle.loads(pickle.dumps(point)), copy.deepcopy(point), copy.copy(point)):
        assert copied == point and copied.tags == ["a"] and copied.cached == 7
    assert dataclasses.replace(point, y=5) == Point3(1, 5, z=3)
    assert Point(1).tags is not Point(2).tags


def test_a_plain_subclass_of_a_frozen_class_may_have_attributes() -> None:
    class Named(Point):
        name = ""

    named = Named(1)
    named.name = "one"
    assert named.name == "one"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        named.x = 2  # type: ignore[misc]  # frozen


def test_compiled_code_makes_and_compares_values() -> None:
    def run(x: torch.Tensor, point: Point) -> tuple[torch.Tensor, Point]:
        other = Point(point.x + 1, point.y)
        return (x + other.x if other != point else x), other

    result, made = torch.compile(run, backend="eager", fullgraph=True)(torch.zeros(2), Point(1, 2))
    assert result.tolist() == [2, 2] and made == Point(2, 2)
