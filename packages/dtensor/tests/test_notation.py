"""Covers: rules/language/notation.py."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor import TensorMeta
from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.layout.memory_order import contiguous_stride
from shoal_dtensor.rules import (
    OpCall,
    P,
    R,
    Row,
    S,
    factor_rows,
    linear_rows,
    parse,
    pointwise,
    product,
)

aten = torch.ops.aten


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, contiguous_stride(shape), torch.float32)


def call(inputs: list[TensorMeta], outputs: list[TensorMeta]) -> OpCall:
    return OpCall(aten.mm.default, tuple(inputs), {}, tuple(inputs), tuple(outputs))


def test_a_shared_factor_shards_all_and_a_summed_one_leaves_partial_sums() -> None:
    rows = product("m k, k n -> m n").rows(call([meta(4, 6), meta(6, 2)], [meta(4, 2)]))
    assert list(rows) == [
        Row((S(0), R), (S(0),)),
        Row((S(1), S(0)), (P("sum"),)),
        Row((R, S(1)), (S(1),)),
    ]


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        (torch.int64, torch.float32, False),
        (torch.int64, torch.float64, False),
        (torch.float64, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.float64, True),
        (torch.float32, torch.complex64, True),
        (torch.int32, torch.int64, False),
    ],
)
def test_no_row_rounds_or_unwraps_the_parts_of_a_sum(
    source: torch.dtype, target: torch.dtype, kept: bool
) -> None:
    """A dividend of whole numbers: a part of its sum would lose digits by which parts cancel."""
    rule = pointwise(linear=(0,), monotone=True)
    found = rule.rows_of(call([meta(4)._replace(dtype=source)], [meta(4)._replace(dtype=target)]))
    assert (
        (Row((P("sum"),), (P("sum"),)) in found) is (Row((P("avg"),), (P("avg"),)) in found) is kept
    )
    assert (Row((P("max"),), (P("max"),)) in found) is target.is_floating_point


def test_unsharded_factors_have_no_row() -> None:
    rows = product("... m n -> ... m n", replicated="m n").rows(
        call([meta(3, 4, 5)], [meta(3, 4, 5)])
    )
    assert list(rows) == [Row((S(0),), (S(0),))]
    rows = product("... m -> ... m", replicated="...").rows(call([meta(3, 4, 5)], [meta(3, 4, 5)]))
    assert list(rows) == [Row((S(2),), (S(2),))]


def test_broadcast_operands_stay_replicated() -> None:
    rows = factor_rows(
        parse("..., ... -> ..."),
        [
            meta(3, 1),
            meta(
                4,
            ),
        ],
        [meta(3, 4)],
    )
    assert rows == [Row((S(0), R), (S(0),)), Row((R, S(0)), (S(1),))]


def test_grouped_dims_divide_at_the_inner_size() -> None:
    rows = factor_rows(parse("b (h d), d -> b h d"), [meta(2, 12), meta(3)], [meta(2, 4, 3)])
    assert rows == [Row((S(0), R), (S(0),)), Row((S(1, 3), R), (S(1),))]


def test_linear_operands_pass_partial_sums() -> None:
    assert linear_rows((1,), 2, 1) == [
        Row((R, P("sum")), (P("sum"),)),
        Row((R, P("avg")), (P("avg"),)),
    ]


def test_pointwise_flags() -> None:
    two = call([meta(4), meta(4)], [meta(4)])
    joint = pointwise(jointly=True).rows(two)
    assert (
        Row((P("sum"), P("sum")), (P("sum"),)) in joint
        and Row((P("sum"), R), (P("sum"),)) not in joint
    )
    assert Row((P("sum"), R), (P("sum"),)) in pointwise(linear=(0, 1)).rows(two)
    assert Row((P("max"),), (P("max"),)) in pointwise(monotone=True).rows(
        call([meta(4)], [meta(4)])
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k", "one arrow"),
        ("m -> m -> m", "one arrow"),
        ("(m k -> m", "brackets do not match"),
        ("m) -> m", "brackets do not match"),
        ("m m -> m", "repeated"),
        ("m+ -> m", "not a factor name"),
    ],
)
def test_unreadable_patterns_are_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k -> m", [(2,)], "an operand has 2 dims, but the tensor has 1"),
        ("m, m -> m", [(2,), (3,)], "factor 'm' has sizes 2 and 3"),
        ("(a b) -> a", [(6,)], None),
        ("(a b) -> ", [(6,)], "cannot be derived"),
    ],
)
def test_misfits_are_named(text: str, shapes: list[tuple[int, ...]], message: str | None) -> None:
    inputs = [meta(*shape) for shape in shapes]
    outputs = [meta(2)] if text.split("->")[1].strip() else [meta()]
    if message is None:
        assert factor_rows(parse(text), inputs, outputs) == [Row((S(0, 3),), (S(0),))]
        return
    with pytest.raises(ArgumentValueError, match=message):
        factor_rows(parse(text), inputs, outputs)
