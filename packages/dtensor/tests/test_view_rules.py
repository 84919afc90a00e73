"""Covers: rules/view.py, rules/viewmap.py, rules/slice.py, rules/window.py: every row against plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal_dtensor.chunks import Cut, chunk_sizes
from shoal_dtensor.placements import Partial, Placement, Replicate, Shard
from shoal_dtensor.rules.rule import LocalCall, OpCall, Row, Rule, S, flatten
from shoal_dtensor.rules.slice import SLICE
from shoal_dtensor.rules.view import VIEW
from shoal_dtensor.rules.viewmap import groups, reshape_moves
from shoal_dtensor.spec import Spec, TensorMeta
from shoal_mesh import abstract_mesh

aten = torch.ops.aten
TABLE = VIEW | SLICE
WAYS = 4
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def factor_cuts(steps: int) -> Iterator[tuple[int, ...]]:
    """The default cut, a ragged one, and all with one coordinate."""
    yield chunk_sizes(steps, WAYS)
    yield (0, steps - steps // 3, 0, steps // 3)
    yield (0, 0, steps, 0)


def reduced(op: str, parts: Sequence[Tensor]) -> Tensor:
    total = reduce(REDUCE[op], parts)
    return total / len(parts) if op == "avg" else total


def pieces(value: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    assert sum(sizes) == value.shape[dim]
    return list(value.split_with_sizes(list(sizes), dim))


def meta(value: Any) -> Any:
    return TensorMeta(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


class Case:
    """One row of one call, run on every coordinate of a mesh axis with plain tensors."""

    def __init__(self, rule: Rule, op: Any, args: tuple[Any, ...], row: Row, sizes: tuple[int, ...]) -> None:
        self.rule, self.op, self.row = rule, op, row
        self.cut = Cut((0,), (WAYS,), sizes)
        self.parts: list[list[Tensor]] = []
        inputs = [self._place(t, entry) for t, entry in zip(flatten(args), row.inputs, strict=True)]
        numbered = iter(inputs)
        self.args = tree_map(lambda a: next(numbered) if isinstance(a, Tensor) else a, args)
        self.expected = list(flatten([op(*self.args)]))
        tensors, outputs = tuple(map(meta, inputs)), tuple(map(meta, self.expected))
        self.call = OpCall(op, tuple(tree_map(meta, a) for a in self.args), {}, tensors, outputs)

    def _place(self, tensor: Tensor, entry: Any) -> Tensor:
        if isinstance(entry, S):
            self.parts.append(pieces(tensor, entry.dim, [n * entry.unit for n in self.cut.sizes]))
        elif isinstance(entry, Partial):
            parts = [tensor.roll(i) for i in range(WAYS)]
            self.parts.append(parts)
            return reduced(entry.reduce_op, parts).to(tensor.dtype)
        else:
            self.parts.append([tensor] * WAYS)
        return tensor

    def _spec(self, of: TensorMeta, entry: Any, rank: int) -> Spec:
        placement: Placement = entry if isinstance(entry, Partial) else Replicate()
        if isinstance(entry, S):
            placement = Shard(entry.dim, sizes=self._sizes(entry))
        return Spec(abstract_mesh((WAYS,), rank=rank), (placement,), of.shape, of.stride, of.dtype)

    def _sizes(self, entry: S) -> tuple[int, ...]:
        return (entry.cut(self.cut) if entry.cut else self.cut.scaled(entry.unit)).sizes

    def run(self) -> None:
        results = []
        for rank in range(WAYS):
            local = [parts[rank] for parts in self.parts]
            inputs = tuple(self._spec(t, e, rank) for t, e in zip(self.call.tensors, self.row.inputs, strict=True))
            outputs = tuple(self._spec(t, e, rank) for t, e in zip(self.call.outputs, self.row.outputs, strict=True))
            function = self.rule.local and self.rule.local(LocalCall(self.call, inputs, outputs))
            numbered = iter(local)
            args = tree_map(lambda a: next(numbered) if isinstance(a, Tensor) else a, self.args)  # noqa: B023  used now
            results.append(list(flatten([(function or self.op)(*args)])))
        for i, (entry, expected) in enumerate(zip(self.row.outputs, self.expected, strict=True)):
            self._compare(entry, expected, [result[i] for result in results])

    def _compare(self, entry: Any, expected: Tensor, got: list[Tensor]) -> None:
        if isinstance(entry, S):
            for mine, whole in zip(got, pieces(expected, entry.dim, self._sizes(entry)), strict=True):
                assert mine.shape == whole.shape
                assert torch.equal(mine, whole)
        elif isinstance(entry, Partial):
            torch.testing.assert_close(reduced(entry.reduce_op, got).to(expected.dtype), expected)
        else:
            assert all(torch.equal(mine, expected) for mine in got)


def check_rows(rule: Rule, op: Any, *args: Any) -> int:
    """Run every row of a call that needs no communication; how many cases there were."""
    tensors = tuple(flatten(args))
    outputs = tuple(map(meta, flatten([op(*args)])))
    call = OpCall(op, tuple(tree_map(meta, a) for a in args), {}, tuple(map(meta, tensors)), outputs)
    count = 0
    for row in rule.rows(call):
        bitwise = any(isinstance(e, Partial) and e.reduce_op.startswith("b") for e in row.inputs)
        if row.traffic or (bitwise and any(t.is_floating_point() or t.is_complex() for t in tensors)):
            continue
        cut = next((e for e in row.inputs if isinstance(e, S)), None)
        steps = 0
        if cut is not None:
            steps = tensors[row.inputs.index(cut)].shape[cut.dim] // cut.unit
        for sizes in factor_cuts(steps) if cut is not None else [(0,) * WAYS]:
            Case(rule, op, args, row, sizes).run()
            count += 1
    return count


def filled(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(1, prod(shape) + 1).reshape(shape).to(dtype)


X = filled(4, 6, 5)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, (X, (24, 5))),
    (aten.view.default, (X, (2, 2, 6, 5))),
    (aten.view.default, (X, (8, 3, 5))),
    (aten.view.default, (X, (-1,))),
    (aten.view.default, (X, (4, 1, 6, 5))),
    (aten.view.default, (filled(1, 6), (6,))),
    (aten.view.default, (filled(6, 1), (2, 3))),
    (aten.view.default, (filled(4, 0), (4, 0, 3))),
    (aten._unsafe_view.default, (X, (4, 30))),
    (aten._reshape_alias.default, (X, (24, 5), (5, 1))),
    (aten.unsqueeze.default, (X, 1)),
    (aten.unsqueeze.default, (X, -1)),
    (aten.unsqueeze.default, (filled(1, 5), 0)),
    (aten.squeeze.default, (filled(1, 6, 1, 5),)),
    (aten.squeeze.dim, (filled(1, 1, 5), 0)),
    (aten.squeeze.dim, (filled(1, 6, 1, 5), 2)),
    (aten.squeeze.dim, (X, 0)),
    (aten.squeeze.dims, (filled(1, 6, 1, 5), [0, 1, 2])),
    (aten.permute.default, (X, (2, -3, 1))),
    (aten.transpose.int, (X, -1, 0)),
    (aten.transpose.int, (X, 1, 1)),
    (aten.t.default, (filled(4, 6),)),
    (aten.t.default, (filled(4),)),
    (aten.expand.default, (filled(1, 6, 1), (3, 4, 6, 5))),
    (aten.expand.default, (filled(1, 6, 1), (4, -1, 1))),
    (aten.unfold.default, (filled(8, 3), 0, 2, 2)),
    (aten.unfold.default, (filled(8, 3), 0, 2, 4)),
    (aten.unfold.default, (filled(8, 3), 0, 3, 1)),
    (aten.diagonal.default, (X, 1, 0, 2)),
    (aten.view.dtype, (X, torch.int32)),
    (aten.view.dtype, (filled(4, 8, dtype=torch.float32), torch.float64)),
    (aten.view.dtype, (X, torch.float64)),
    (aten.view_as_real.default, (filled(4, 3, dtype=torch.complex64),)),
    (aten.view_as_complex.default, (filled(4, 3, 2, dtype=torch.float32),)),
    (aten.diagonal_backward.default, (filled(6, 4), (4, 6, 5), 1, 0, 2)),
    (aten.unfold_backward.default, (filled(4, 3, 2, dtype=torch.float64), (8, 3), 0, 2, 2)),
    (aten.unfold_backward.default, (filled(6, 3, 3, dtype=torch.float64), (8, 3), 0, 3, 1)),
    (aten.slice.Tensor, (X, 1, 1, 5)),
    (aten.slice.Tensor, (X, 1, -5, 9**9, 2)),
    (aten.slice.Tensor, (X, 0, 3, 2)),
    (aten.slice.Tensor, (X, -1, None, None, 3)),
    (aten.split.Tensor, (X, 4, 1)),
    (aten.split_with_sizes.default, (X, [1, 0, 5], 1)),
    (aten.unsafe_split.Tensor, (X, 2, 0)),
    (aten.select.int, (X, 0, 2)),
    (aten.select.int, (X, 1, -1)),
    (aten.select.int, (filled(4), 0, 1)),
    (aten.unbind.int, (X, 1)),
    (aten.unbind.int, (filled(4), 0)),
    (aten.slice_backward.default, (filled(4, 4, 5), (4, 6, 5), 1, 1, 5, 1)),
    (aten.slice_backward.default, (filled(4, 3, 5), (4, 6, 5), 1, 0, 6, 2)),
    (aten.slice_backward.default, (filled(4, 0, 5), (4, 6, 5), 1, 3, 3, 1)),
    (aten.select_backward.default, (filled(4, 5), (4, 6, 5), 1, 3)),
    (aten.select_backward.default, (filled(4), (4, 6), -1, -1)),
]


@pytest.mark.parametrize(("op", "args"), CASES, ids=[f"{i}-{op.name()}" for i, (op, _) in enumerate(CASES)])
def test_every_row_gives_what_the_whole_tensor_gives(op: Any, args: tuple[Any, ...]) -> None:
    assert check_rows(TABLE[op], op, *args)


def test_every_operator_of_the_tables_has_a_case() -> None:
    assert {op.name() for op in TABLE} - {op.name() for op, _ in CASES} <= {"aten::unsafe_split_with_sizes"}


SHAPES = st.lists(st.integers(1, 6), max_size=4)


@given(SHAPES, st.data())
def test_reshapes_of_random_shapes(shape: list[int], data: st.DataObject) -> None:
    target, rest = [], prod(shape)
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        target.append(size)
        rest //= size
    target += [rest] if rest != 1 else []
    check_rows(TABLE[aten.view.default], aten.view.default, filled(*shape), tuple(target))
    assert [i for dims, _ in groups(shape, target) for i in dims] == list(range(len(shape)))


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [((8, 6), (48,), {0}), ((48,), (8, 6), {0}), ((8, 4, 6), (32, 6), {0, 2}), ((2, 8, 6), (2, 2, 4, 6), {0, 1, 2})],
)
def test_which_dims_survive_a_reshape(source: tuple[int, ...], target: tuple[int, ...], kept: set[int]) -> None:
    assert {move.source for move in reshape_moves(source, target)} == kept


VIEWS = [case for case in CASES if not case[0].name().endswith(("backward", "unsafe_view", "unsafe_split"))]


@pytest.mark.parametrize(("op", "args"), VIEWS, ids=[f"{i}-{op.name()}" for i, (op, _) in enumerate(VIEWS)])
def test_local_results_are_views_of_local_storage(op: Any, args: tuple[Any, ...]) -> None:
    outputs = tuple(map(meta, flatten([op(*args)])))
    call = OpCall(op, tuple(tree_map(meta, a) for a in args), {}, (meta(args[0]),), outputs)
    for row in TABLE[op].rows(call):
        if isinstance(row.inputs[0], Partial) or row.traffic:
            continue
        entry = row.inputs[0]
        case = Case(TABLE[op], op, args, row, chunk_sizes(args[0].shape[entry.dim] // entry.unit, WAYS))
        base = case.parts[0][0] = case.parts[0][0].clone()
        specs = [
            tuple(case._spec(t, e, 0) for t, e in zip(ts, es, strict=True))
            for ts, es in ((call.tensors, row.inputs), (call.outputs, row.outputs))
        ]
        function = TABLE[op].local and TABLE[op].local(LocalCall(call, *specs))
        for result in flatten([(function or op)(base, *args[1:])]):
            assert not result.numel() or result.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
