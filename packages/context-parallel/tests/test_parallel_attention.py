"""Attention of a sharded sequence, by each method.

Covers: {parallel_attention,argument_checks,context_options,block_attention,rotations,ulysses}.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import get_rank, get_world_size
from torch.nn.functional import scaled_dot_product_attention

from dense_attention import Sample, Window, dense_mask, sample
from shoal_context_parallel import (
    Documents,
    LayoutError,
    SecondOrderError,
    SequenceLayout,
    UnsupportedAttentionError,
    context_parallel_attention,
)
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh, lockstep
from shoal_mesh.testing import all_ranks, counts, fake_world, on_ranks

METHODS = ("allgather", "ring", "ulysses")
NO_WINDOW: Window = (None, None)


def assert_as_one_device(
    whole: Sample, layout: SequenceLayout, mesh: DeviceMesh | None = None, **options: Any
) -> None:
    """Output and gradients of this rank's positions."""
    mesh = mesh or all_ranks()
    rank = mesh.get_local_rank()
    q, k, v = (layout.shard(x, 2, rank).requires_grad_() for x in whole.tensors)
    out = context_parallel_attention(q, k, v, mesh, layout=layout, enable_gqa=True, **options)
    torch.testing.assert_close(out, layout.shard(whole.out, 2, rank))
    grads = torch.autograd.grad(out, (q, k, v), layout.shard(whole.seed, 2, rank))
    for got, expected in zip(grads, whole.grads, strict=True):
        torch.testing.assert_close(got, layout.shard(expected, 2, rank))


@on_ranks(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention_of_one_device(method: str, causal: bool) -> None:
    for length in (16, 13, 3):  # even, uneven, and empty shards
        for heads, shared, width in ((4, 2, 8), (3, 1, 5)):
            mask = dense_mask(length, causal, NO_WINDOW, None)
            whole = sample(length, mask, heads=heads, shared=shared, value_width=width)
            for layout in (
                SequenceLayout.contiguous(length, 4),
                SequenceLayout.head_tail(length, 4),
            ):
                assert_as_one_device(whole, layout, is_causal=causal, method=method)


@on_ranks(4)
@pytest.mark.parametrize("method", METHODS)
def test_windows_and_documents(method: str) -> None:
    length = 22
    generator = torch.Generator().manual_seed(1)
    packed = torch.tensor([0] * 9 + [1] * 2 + [2] * 11)
    rows = torch.randint(0, 3, (2, length), generator=generator)
    for causal, window, ids in (
        (True, (4, None), None),
        (False, (2, 3), None),
        (True, NO_WINDOW, packed),
        (False, NO_WINDOW, rows),
        (True, (5, 0), rows),
    ):
        documents = None if ids is None else Documents.from_ids(ids)
        whole = sample(length, dense_mask(length, causal, window, ids))
        layouts = [SequenceLayout.head_tail(length, 4), SequenceLayout.per_document([9, 2, 11], 4)]
        for layout in layouts:
            assert_as_one_device(
                whole, layout, is_causal=causal, method=method, window=window, documents=documents
            )


@on_ranks(2)
@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_a_mask_of_the_user_has_this_ranks_rows(method: str) -> None:
    length = 10
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(2, 4, length, length, dtype=torch.double, generator=generator)
    reads = torch.rand(length, length, generator=generator) > 0.4
    layout = SequenceLayout.head_tail(length, 2)
    for full in (bias, bias[:, :1], bias[0], bias[0, 0], reads.fill_diagonal_(True), reads[3]):
        whole = sample(length, full.expand(length, length) if full.ndim == 1 else full)
        mask = layout.shard(full, -2, get_rank()) if full.ndim > 1 else full.view(1, length)
        assert_as_one_device(whole, layout, attn_mask=mask, method=method)


@on_ranks(2)
@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_a_query_that_reads_no_key_has_neither_output_nor_gradient(method: str) -> None:
    # The log-sum of such a query is -inf, and -inf - -inf would be NaN in its softmax.
    reads = torch.ones(10, 10, dtype=torch.bool)
    reads[3] = False
    # all keys of rank 0, and none of rank 1
    reads[7, 5:] = False
    layout = SequenceLayout.contiguous(10, 2)
    for width in (8, 5):  # with 5 plain operators
        whole = sample(10, reads, value_width=width)
        mask = layout.shard(reads, 0, get_rank())
        assert_as_one_device(whole, layout, attn_mask=mask, method=method)


@on_ranks(2)
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_multiplied_by_the_scale(method: str) -> None:
    layout = SequenceLayout.head_tail(10, 2)
    q, k, v = sample(10, dense_mask(10, True, NO_WINDOW, None)).tensors
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    local_q, local_k, local_v = (layout.shard(x, 2, get_rank()) for x in (q, k, v))
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "layout": layout}
    options |= {"method": method, "scale": 0.2}
    out = context_parallel_attention(local_q, local_k, local_v, all_ranks(), **options)
    torch.testing.assert_close(out, layout.shard(expected, 2, get_rank()))


@on_ranks(4)
def test_one_axis_of_two() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    whole = sample(9, dense_mask(9, True, NO_WINDOW, None))
    for method in METHODS:
        assert_as_one_device(
            whole, SequenceLayout.head_tail(9, 2), mesh["context"], is_causal=True, method=method
        )


@on_ranks(4)
def test_collectives_of_each_method() -> None:
    whole = sample(16, dense_mask(16, True, NO_WINDOW, None))
    layout = SequenceLayout.head_tail(16, 4)
    expected = {
        "allgather": ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
        "ring": ({"all_to_all": 3}, {"all_to_all": 7}),
        "ulysses": ({"all_to_all": 2}, {"all_to_all": 2}),
    }
    for method, (before, after) in expected.items():
        q, k, v = (layout.shard(x, 2, get_rank()).requires_grad_() for x in whole.tensors)
        with lockstep(), CommDebugMode() as forward:
            out = context_parallel_attention(
                q,
                k,
                v,
                all_ranks(),
                is_causal=True,
                enable_gqa=True,
                method=method,  # type: ignore[arg-type]  # a literal
            )
        assert counts(forward) == before
        with lockstep(), CommDebugMode() as backward:
            torch.autograd.grad(out.sum(), (q, k, v))
        assert counts(backward) == after


@on_ranks(2)
def test_low_precision_is_summed_in_float32() -> None:
    whole = sample(64, dense_mask(64, True, NO_WINDOW, None), dtype=torch.float32)
    layout = SequenceLayout.head_tail(64, 2)
    for method in METHODS:
        q, k, v = (
            layout.shard(x, 2, get_rank()).bfloat16().requires_grad_() for x in whole.tensors
        )
        out = context_parallel_attention(
            q,
            k,
            v,
            all_ranks(),
            layout=layout,
            is_causal=True,
            enable_gqa=True,
            method=method,  # type: ignore[arg-type]  # a literal
        )
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(
            out, (q, k, v), layout.shard(whole.seed, 2, get_rank()).bfloat16()
        )
        for got, full in zip((out, *grads), (whole.out, *whole.grads), strict=True):
            expected = layout.shard(full, 2, get_rank())
            assert got.dtype == torch.bfloat16
            assert (got.float() - expected).norm() < 0.01 * expected.norm()


def one_rank(**options: Any) -> Tensor:
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    given: dict[str, Any] = {
        "query": q,
        "key": k,
        "value": v,
        "mesh": init_device_mesh("cpu", (2,)),
    } | options
    return context_parallel_attention(**given)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(1, 2, 4, 8)
    with fake_world(2):
        wrong: dict[str, dict[str, Any]] = {
            "query, key and value must have": {"key": x[:, :1], "value": x[:, :1]},
            "equal numbers of heads": {"key": x[..., :3, :], "value": x[..., :3, :]},
            "the method of context": {"method": "other"},
            "a layout's name must be": {"layout": "other"},
            "for 3 ranks": {"layout": SequenceLayout.contiguous(12, 3)},
            "got 4 queries": {"layout": SequenceLayout.contiguous(12, 2)},
            "covers 3 positions": {"documents": Documents.from_cu_seqlens([0, 3])},
            "has 2 batch rows, but the batch has 1": {
                "documents": Documents.from_ids(torch.zeros(2, 8))
            },
            "all 8 columns": {"attn_mask": torch.zeros(4, 4)},
            "a mesh of one axis": {"mesh": init_device_mesh("cpu", (1, 2))},
        }
        for message, options in wrong.items():
            with pytest.raises(LayoutError, match=message):
                one_rank(**options)
        with pytest.raises(UnsupportedAttentionError, match="attn_mask"):
            one_rank(attn_mask=torch.zeros(4, 8), method="ulysses")
        with pytest.raises(UnsupportedAttentionError, match="attn_mask"):
            one_rank(attn_mask=torch.zeros(4, 8, requires_grad=True))


@on_ranks(2)
def test_second_derivatives_are_refused() -> None:
    for method in METHODS:
        q = torch.randn(1, 2, 4, 8, requires_grad=True)
        call: Any = context_parallel_attention
        out = call(q, q, q, all_ranks(), method=method)
        with pytest.raises(SecondOrderError, match="cannot be differentiated twice"):
            torch.autograd.grad(out.sum(), q, create_graph=True)
    assert get_world_size() == 2
