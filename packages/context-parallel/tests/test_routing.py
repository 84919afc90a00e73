"""Covers: {routed_attention,dtensor_arguments}.py: attention that is routed inside of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import get_rank
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from dense_attention import dense_mask, sample
from shoal_context_parallel import (
    LayoutError,
    UnsupportedAttentionError,
    context_parallel,
)
from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks


@on_ranks(4)
def test_dtensors_on_the_axis_of_the_sequence_and_on_another() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    for length in (8, 5):
        whole = sample(length, dense_mask(length, True, (None, None), None))
        for method in ("ring", "ulysses"):
            q, k, v = (
                distribute_tensor(
                    x, mesh, (Shard(2), Shard(1)), src_data_rank=None
                ).requires_grad_()
                for x in whole.tensors
            )
            with context_parallel(mesh["context"], layout="contiguous", method=method):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            assert isinstance(out, DTensor) and out.placements == (Shard(2), Shard(1))
            torch.testing.assert_close(out.full_tensor(), whole.out)
            grads = torch.autograd.grad(
                out, (q, k, v), distribute_tensor(whole.seed, mesh, out.placements)
            )
            for got, expected in zip(grads, whole.grads, strict=True):
                assert isinstance(got, DTensor)
                torch.testing.assert_close(got.full_tensor(), expected)
        # On the axis of the heads alone: local tensors are this rank's positions already.
        with context_parallel(
            mesh["context"],
            buffers=(buffers := [x.clone() for x in whole.tensors]),
            buffer_seq_dims=[2] * 3,
        ) as layout:
            q, k, v = (
                distribute_tensor(x, mesh["tensor"], (Shard(1),), src_data_rank=None)
                for x in buffers
            )
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert isinstance(out, DTensor) and layout is not None
        torch.testing.assert_close(
            out.full_tensor(), layout.shard(whole.out, 2, mesh.get_local_rank("context"))
        )


@on_ranks(2)
def test_what_is_not_routed_is_refused() -> None:
    x = torch.randn(1, 2, 4, 8)
    mesh = all_ranks()
    placed = {
        p: distribute_tensor(x, mesh, (p,), src_data_rank=None)
        for p in (Shard(2), Shard(1), Replicate())
    }
    along, longer = placed[Shard(2)], torch.randn(1, 2, 4, 8)
    partial = DTensor.from_local(x, mesh, (Partial(),), run_check=False)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with pytest.raises(UnsupportedAttentionError, match=r"dropout_p=0\.1"):
            functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with pytest.raises(UnsupportedAttentionError, match="MultiheadAttention"):
            attention(x[0], x[0], x[0])
        with pytest.raises(LayoutError, match="got 4 queries"):
            functional.scaled_dot_product_attention(longer, longer, longer)
        for each in placed[Shard(1)], placed[Replicate()], partial:
            with pytest.raises(LayoutError, match=r"DTensors must be Shard\(2\)"):
                functional.scaled_dot_product_attention(each, each, each)
        with pytest.raises(LayoutError, match="hold contiguous positions"):
            functional.scaled_dot_product_attention(along, along, along)
        with pytest.raises(LayoutError, match="all plain tensors or all DTensors"):
            functional.scaled_dot_product_attention(along, x, x)
    assert x.shape[2] == 4


@on_ranks(4)
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_what_is_wrong_on_one_rank_is_raised_on_all(method: Any) -> None:
    x = torch.randn(1, 2, 8, 4)
    with (
        context_parallel(all_ranks(), buffers=[x], buffer_seq_dims=[2], method=method),
        CommDebugMode() as mode,
    ):
        mask = torch.ones(2, 2, dtype=torch.bool) if get_rank() == 1 else None
        expected = (
            "2 rows and all 8 columns"
            if get_rank() == 1
            else r"ranks \[1\] .* see the errors that those ranks raised"
        )
        with pytest.raises(LayoutError, match=expected):
            scaled_dot_product_attention(x, x, x, mask)
        other = torch.randn(1, 2, 1 + get_rank() % 2, 4)
        expected = r"ranks \[0, 2\]" if get_rank() % 2 else "got 1 queries"
        with pytest.raises(LayoutError, match=expected):
            scaled_dot_product_attention(other, other, other)
        assert mode.get_total_counts() == 2, "one exchange each time"
        scaled_dot_product_attention(x, x, x)
        counted = mode.get_total_counts()
        scaled_dot_product_attention(x, x, x)
        assert mode.get_total_counts() - counted == counted - 3, "none later in the block"


@on_ranks(2)
def test_outside_of_a_block_nothing_is_routed() -> None:
    x = torch.randn(1, 2, 3 + get_rank(), 8)
    with context_parallel(all_ranks()):
        pass
    out = functional.scaled_dot_product_attention(x, x, x)
    assert out.shape == x.shape


# Layers that carry something from one position to the next, with their inputs of local length.
MIXING: dict[str, Any] = {
    "recurrent": lambda: (nn.LSTM(4, 4, batch_first=True), (2, 4, 4)),
    "recurrent, length first": lambda: (nn.GRU(4, 4), (4, 2, 4)),
    "convolution": lambda: (nn.Conv1d(3, 3, 3, padding=1), (2, 3, 4)),
    "causal convolution": lambda: (nn.Conv1d(3, 3, 3), (2, 3, 6)),
}


@pytest.mark.parametrize("case", MIXING)
@on_ranks(2)
def test_layers_that_run_along_local_positions_are_refused(case: str) -> None:
    # They computed on this rank's positions alone.
    layer, shape = MIXING[case]()
    tokens = torch.zeros(8)
    with (
        context_parallel(all_ranks(), buffers=[tokens], buffer_seq_dims=[0]),
        pytest.raises(UnsupportedAttentionError, match="run along this rank's 4 positions"),
    ):
        layer(torch.randn(shape))


@on_ranks(2)
def test_layers_that_run_along_other_dims_are_computed() -> None:
    tokens = torch.zeros(8)
    with context_parallel(all_ranks(), buffers=[tokens], buffer_seq_dims=[0]):
        assert nn.Conv1d(3, 3, 1)(torch.randn(2, 3, 4)).shape == (2, 3, 4)
        assert nn.Conv1d(3, 3, 3)(torch.randn(2, 3, 9)).shape == (2, 3, 7)
        assert nn.GRU(4, 4, batch_first=True)(torch.randn(4, 5, 4))[0].shape == (4, 5, 4)


@on_ranks(2)
def test_one_head_of_keys_for_all_heads_of_queries() -> None:
    # torch broadcasts it; the block asked for enable_gqa.
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 8, 4, generator=generator)
    key, value = torch.randn(2, 2, 1, 8, 4, generator=generator)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)
    buffers = [query.clone(), key.clone(), value.clone(), expected]
    with context_parallel(all_ranks(), buffers=buffers, buffer_seq_dims=[2] * 4):
        query, key, value, rows = buffers
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(out, rows)
