"""Rows of operators that look up, move or order elements, each against the unsharded tensor.

Covers: rules/index/, rules/shape/rearrangement.py, rules/math/ordering.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor.rules.index.data_dependent import DATA_DEPENDENT
from shoal_dtensor.rules.index.gather_scatter import GATHER_SCATTER
from shoal_dtensor.rules.index.indexing import INDEXING
from shoal_dtensor.rules.math.ordering import ORDERING
from shoal_dtensor.rules.shape.rearrangement import REARRANGEMENT
from shoal_dtensor.rules.shape.slicing import SLICING
from shoal_dtensor.testing import validate

aten = torch.ops.aten
# Those of views are in test_views.py, embeddings in test_collectives_of_rules_on_ranks.py and
# test_all_rules.py.
ELSEWHERE = ("diagonal", "diagonal_backward", "embedding", "embedding_dense_backward")
TABLES = (
    *(DATA_DEPENDENT, GATHER_SCATTER, INDEXING, ORDERING, REARRANGEMENT),
    {op: rule for op, rule in SLICING.items() if "_scatter" in op.__name__},
)
GENERATOR = torch.Generator().manual_seed(0)


def sample(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def A(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def T(*values: Any) -> Tensor:
    return torch.tensor(values)


X, N, G = sample(4, 6, 5), numbers(9, 7, 5), numbers(6, 4, 6, 5)
D = torch.randperm(60, generator=GENERATOR).reshape(3, 4, 5).double()
PERM = torch.randperm(6, generator=GENERATOR)[None, :, None].expand(4, 6, 5).contiguous()
NANS = T(1.0, float("nan"), 3, 3, 2, 5, float("nan"), 5)
CASES: list[tuple[Any, ...]] = (
    [
        (aten._index_put_impl_.default, (X, [T(0, 3, 1)], A(6, 5))),
        (aten._unsafe_index.Tensor, (X, [None, T(0, 3)])),
        (aten._unsafe_index_put.default, (X, [T(0, 3, 0)], A(6, 5), True)),
        (aten.index_fill.int_Tensor, (X, 1, T(0, 5), torch.tensor(7.0).double())),
        (aten.index_fill_.int_Scalar, (X, 0, T(3), 7.0)),
        (aten.scatter_.reduce, (X, 1, G, sample(4, 6, 5)), {"reduce": "add"}),
        (aten.scatter_.value_reduce, (X, 1, G, 3.0), {"reduce": "multiply"}),
        (aten.cat.default, ([X, X + 1, X[:, :2]], 1)),
        (aten.cat.default, ([X, torch.empty(0), X], -1)),
        (aten.cat.default, ([A(3), A(2), A(5)],)),
        (aten.cat.default, ([X, N.new_ones(4, 2, 5)], 1)),
        (aten.cat.default, ([X, N.new_ones(1, 6, 5)], 0)),
        (aten.stack.default, ([X, X + 1], 1)),
        (aten.stack.default, ([X, X + 1], -1)),
        (aten.constant_pad_nd.default, (X, [1, 2, 0, 3])),
        (aten.constant_pad_nd.default, (X, [-1, 2, 1, -3], 7.0)),
        (aten.constant_pad_nd.default, (X, [-1, -1, -2, -3], 0.0)),
        (aten.constant_pad_nd.default, (X, [-4, 2, -5, 3], 1.0)),
        (aten.reflection_pad1d.default, (X, [1, 2])),
        (aten.replication_pad2d.default, (X[None], [1, 2, 1, 1])),
        (aten.reflection_pad1d_backward.default, (sample(4, 6, 8), X, [1, 2])),
        (aten.tril.default, (X,)),
        (aten.tril.default, (X, -1)),
        (aten.triu.default, (X, 1)),
        (aten.triu_.default, (X, 2)),
        (aten.roll.default, (X, [2], [1])),
        (aten.roll.default, (X, [2, -3], [1, 0])),
        (aten.roll.default, (X, [3])),
        (aten.roll.default, (X, [2, 3], [1, 1])),
        (aten.flip.default, (X, [1])),
        (aten.flip.default, (X, [0, -1])),
        (aten.flip.default, (X, [])),
        (aten.rot90.default, (X, 1, [0, 1])),
        (aten.repeat.default, (X, [1, 1, 1])),
        (aten.repeat.default, (X, [2, 1, 3, 1])),
        (aten.repeat.default, (X, [2, 3, 1])),
        (aten.repeat.default, (X, [0, 1, 1])),
        (aten.repeat.default, (X[:, :0], [2, 3, 1])),
        (aten.roll.default, (X[:, :0], [2, 1], [1, 0])),
        (aten.flip.default, (X[:, :0], [1])),
        (aten.constant_pad_nd.default, (X[:, :0], [0, 0, 2, 1])),
    ]
    + [
        (op, (X, d))
        for op in (
            aten.cumsum.default,
            aten.cumprod.default,
            aten.logcumsumexp.default,
            aten.cummax.default,
            aten.cummin.default,
        )
        for d in (0, 1, -1)
    ]
    + [
        (aten.cumsum.default, (N, 0)),
        (aten.cumsum_.default, (X, 1)),
        (aten.cummax.default, (NANS, 0)),
        (aten.cummin.default, (N, 0)),
        (aten.cumprod_.default, (X, 0)),
        (aten.cumsum.default, (torch.tensor(3.0), 0)),
        (aten.sort.default, (D, 1)),
        (aten.sort.default, (D, 0, True)),
        (aten.sort.stable, (N,), {"stable": True, "dim": 0}),
        (aten.sort.default, (A(13).sin(),)),
        (aten.topk.default, (D, 2, 1)),
        (aten.topk.default, (D, 3, -1, False)),
        (aten.topk.default, (D, 5)),
        (aten.kthvalue.default, (D, 2, 1)),
        (aten.median.dim, (D, 1, True)),
        (aten.nanmedian.dim, (D, 0)),
        (aten.mode.default, (D, 2)),
        (aten.median.default, (D,)),
        (aten.argmax.default, (X,)),
        (aten.argmax.default, (N,)),
        (aten.argmin.default, (X, 1)),
        (aten.argmax.default, (N, 0, True)),
        (aten.max.dim, (X, 1)),
        (aten.max.dim, (N, 0)),
        (aten.min.dim, (X, 2, True)),
        (aten.max.dim, (N > 4, 0)),
        (aten.argmax.default, (NANS, 0)),
        (aten.argmin.default, (NANS,)),
        (aten.argmax.default, (torch.tensor(1.0),)),
        (aten.aminmax.default, (X,)),
        (aten.aminmax.default, (X,), {"dim": 1, "keepdim": True}),
        (aten.aminmax.default, (N,), {"dim": 0}),
        (aten.gather.default, (X, 1, G)),
        (aten.gather.default, (X, 1, G[:2, :3])),
        (aten.gather.default, (X.abs() > 1, 1, G)),
        (aten.gather.default, (X, -1, G[..., :3] % 5)),
        (aten.index_select.default, (X, 1, torch.tensor([0, 5, 2, 2]))),
        (aten.index_select.default, (X, 0, torch.tensor([3]))),
        (aten.index_select.default, (X, 0, torch.tensor(3))),
        (aten.scatter_add.default, (X, 1, G, sample(4, 6, 5))),
        (aten.scatter_add.default, (X, 1, G[:, :4], sample(4, 6, 5))),
        (aten.scatter_add_.default, (X, 1, G, sample(4, 6, 5))),
        (aten.scatter.src, (X, 1, PERM, sample(4, 6, 5))),
        (aten.scatter.value, (X, 1, G, 3.0)),
        (aten.scatter_.value, (X, 0, G[:1] % 4, 3.0)),
        (aten.scatter_.src, (X, 1, PERM[:, :4].contiguous(), sample(4, 6, 5))),
        (aten.scatter.reduce, (X, 1, G, sample(4, 6, 5)), {"reduce": "multiply"}),
        (aten.scatter.value_reduce, (X, 1, G, 2.0), {"reduce": "add"}),
    ]
    + [
        (aten.scatter_reduce.two, (X, 1, G, sample(4, 6, 5), r), {"include_self": s})
        for r in ("sum", "prod", "mean", "amax", "amin")
        for s in (True, False)
    ]
    + [
        (aten.scatter_reduce_.two, (X, 1, G, sample(4, 6, 5), "amax")),
        (aten.index_add.default, (X, 1, torch.tensor([0, 5, 2, 2]), sample(4, 4, 5)), {"alpha": 2}),
        (aten.index_add_.default, (X, 0, torch.tensor([0, 3]), sample(2, 6, 5))),
        (aten.index_copy.default, (X, 1, torch.tensor([0, 5, 2]), sample(4, 3, 5))),
        (aten.index_copy_.default, (X, 1, torch.tensor([0, 5, 2]), sample(4, 3, 5))),
        (aten.index_reduce.default, (X, 1, torch.tensor([0, 5, 2, 2]), sample(4, 4, 5), "prod")),
        (
            aten.index_reduce.default,
            (X, 0, torch.tensor([0, 3]), sample(2, 6, 5), "mean"),
            {"include_self": False},
        ),
        (aten.index_reduce_.default, (X, 1, torch.tensor([0, 5, 2]), sample(4, 3, 5), "amax")),
        (aten.index_fill.int_Scalar, (X, 1, torch.tensor([0, 5, 2]), 7.0)),
        (aten.index_fill_.int_Tensor, (X, 1, torch.tensor([0, 5, 2]), torch.tensor(7.0).double())),
        (aten.index.Tensor, (X, [torch.tensor([0, 3, 1])])),
        (aten.index.Tensor, (X, [None, torch.tensor([0, -3, 1])])),
        (aten.index.Tensor, (X, [torch.tensor([[0], [3]]), torch.tensor([0, 3, 1])])),
        (aten.index.Tensor, (X, [torch.tensor([0, 3, 1]), None, torch.tensor([0, 3, 1])])),
        (aten.index.Tensor, (X > 0, [None, torch.tensor([0, 3, 1])])),
        (aten.index.Tensor, (X, [None, torch.tensor(3)])),
        (aten.index.Tensor, (X, [X > 0])),
        (aten.index_put.default, (X, [torch.tensor([0, 3, 1])], A(6, 5))),
        (aten.index_put.default, (X, [None, torch.tensor([0, -3, 1])], torch.tensor(2.0).double())),
        (aten.index_put.default, (X, [None, torch.tensor([0, -3, 1])], A(4, 3, 5))),
        (
            aten.index_put_.default,
            (X, [torch.tensor([[0], [3]]), torch.tensor([0, 3, 1])], A(2, 3, 5)),
        ),
        (
            aten.index_put_.default,
            (X, [torch.tensor([[0], [3]]), torch.tensor([0, 3, 1])], A(3, 1)),
        ),
        (
            aten.index_put_.default,
            (X, [torch.tensor([0, 3, 1]), None, torch.tensor([0, 3, 1])], A(3, 6), True),
        ),
        (
            aten.index_put.default,
            (X, [torch.tensor([0, 3, 0]), torch.tensor([0, 3, 0])], A(3, 5), True),
        ),
        (aten._index_put_impl.default, (X, [torch.tensor([0, 3, 1])], A(6, 5))),
        (aten.index_put_.default, (X, [X > 0], torch.tensor(0.0).double())),
        (aten.index_put_.default, (X, [X > 0], A(int((X > 0).sum())))),
        (aten.index_put_.default, (X, [None, X[0] > 0], torch.tensor([1.0]).double())),
        (aten.index_put_.default, (X, [X[:, 0, 0] > 0], A(6, 5))),
        (aten.index_put_.default, (X, [X[:, 0, 0] > 0], A(1, 6, 5))),
        (aten.take.default, (X, torch.tensor([[0, 100], [-1, 7]]))),
        (aten.take.default, (A(4), torch.tensor(2))),
        (
            aten._embedding_bag_per_sample_weights_backward.default,
            (
                sample(2, 4),
                sample(6, 4),
                A(5).long() % 6,
                torch.tensor([0, 3]),
                torch.tensor([], dtype=torch.long),
                0,
            ),
        ),
        (aten.put.default, (A(4), torch.tensor(2), A(1))),
        (aten.put.default, (X, torch.tensor([[0, 100], [-1, 7]]), A(2, 2))),
        (aten.put_.default, (X, torch.tensor([[0, 100], [-1, 0]]), A(4), True)),
        (aten.searchsorted.Tensor, (A(9), X * 4)),
        (aten.searchsorted.Tensor, (X.sort(-1)[0], X[..., :2])),
        (aten.searchsorted.Tensor, (A(9), A(3)), {"right": True}),
        (aten.searchsorted.Scalar, (A(9), 3.5)),
        (aten.bucketize.Tensor, (X * 4, A(9))),
        (aten.bucketize.Scalar, (3.0, A(9))),
        (aten.isin.Tensor_Tensor, (N, torch.tensor([1, 2, 5]))),
        (aten.isin.Tensor_Tensor, (N, torch.tensor([1, 2, 5])), {"invert": True}),
        (aten.isin.Tensor_Scalar, (N, 3)),
        (aten.isin.Scalar_Tensor, (3, N)),
        (aten.histc.default, (X, 7)),
        (aten.histc.default, (X, 7, -1, 1)),
        (aten.histc.default, (torch.ones(5), 3)),
        (aten.bincount.default, (torch.tensor([1, 2, 5, 5, 3]),)),
        (aten.bincount.default, (torch.tensor([1, 2, 5, 5, 3]), A(5), 9)),
        (aten.slice_scatter.default, (X, A(4, 2, 5), 1, 1, 5, 2)),
        (aten.slice_scatter.default, (X, A(4, 3, 5), 1, 1, 4)),
        (aten.select_scatter.default, (X, A(4, 5), 1, -2)),
        (aten.diagonal_scatter.default, (X, A(6, 4), 0, 0, 2)),
        (aten.diag_embed.default, (X, 1, 0, 2)),
        (aten.masked_scatter.default, (X, X > 0, A(120))),
        (aten.masked_scatter_.default, (X, X[0] > 0, A(120))),
        (aten.masked_scatter.default, (X[0], X > 0, A(120))),
        (aten.masked_scatter.default, (X[:1, 0], X > 0, A(120))),
        (aten.index.Tensor, (X, [X[:, :, 0] > 0])),
        (aten.index.Tensor, (X, [None, X[0] > 0])),
        (aten._unique2.default, (N, True, True)),
        (aten.nonzero.default, (N % 3,)),
        (aten.masked_select.default, (X, X > 0)),
        (aten._unique2.default, (N,)),
        (aten._unique2.default, (N, True, False, True)),
        (aten._unique.default, (N,)),
    ]
)


for kind in ("reflection", "replication"):
    for n in (1, 2, 3):
        x, padding = sample(2, 3, *[4] * n), [1, 2] * n
        CASES += [
            (getattr(aten, f"{kind}_pad{n}d").default, (x, padding)),
            (
                getattr(aten, f"{kind}_pad{n}d_backward").default,
                (sample(2, 3, *[7] * n), x, padding),
            ),
        ]
CASES += [
    (aten.masked_scatter_backward.default, (X, X > 0, [120])),
    (aten.tril_.default, (X, 1)),
    (aten.nanmedian.default, (D,)),
    (aten.nonzero_static.default, (N,), {"size": 9}),
    (aten.unique_dim.default, (N, 0)),
    (aten.unique_consecutive.default, (N,)),
    (aten.repeat_interleave.Tensor, (T(2, 0, 3),)),
    (aten.one_hot.default, (N, 9)),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_every_row_gives_what_the_unsharded_tensor_gives(case: tuple[Any, ...]) -> None:
    op, args, kwargs = (*case, {})[:3]
    assert validate(op, *args, **kwargs).wrong == []


def test_every_operator_has_a_case() -> None:
    known = {
        op for table in TABLES for op in table if not any(a.is_out for a in op._schema.arguments)
    }
    known = {
        op
        for op in known
        if op.__name__.partition(".")[0] not in ELSEWHERE and "_embedding_bag" not in str(op)
    }
    # no rows, and no dense result: test_plain_tensors.py
    known = {op for op in known if "_sparse" not in str(op)}
    assert known - {case[0] for case in CASES} == set()
