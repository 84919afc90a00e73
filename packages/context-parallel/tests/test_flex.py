"""`flex_attention` in a block.  Covers: flex.py, interceptions.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from shoal_context_parallel import (
    Documents,
    LayoutError,
    UnsupportedAttentionError,
    context_parallel,
    context_parallel_unshard,
)
from shoal_mesh.testing import all_ranks, on_ranks

LENGTH = 20

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def causal(row: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def window(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (query >= key) & (query - key < 5)


def distance(score: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
    return score + (key - query) * 0.1 * (head + 1)


Mod = Callable[..., Any] | None


def mask_of(mod: Mod, length: int) -> Any:
    if mod is None:
        return None
    return create_block_mask(mod, None, None, length, length, device="cpu")


def attention_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, LENGTH, 8, generator=generator) for _ in range(3)]


def attend(qkv: list[Tensor], mask: Any = None, score: Mod = None) -> Tensor:
    query, key, value = qkv
    return flex_attention(query, key, value, score_mod=score, block_mask=mask)


@torch.no_grad()  # it cannot run a backward on CPU
@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize(
    ("mask_mod", "score_mod"),
    [(None, None), (causal, None), (None, distance), (window, distance)],
)
@on_ranks(2, timeout=300)
def test_masks_and_scores_by_global_positions(mask_mod: Mod, score_mod: Mod, layout: Any) -> None:
    # It attended to this rank's keys, and counted positions from 0 on every rank.
    whole = attention_inputs()
    expected = attend(whole, mask_of(mask_mod, LENGTH), score_mod)
    for length in (LENGTH, None):
        buffers = [tensor.clone() for tensor in whole]
        with context_parallel(
            all_ranks(), buffers=buffers, buffer_seq_dims=[2, 2, 2], layout=layout
        ):
            mask = mask_of(mask_mod, length or buffers[0].shape[2])
            out = attend(buffers, mask, score_mod)
            (got,) = context_parallel_unshard(all_ranks(), [out], [2])
        torch.testing.assert_close(got, expected)


@torch.no_grad()
@on_ranks(2, timeout=300)
def test_documents_and_windows_of_the_block() -> None:
    whole = attention_inputs()
    ids = torch.tensor([0] * 8 + [1] * 12)

    def masked(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < 5) & (ids[query] == ids[key])

    expected = attend(whole, mask_of(masked, LENGTH))
    buffers = [tensor.clone() for tensor in whole]
    with context_parallel(
        all_ranks(),
        buffers=buffers,
        buffer_seq_dims=[2, 2, 2],
        window=(4, None),
        documents=Documents.from_ids(ids),
    ):
        mask = mask_of(causal, buffers[0].shape[2])
        out = attend(buffers, mask)
        (got,) = context_parallel_unshard(all_ranks(), [out], [2])
    torch.testing.assert_close(got, expected)


@torch.no_grad()
@on_ranks(2, timeout=300)
def test_a_mask_that_reads_local_tensors_is_refused() -> None:
    buffers = [*attention_inputs(), torch.tensor([0] * 8 + [1] * 12)]
    with context_parallel(all_ranks(), buffers=buffers, buffer_seq_dims=[2, 2, 2, 0]):
        *tensors, ids = buffers

        def masked(row: Any, head: Any, query: Any, key: Any) -> Any:
            return ids[query] == ids[key]

        mask = mask_of(masked, len(ids))
        with pytest.raises(UnsupportedAttentionError, match="tensors of the whole sequence"):
            attend(tensors, mask)


@torch.no_grad()
@on_ranks(2, timeout=300)
def test_attention_of_other_tensors_is_refused_on_all_ranks() -> None:
    buffers = attention_inputs()
    with (
        context_parallel(all_ranks(), buffers=buffers, buffer_seq_dims=[2, 2, 2]),
        pytest.raises(LayoutError, match="outside of context parallelism"),
    ):
        attend(attention_inputs())
