"""Modes that see functions and operators.

Covers: modes in _torch/interception.py and _torch/tensors.py.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal_dtensor._torch.interception import ReplacedAttention
from shoal_dtensor._torch.tensors import dispatch_modes, selectively_checkpointed, unwatched


def test_selective_checkpointing_is_seen_and_left_out() -> None:
    seen: list[tuple[bool, int]] = []

    def block(x: Tensor) -> Tensor:
        seen.append((selectively_checkpointed(), dispatch_modes()))
        with unwatched():
            seen.append((selectively_checkpointed(), dispatch_modes()))
        return x.sin()

    def context() -> Any:
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        make_contexts: Any = create_selective_checkpoint_contexts
        return make_contexts(lambda *_, **__: policy)

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=False, context_fn=context).sum().backward()
    assert seen == [(True, 1), (False, 0)] * 2
    assert not selectively_checkpointed()


def test_attention_is_another_function_inside_of_a_mode() -> None:
    q = torch.ones(1, 1, 2, 4)
    attend = Mock(return_value=q)
    with ReplacedAttention(attend):
        assert functional.scaled_dot_product_attention(q, q, q, is_causal=True) is q
        assert torch.equal(functional.relu(q), q)
    attend.assert_called_once_with(q, q, q, is_causal=True)
