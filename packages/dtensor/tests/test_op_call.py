"""Covers: rules/language/op_call.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_dtensor import Replicate, Shard, TensorMeta, distribute_tensor
from shoal_dtensor.errors import ArgumentValueError
from shoal_dtensor.rules import OpCall, P, R, Row, Rule, S
from shoal_dtensor.rules.language.op_call import schema_of
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

aten = torch.ops.aten


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)


def call_of(op: Any, *args: Any, outputs: tuple[TensorMeta, ...] = (), **kwargs: Any) -> OpCall:
    values = [*args, *(value for name, value in kwargs.items() if name != "out")]
    tensors = tuple(
        t for v in values for t in (v if isinstance(v, list) else [v]) if isinstance(t, TensorMeta)
    )
    return OpCall(op, args, kwargs, tensors, outputs)


def test_what_a_row_does_not_name_is_replicated() -> None:
    call = call_of(aten.mm.default, meta(4, 6), meta(6, 2), outputs=(meta(4, 2),))
    assert call.row(self=S(0), out=S(0)) == Row((S(0), R), (S(0),))
    assert call.row() == Row((R, R), (R,))


def test_dims_count_from_the_end_of_a_tensor() -> None:
    # of= had no reader
    call = call_of(aten.index_select.default, meta(2, 3, 4), -1, meta(5))
    assert call.dim() == 2
    assert call.dim(of=1) == 0
    assert call.dims() == (2,)
    assert call.dims(of=1) == (0,)


def test_entries_under_computed_names_come_as_a_mapping() -> None:
    call = call_of(aten.mm.default, meta(4, 6), meta(6, 2), outputs=(meta(4, 2),))
    assert call.row({"self": S(1), "mat2": S(0)}, out=P("sum")) == call.row(
        self=S(1), mat2=S(0), out=P("sum")
    )
    with pytest.raises(ArgumentValueError, match="names other"):
        call.row({"other": S(0)}, out=R)


def test_an_entry_for_an_argument_that_is_none_or_a_number_is_ignored() -> None:
    outputs = (meta(4, 6), meta(4, 1), meta(4, 1))
    call = call_of(
        aten.native_layer_norm.default, meta(4, 6), [6], meta(6), None, 1e-5, outputs=outputs
    )
    assert call.row(input=S(1), weight=S(0), bias=S(0), out0=S(1)) == Row(
        (S(1), S(0)), (S(1), R, R)
    )
    scaled = call_of(aten.mul.Scalar, meta(4), 2.0, outputs=(meta(4),))
    assert scaled.row(self=S(0), other=S(0), out=S(0)) == Row((S(0),), (S(0),))


def test_results_have_the_names_of_the_schema() -> None:
    call = call_of(aten.max.dim, meta(4, 6), 0, outputs=(meta(6), meta(6)))
    assert call.row(self=S(1), out=S(0)) == call.row(self=S(1), values=S(0), indices=S(0))
    assert call.row(self=S(1), values=S(0), out=P("sum")).outputs == (S(0), P("sum"))
    assert call.row(self=S(1), out1=S(0), out=P("sum")).outputs == (P("sum"), S(0))
    single = call_of(aten.relu.default, meta(4), outputs=(meta(4),))
    assert single.row(self=S(0), out0=S(0), out=R).outputs == (S(0),)


def test_results_that_a_mask_leaves_out_have_no_entry() -> None:
    args = (
        meta(4, 6),
        meta(4, 6),
        [6],
        meta(4, 1),
        meta(4, 1),
        meta(6),
        meta(6),
        [True, False, True],
    )
    call = call_of(aten.native_layer_norm_backward.default, *args, outputs=(meta(4, 6), meta(6)))
    assert call.row(out0=S(0), out1=R, out2=P("sum")).outputs == (S(0), P("sum"))
    assert [row.outputs for row in call.linear("grad_out")] == [
        (P(op), P(op)) for op in ("sum", "avg")
    ]


def test_lists_take_one_entry_for_all_or_one_each() -> None:
    call = call_of(aten.cat.default, [meta(2, 6), meta(3, 6)], 0, outputs=(meta(5, 6),))
    assert call.row(tensors=S(1), out=S(1)).inputs == (S(1), S(1))
    assert call.row(tensors=[S(0), R], out=R).inputs == (S(0), R)
    split = call_of(aten.split.Tensor, meta(4, 6), 2, outputs=(meta(2, 6), meta(2, 6)))
    assert split.row(self=S(1), out=[S(1), R]).outputs == (S(1), R)
    with pytest.raises(ArgumentValueError, match="'tensors' is a list of 2 tensors, got 1 entries"):
        call.row(tensors=[S(0)])


def test_a_name_that_the_operator_does_not_have_is_an_error() -> None:
    call = call_of(aten.mm.default, meta(4, 6), meta(6, 2), outputs=(meta(4, 2),))
    with pytest.raises(
        ArgumentValueError,
        match="a row names other, but the arguments are self, mat2 and the results out",
    ):
        call.row(self=S(0), other=R)


def test_an_argument_comes_before_a_result_of_the_same_name() -> None:
    args: tuple[Any, ...] = (*[meta(2, 3, 5, 4)] * 5, meta(2, 3, 5), 0.0, False)
    call = call_of(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *args, outputs=args[1:4]
    )
    row = call.row(out=S(0), grad_query=S(1))
    assert row.inputs[4] == S(0)
    assert row.outputs == (S(1), R, R)
    assert next(call.linear("grad_out")) == Row((P("sum"), *[R] * 5), (P("sum"),) * 3)


def test_what_an_operator_writes_is_its_result_if_it_returns_nothing() -> None:
    def rows(call: OpCall) -> list[Row]:
        return [call.row(self=S(0), other=S(0), out=S(0)), call.row(other=S(0), out=S(0))]

    call = call_of(aten._foreach_add_.List, meta(4), meta(4))
    assert Rule(rows).rows_of(call) == [Row((S(0), S(0)), ())]


def test_in_place_and_out_forms_name_what_they_write() -> None:
    x, y = meta(4), meta(4)
    in_place = call_of(aten.add_.Tensor, x, y, outputs=(x,))
    assert (in_place.written, in_place.rewritten, in_place.fixed, in_place.aliased) == (
        (0,),
        (0,),
        ((0, 0),),
        (0,),
    )
    out = call_of(aten.add.out, x, y, outputs=(x,), out=meta(4))
    assert (out.written, out.rewritten, out.fixed, out.aliased) == ((), (), (), (2,))
    functional = call_of(aten.add.Tensor, x, y, outputs=(x,))
    assert (functional.written, functional.aliased) == ((), (None,))


@pytest.mark.parametrize(
    ("op", "is_view", "is_random", "returns"),
    [
        (aten.relu.default, False, False, ("out",)),
        (aten.relu_.default, False, False, ("out",)),
        (aten.view.default, True, False, ("out",)),
        (aten.split.Tensor, True, False, ("out",)),
        (aten.uniform_.default, False, True, ("out",)),
        (aten.topk.values, False, False, ("values", "indices")),
        (aten.var_mean.correction_out, False, False, ("out0", "out1")),
        (aten._foreach_add_.List, False, False, ()),
        (aten.equal.default, False, False, ()),
    ],
)
def test_a_schema_is_read_once(
    op: Any, is_view: bool, is_random: bool, returns: tuple[str, ...]
) -> None:
    schema = schema_of(op)
    assert (schema.is_view, schema.is_random, schema.returns) == (is_view, is_random, returns)
    assert schema_of(op) is schema
    assert schema.returns_only_tensors == (op is not aten.equal.default)


def test_shapes_are_data_dependent_where_tensors_are_returned_and_none_is_known() -> None:
    assert call_of(aten.nonzero.default, meta(4)).has_data_dependent_shape
    assert not call_of(aten._foreach_add_.List, meta(4), meta(4)).has_data_dependent_shape
    assert not call_of(aten.equal.default, meta(4), meta(4)).has_data_dependent_shape
    assert not call_of(aten.unbind.int, meta(0, 3)).has_data_dependent_shape


@pytest.mark.parametrize("dim", [0, 1])
def test_a_dim_without_elements_is_unbound_into_no_tensors(dim: int) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(torch.zeros(0, 3).movedim(0, dim), mesh, [placement])
            assert x.unbind(dim) == ()


def test_arguments_have_names_and_defaults() -> None:
    x = meta(2, 3, 4)
    call = call_of(aten.sum.dim_IntList, x, [-1, 0], outputs=(meta(3),))
    assert (call.dims(), call["keepdim"], call.get("missing", 7)) == ((0, 2), False, 7)
