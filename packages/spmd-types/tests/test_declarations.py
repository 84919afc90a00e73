"""Types that programs declare: registries and boundaries of the checker.

Covers: runtime.py, registries.py, checker.py, state.py, rules.py, rulecheck.py, scalar.py,
    dtensors.py, types.py.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal_spmd_types as spmd
from shoal_dtensor.errors import ArgumentTypeError, ArgumentValueError, SpmdTypeError
from shoal_dtensor.testing import simulate_ranks
from shoal_mesh import DeviceMesh, abstract_mesh, all_reduce as sum_of_ranks, differentiable
from shoal_spmd_types import I, P, PartitionSpec, R, S, V, rules
from shoal_spmd_types.rulecheck import RuleCheckError, rulecheck

MESH = abstract_mesh((4,), ("tp",))


def typed(kind: Any, *shape: int, grad: bool = True) -> Tensor:
    tensor = torch.empty(shape, device="meta", requires_grad=grad)
    spmd.assert_type(tensor, {"tp": kind})
    return tensor


def kind_of(tensor: Tensor) -> Any:
    spec = spmd.get_partition_spec(tensor)
    if spec is None:
        return spmd.get_axis_local_type(tensor, "tp")
    return S(next(dim for dim, axis in enumerate(spec) if axis is not None))


class Product(torch.autograd.Function):
    """A row-wise product with its sum, as one function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        return spmd.all_reduce((x @ weight.t()).detach(), axis, dst=I)

    @staticmethod
    def spmd_typecheck(*, x: Tensor, weight: Tensor, axis: str) -> Any:
        return rules.all_reduce(rules.einsum("mk,nk->mn", x, weight), axis, dst=I)


class Undeclared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Local(Undeclared):
    """A function that each rank computes on its own."""


class Fused(Undeclared):
    """A function with a reference."""


class Stamps(Undeclared):
    @staticmethod
    def spmd_typecheck(outputs: Tensor, *, x: Tensor) -> None:
        spmd.assert_type_like(outputs, x)


class Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def spmd_typecheck(*, x: Tensor) -> Any:
        return rules.einsum("n->n", x)


def apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def test_functions_declare_their_types() -> None:
    spmd.register_local_autograd_function(Local)
    spmd.register_decomposition(Fused, lambda x: x * 2)
    spmd.register_autograd_function(Stamps)
    with spmd.set_current_mesh(MESH), spmd.typecheck(local=False):
        x = typed(S(1), 4, 3)
        assert kind_of(apply(Product, x, typed(S(1), 5, 3), "tp")) is I
        with pytest.raises(SpmdTypeError, match=r"rules\.all_reduce"):
            apply(Product, typed(R, 4, 3), typed(R, 5, 3), "tp")
        with pytest.raises(SpmdTypeError, match="does not declare its types"):
            apply(Undeclared, x)
        assert kind_of(apply(Local, typed(R, 4))) is R
        assert kind_of(apply(Local, typed(I, 4))) is I
        with pytest.raises(SpmdTypeError, match="P"):
            apply(Local, typed(P, 4))
        assert kind_of(apply(Fused, x)) == S(1)
        assert kind_of(apply(Fused, typed(P, 4))) is P
        assert kind_of(apply(Stamps, x)) == S(1)
        with pytest.raises(SpmdTypeError, match="does not account for y"):
            apply(Forgets, typed(R, 4), typed(R, 4))
    # nothing is left of the interception
    assert apply(Undeclared, torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(ArgumentTypeError, match="spmd_typecheck"):
        spmd.register_autograd_function(Undeclared)


def test_operands_of_local_functions_have_types_on_the_same_axes() -> None:
    """Before, an operand without a type on one axis made the checker raise a KeyError."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    spmd.register_local_autograd_function(Sum)
    mesh = abstract_mesh((2, 2), ("dp", "tp"))
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        x = spmd.assert_type(torch.ones(4), {"dp": R, "tp": R})
        with spmd.set_current_mesh(mesh["dp"]):
            y = spmd.assert_type(torch.ones(4), {"dp": R})
        with pytest.raises(SpmdTypeError, match=r"type \{dp: R\} of an operand lacks the axis tp"):
            apply(Sum, x, y)


def test_collectives_of_shoal_mesh_have_types() -> None:
    def program(mesh: DeviceMesh) -> list[Any]:
        comm = mesh.comm("tp")
        kinds = []
        with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
            x = spmd.assert_type(torch.ones(8, 8), {"tp": P})
            shard = spmd.assert_type(torch.ones(8, 8), {"tp": S(0)})
            kinds.append(kind_of(differentiable.all_reduce(x, comm)))
            kinds.append(kind_of(differentiable.all_reduce_replicated(x, comm)))
            kinds.append(kind_of(differentiable.all_gather(shard, comm)))
            kinds.append(kind_of(differentiable.reduce_scatter(x, comm, 1)))
            kinds.append(kind_of(differentiable.all_to_all(shard, comm, 1, 0)))
            with pytest.raises(SpmdTypeError, match="source type is P"):
                differentiable.all_reduce(shard, comm)
            with pytest.raises(SpmdTypeError, match="not differentiable"):
                sum_of_ranks(x, comm)
        return kinds

    assert simulate_ranks(MESH, program)[0] == [R, I, R, S(1), S(1)]


@pytest.mark.parametrize(
    ("rule", "src", "dst"),
    [
        (rules.all_reduce, P, R),
        (rules.all_gather, S(0), R),
        (rules.reduce_scatter, P, S(0)),
        (rules.all_to_all, S(0), S(1)),
        (rules.convert, R, S(0)),
        (rules.reinterpret, R, I),
    ],
)
def test_rules_of_moves_give_a_tensor_the_type(rule: Any, src: Any, dst: Any) -> None:
    # out= was passed to no rule
    with spmd.set_current_mesh(MESH), spmd.typecheck(local=False):
        out = torch.empty(4, 4, device="meta")
        assert rule(typed(src, 4, 4), "tp", src=src, dst=dst, out=out) is out
        assert kind_of(out) == dst
        product = torch.empty(4, 4, device="meta")
        rows = typed(S(0), 4, 4)
        assert rules.einsum("mk,nk->mn", rows, typed(R, 4, 4), out=product) is product
        assert kind_of(product) == S(0)


def test_rules_of_einsum() -> None:
    with spmd.set_current_mesh(MESH), spmd.typecheck(local=False):
        rows = typed(S(0), 4, 3)
        columns = typed(S(1), 4, 3)
        whole = typed(R, 5, 3)
        assert kind_of(rules.einsum("mk,nk->mn", rows, whole)) == S(0)
        assert kind_of(rules.einsum("mk,nk->mn", columns, typed(S(1), 5, 3))) is P
        assert kind_of(rules.einsum("...k,nk->...n", typed(S(0), 2, 4, 3), whole)) == S(0)
        assert kind_of(rules.einsum("n,n->n", typed(P, 4), typed(P, 4), linear_in=((0, 1),))) is P
        assert kind_of(rules.einsum("n,n->n", typed(P, 4), typed(R, 4), linear_in=(0,))) is P
        refused: list[tuple[tuple[Any, ...], str]] = [
            (("mk,nk->mn", columns, whole), "must be sharded"),
            (("m_->m", columns), "must be whole"),
            (("n,n->n", typed(P, 4), typed(P, 4)), "does not pass"),
            (("mk,nk->mn", rows, typed(S(0), 5, 3)), "shards the labels"),
            (("n,n->n", typed(R, 4), typed(I, 4)), "cannot be combined"),
        ]
        for arguments, message in refused:
            with pytest.raises(SpmdTypeError, match=message):
                rules.einsum(*arguments)
        with pytest.raises(ArgumentValueError, match="3 dims"):
            rules.einsum("mkn->m", rows)
        with pytest.raises(ArgumentValueError, match="2 operands"):
            rules.einsum("mk->m", rows, rows)


def test_rulecheck_finds_a_declaration_that_values_contradict() -> None:
    args = [torch.randn(4, 6), torch.randn(8, 6), "tp"]
    report = rulecheck(Product, args)
    assert report is not None
    assert report.rejected
    html = report._repr_html_()
    rows = len(report.checked) + len(report.rejected)
    assert html.count("<tr>") == 1 + rows and "<td>rejected: " in html
    assert all(types["x"]["tp"] == S(1) for types in report.checked)

    class Wrong(Product):
        @staticmethod
        def spmd_typecheck(*, x: Tensor, weight: Tensor, axis: str) -> Any:
            # the function does not reduce what is not partial
            return rules.reinterpret(rules.einsum("mk,nk->mn", x, weight), axis, src=R, dst=I)

    with pytest.raises(RuleCheckError, match="differ from the result of one process"):
        rulecheck(Wrong, args)
    rulecheck(Product, args, {"x": {"tp": S(1)}, "weight": {"tp": S(1)}}, mesh={"tp": 3})
    with pytest.raises(SpmdTypeError):
        rulecheck(Product, args, {"x": {"tp": R}, "weight": {"tp": R}})


def test_boundaries_declare_types_in_both_directions() -> None:
    @spmd.local_map(in_types=({"tp": S(0)}, None), out_types=(PartitionSpec("tp", None), None))
    def sort(x: Tensor, descending: Any) -> tuple[Tensor, int]:
        if spmd.is_type_checking():
            assert kind_of(x.sin()) is V
        return x.sort(0, descending=descending).values, 3

    @spmd.no_typecheck(in_types=({"tp": P},), out_types={"tp": R})
    def total(x: Tensor) -> Tensor:
        return x * 4

    with spmd.set_current_mesh(MESH), spmd.typecheck(local=False):
        values, number = sort(typed(S(0), 4, 2), True)
        assert (kind_of(values), number) == (S(0), 3)
        assert kind_of(total(typed(P, 4))) is R
        for call, message in (
            (lambda: sort(typed(S(1), 4, 2), True), "asserted"),
            (lambda: sort(typed(S(0), 4, 2), typed(R, 2)), "not a tensor"),
            (lambda: total(typed(R, 4)), "asserted"),
        ):
            with pytest.raises(SpmdTypeError, match=message):
                call()
        with pytest.raises(SpmdTypeError, match="S\\(0\\)"):
            typed(S(0), 4, 2).sort(0)
        with spmd.local():
            assert kind_of(typed(S(0), 4, 2).sort(0).values) is V
    for wrong in ({"out_types": spmd.Infer}, {"out_types": {"tp": R}, "in_types": (spmd.Infer,)}):
        with pytest.raises(SpmdTypeError, match="Infer"):
            spmd.local_map(**wrong)
    assert sort(torch.tensor([[1.0], [2.0]]), True)[0].tolist() == [[2], [1]]
    with pytest.raises(ArgumentTypeError, match="out_types"):
        spmd.no_typecheck(in_types=())  # type: ignore[call-overload]  # what is refused


def test_code_that_is_left_unchecked() -> None:
    def metric(x: Tensor) -> Tensor:
        return x.relu()

    spmd.register_no_typecheck(metric)
    with spmd.set_current_mesh(MESH), spmd.typecheck():
        assert not spmd.has_local_type(metric(typed(P, 4)))
        with pytest.raises(SpmdTypeError):
            typed(P, 4).relu()


def test_numbers_with_a_type() -> None:
    with spmd.set_current_mesh(MESH):
        rate: Any = spmd.Scalar(0.5, {"tp": V})
        assert rate.local_type == {spmd.normalize_axis("tp"): V}
        assert (torch.ones(2) * rate).tolist() == [0.5, 0.5]
        with spmd.typecheck():
            x = typed(R, 4)
            assert kind_of(x * rate) is V
            assert kind_of(rate * x) is V
            assert (x * rate).dtype is x.dtype
            with pytest.raises(SpmdTypeError):
                typed(P, 4) * rate
        with pytest.raises(ArgumentTypeError):
            spmd.Scalar(True, {"tp": R})


def test_types_change_where_a_buffer_is_filled() -> None:
    with spmd.set_current_mesh(abstract_mesh((2, 4), ("dp", "tp"))), spmd.typecheck():
        x = spmd.assert_type(torch.zeros(4), R, {"tp": V})
        spmd.mutate_type(x, "tp", src=V, dst=R)
        assert repr(spmd.get_local_type(x)) == "{dp: R, tp: R}"
        spmd.mutate_type(x, src=R, dst=I)
        spmd.mutate_type(x, src=I, dst={"dp": P})
        spmd.mutate_type(x, src={"dp": P, "tp": I}, dst={"dp": V, "tp": R})
        assert repr(spmd.get_local_type(x)) == "{dp: V, tp: R}"
        with pytest.raises(SpmdTypeError, match="not P"):
            spmd.mutate_type(x, "tp", src=P, dst=R)
        assert repr(spmd.get_local_type(spmd.reinterpret_no_grad(x, "tp", dst=I))) == (
            "{dp: V, tp: I}"
        )
        with pytest.raises(SpmdTypeError, match="requires grad"):
            spmd.reinterpret_no_grad(typed(R, 2), "tp", dst=I)
        with pytest.raises(SpmdTypeError, match="one argument"):
            spmd.merge_types({"tp": R}, {"tp": I})
        with pytest.raises(ArgumentTypeError, match="one bare type"):
            spmd.merge_types(R, I)


def test_trace_logs_operators_with_types(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "shoal_spmd_types.trace"),
        spmd.set_current_mesh(MESH),
        spmd.typecheck(),
    ):
        with spmd.trace():
            typed(R, 4).sin()
        typed(R, 4).cos()
    assert len(caplog.records) == 1
    assert "aten.sin" in caplog.text
    assert "{tp: R}" in caplog.text


def test_placements_and_types() -> None:
    from shoal_dtensor import Partial, Replicate, Shard

    pairs = [(Replicate(), I), (Shard(1), S(1)), (Partial("sum"), P)]
    for placement, kind in pairs:
        assert spmd.dtensor_placement_to_spmd_type(placement) == kind
        assert spmd.spmd_type_to_dtensor_placement(kind) == placement
    assert spmd.dtensor_placement_to_spmd_type(Replicate(), Partial()) is R
    with pytest.raises(spmd.DTensorPropagationError):
        spmd.spmd_type_to_dtensor_placement(V)
    with pytest.raises(ArgumentValueError):
        spmd.dtensor_placement_to_spmd_type(Partial("max"))
