"""Covers: wrong arguments of public functions are typed errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from shoal_context_parallel import (
    Documents,
    SequenceLayout,
    StyleError,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
    set_rotate_method,
)
from shoal_context_parallel.sequence_layout import AttentionMask
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

WRONG = (None, 3, 1.5, "x", [1], {"a": 1}, torch.ones(2), nn.Linear, object())
QUERY = torch.ones(1, 2, 4, 8)


def enter_with_buffers(mesh: Any, buffers: Any) -> None:
    enter(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0, 0]))


def enter_with_dims(mesh: Any, dims: Any) -> None:
    enter(context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=dims))


def enter_with_layout(mesh: Any, layout: Any) -> None:
    buffers = [torch.ones(4)]
    enter(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0], layout=layout))


CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "context_parallel, buffers": enter_with_buffers,
    "context_parallel, dims": enter_with_dims,
    "context_parallel, layout": enter_with_layout,
    "context_parallel, restored": lambda mesh, x: in_block(mesh, no_restore_buffers=given(x)),
    "context_parallel, method": lambda mesh, x: in_block(mesh, method=given(x)),
    "context_parallel, window": lambda mesh, x: in_block(mesh, window=x),
    "context_parallel, documents": lambda mesh, x: in_block(mesh, documents=given(x)),
    "attention, query": lambda mesh, x: context_parallel_attention(x, QUERY, QUERY, mesh),
    "attention, key": lambda mesh, x: context_parallel_attention(QUERY, x, QUERY, mesh),
    "attention, value": lambda mesh, x: context_parallel_attention(QUERY, QUERY, x, mesh),
    "attention, mesh": lambda mesh, x: context_parallel_attention(QUERY, QUERY, QUERY, x),
    "attention, mask": lambda mesh, x: attention(mesh, attn_mask=given(x)),
    "attention, is_causal": lambda mesh, x: attention(mesh, is_causal=x),
    "attention, enable_gqa": lambda mesh, x: attention(mesh, enable_gqa=x),
    "attention, window": lambda mesh, x: attention(mesh, window=x),
    "attention, documents": lambda mesh, x: attention(mesh, documents=given(x)),
    "context_parallel_unshard": lambda mesh, x: context_parallel_unshard(mesh, x, [0]),
    "set_rotate_method": lambda mesh, x: set_rotate_method(x),
}

INTEGERS: tuple[Any, ...] = tuple(wrong for wrong in WRONG if not isinstance(wrong, int))
WRONG_IDS: Any = {}
LAYOUTS: Mapping[str, Callable[[Any], object]] = {
    "SequenceLayout": SequenceLayout,
    "contiguous, length": lambda x: SequenceLayout.contiguous(x, 2),
    "contiguous, ranks": lambda x: SequenceLayout.contiguous(4, x),
    "head_tail, length": lambda x: SequenceLayout.head_tail(x, 2),
    "head_tail, ranks": lambda x: SequenceLayout.head_tail(4, x),
    "per_document, lengths": lambda x: SequenceLayout.per_document([x, 2], 2),
    "per_document": lambda x: SequenceLayout.per_document(WRONG_IDS if x == [1] else x, 2),
    "Documents": Documents,
    "Documents, rows": lambda x: Documents((x,)),
    "from_cu_seqlens": Documents.from_cu_seqlens,
    "from_ids": lambda x: Documents.from_ids(
        WRONG_IDS if isinstance(x, list | torch.Tensor) else x
    ),
    "from_ids, values": lambda x: Documents.from_ids([WRONG_IDS, x]),
    "window": lambda x: AttentionMask(window=(given(x), None)),
}


def given(x: Any) -> Any:
    """Return a wrong value; None is right, or stands for a default."""
    return 0.5 if x is None else x


def in_block(mesh: Any, **options: Any) -> None:
    enter(context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=[0], **options))


def attention(mesh: Any, **options: Any) -> object:
    return context_parallel_attention(QUERY, QUERY, QUERY, mesh, **options)


def enter(block: AbstractContextManager[object]) -> None:
    with block:
        pass


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    for wrong in WRONG:
        with fake_world(2), pytest.raises(StyleError):
            CALLS[call](init_device_mesh("cpu", (2,)), wrong)


@pytest.mark.parametrize("call", LAYOUTS)
def test_wrong_layouts_and_masks(call: str) -> None:
    for wrong in INTEGERS:
        with pytest.raises(StyleError):
            LAYOUTS[call](wrong)


def test_a_window_has_two_bounds() -> None:
    for window in ((1,), (1, 2, 3), (None, -1), (1.5, None)):
        wrong: Any = window
        with pytest.raises(StyleError, match=r"window must be \(left, right\)"):
            AttentionMask(window=wrong)
    assert AttentionMask(window=(2, None)).reach[0] == 2


def test_a_load_balancer_is_a_layout() -> None:
    wrong_values: list[Any] = [wrong for wrong in WRONG if wrong is not None]
    for wrong in wrong_values:
        with fake_world(2):
            mesh = init_device_mesh("cpu", (2,))
            with pytest.raises(StyleError, match="load_balancer must be a SequenceLayout"):
                context_parallel_unshard(mesh, [torch.ones(2)], [0], wrong)
            with pytest.raises(StyleError, match="load_balancer must be a SequenceLayout"):
                context_parallel_shard(mesh, [torch.ones(2)], [0], wrong)
