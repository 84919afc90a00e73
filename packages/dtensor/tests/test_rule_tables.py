"""Covers: rules/language/rule.py: tables."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.rules import Rule, family, merge, overlay, pointwise
from shoal_dtensor.scopes import current

aten = torch.ops.aten


def test_two_rules_for_one_operator_are_an_error() -> None:
    rule = pointwise()
    assert merge(a={aten.neg.default: rule}, b={aten.abs.default: rule}).keys() == {
        aten.neg.default,
        aten.abs.default,
    }
    with pytest.raises(ArgumentValueError, match="'a' and 'b'"):
        merge(a={aten.neg.default: rule}, b={aten.neg.default: rule})


def test_overlays_nest_and_end() -> None:
    outer, inner = {aten.neg.default: pointwise()}, {aten.abs.default: pointwise()}
    with overlay(outer):
        with overlay(inner):
            assert current().overlays == (inner, outer)
        assert current().overlays == (outer,)
    assert current().overlays == ()


def test_a_name_stands_for_all_forms_that_take_tensors() -> None:
    rule = pointwise()
    forms = ("default", "out")
    expected = {getattr(aten.relu, form) for form in forms} | {aten.relu_.default}
    assert set(family({"relu": rule})) == expected
    assert (
        family({"sum": rule, "sum.default": pointwise(linear=(0,))})[aten.sum.default] is not rule
    )
    assert family({"no_such_operator": rule}) == {}


def test_a_family_of_unordered_rules() -> None:
    rule = Rule(pointwise().rows)
    assert not family({"neg": rule})[aten.neg.default].unordered
    table = family({"neg abs": rule}, unordered=True)
    assert table[aten.neg.default].unordered
    assert table[aten.abs.default].unordered


def test_a_name_listed_twice_in_one_table_is_an_error() -> None:
    with pytest.raises(ArgumentValueError, match=r"aten\.relu\.\w+ is listed twice"):
        family({"relu neg": pointwise(), "relu": pointwise()})
