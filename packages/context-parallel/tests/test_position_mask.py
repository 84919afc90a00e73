"""Covers: position_mask.py."""

from __future__ import annotations

import pytest
import torch

from shoal_context_parallel import Documents, UnsupportedAttentionError
from shoal_context_parallel.interceptions.position_mask import PositionMask, chunks_as_documents
from shoal_context_parallel.sequence_layout import AttentionMask

RULE = AttentionMask(causal=True, window=(3, None))


def test_a_mask_has_a_shape_and_keeps_its_rule() -> None:
    mask = PositionMask.of(RULE, 2, 8, "cpu")
    assert mask.shape == (1, 1, 2, 8)
    assert mask.dtype == torch.bool
    for passed_on in (mask[..., :4], mask.to("cpu"), mask.expand(3, -1, -1, -1), mask.contiguous()):
        assert isinstance(passed_on, PositionMask)
        assert passed_on.rule is RULE


def test_elements_of_a_mask_are_refused() -> None:
    mask = PositionMask.of(RULE, 2, 8, "cpu")
    for name in ("sum", "tolist", "logical_not"):
        with pytest.raises(UnsupportedAttentionError, match=f"^{name} of the mask"):
            getattr(mask, name)()


def test_chunks_divide_documents() -> None:
    documents = Documents.from_ids([0, 0, 1, 1, 1, 1, 2])
    chunked = chunks_as_documents(3, 7, documents)
    # the chunks 0-2, 3-5 and 6, each divided where a document ends
    assert chunked == Documents.from_ids([0, 0, 1, 2, 2, 2, 3])
