"""Attention of a sharded sequence in models of transformers: positions, padding, recomputation.

The tests run on real gloo ranks.

Covers: shoal_context_parallel/buffers.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_models import build_model, naming, needs_hf, token_batch
from shoal_context_parallel import (
    Documents,
    LayoutError,
    context_parallel,
    context_parallel_unshard,
)
from shoal_context_parallel.internal import Method
from shoal_mesh import all_reduce
from shoal_mesh.testing import all_ranks, on_ranks


@needs_hf
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
@on_ranks(2, timeout=120)
def test_gradient_checkpointing_of_transformers(method: Method) -> None:
    plain = build_model(attn_implementation="sdpa").train()
    tokens, positions = (
        torch.randint(67, (2, 12), generator=torch.Generator().manual_seed(0)),
        torch.arange(12)[None],
    )
    plain(tokens, position_ids=positions).logits.square().sum().backward()
    for reentrant in (False, True):
        model = copy.deepcopy(plain)
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        buffers = [tokens.clone(), positions.clone()]
        with context_parallel(
            all_ranks(), buffers=buffers, buffer_seq_dims=[1, 1], method=method, layout="contiguous"
        ):
            model(buffers[0], position_ids=buffers[1]).logits.square().sum().backward()
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            torch.testing.assert_close(
                all_reduce(param.grad, all_ranks().comm(0)), expected.grad, msg=f"of {name}"
            )


LENGTH = 16
PACKED = torch.cat([torch.arange(5), torch.arange(11)])[None]


def attend_by_llama(
    layout: Any, method: Any, position_ids: torch.Tensor | None, **more: Any
) -> None:
    """Logits and gradients of a Llama in a block against one process."""
    single, tokens, axis = build_model(), token_batch(2, LENGTH), all_ranks()
    module, given = copy.deepcopy(single), more.pop("attention_mask", None)
    expected = single(
        tokens, position_ids=position_ids, attention_mask=given, use_cache=False
    ).logits
    seed = torch.randn_like(expected)
    expected.backward(seed)
    buffers = [each.clone() for each in (tokens, seed, position_ids, given) if each is not None]
    names = [
        name
        for name, each in (("position_ids", position_ids), ("attention_mask", given))
        if each is not None
    ]
    dims = [1] * len(buffers)
    with context_parallel(
        axis, buffers=buffers, buffer_seq_dims=dims, layout=layout, method=method, **more
    ):
        out = module(
            buffers[0], use_cache=False, **dict(zip(names, buffers[2:], strict=True))
        ).logits
        out.backward(buffers[1])
        (full,) = context_parallel_unshard(axis, [out.detach()], [1])
    torch.testing.assert_close(full, expected.detach())
    for (name, param), other in zip(module.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(all_reduce(param.grad, (axis, 0)), other.grad, msg=naming(name))


@needs_hf
@on_ranks(4, timeout=200)
@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_llama_with_the_positions_of_each_rank(layout: str, method: str) -> None:
    attend_by_llama(layout, method, torch.arange(LENGTH)[None])
    attend_by_llama(layout, method, PACKED, documents=Documents.from_ids([0] * 5 + [1] * 11))


@needs_hf
@on_ranks(2, timeout=200)
@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize("case", ["packed", "packed by rank", "none", "padded"])
def test_llama_with_other_positions_or_padding_is_refused_on_all_ranks(
    layout: str, case: str
) -> None:
    packed = {"packed": PACKED, "packed by rank": torch.arange(LENGTH)[None] % (LENGTH // 2)}
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, -2:] = 0
    with pytest.raises(
        LayoutError,
        match=r"leave out attention_mask, pass documents=|see the errors that those ranks raised",
    ):
        attend_by_llama(
            layout, "ring", packed.get(case), attention_mask=padding if case == "padded" else None
        )
