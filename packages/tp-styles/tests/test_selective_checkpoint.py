"""Selective activation checkpointing: saved tensors are not written to.

Covers: _torch.py, lowering/.
"""

# mypy: disable-error-code="attr-defined, union-attr"
# Gradients are DTensors here, and parameters have attributes of users.

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal_dtensor import Replicate, Shard
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

PRODUCTS = ("mm", "addmm", "linear", "embedding", "convolution", "matmul", "bmm")


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.overloadpacket.__name__ if hasattr(op, "overloadpacket") else ""
    return CheckpointPolicy.MUST_SAVE if name in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


CASES: dict[str, tuple[Any, Any]] = {
    "columns and rows": (mlp, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    "overlapped rows": (mlp, {"0": ColwiseParallel(), "2": RowwiseParallel().overlapped(2)}),
    "adapters": (
        mlp,
        {"0": LoRA(base=ColwiseParallel(), rank=2), "2": LoRA(base=RowwiseParallel(), rank=2)},
    ),
    "fused": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        {"0": PackedColwiseParallel(blocks=2), "1": RowwiseParallel()},
    ),
    "vocabulary": (lambda: nn.Embedding(9, 8), {"": RowwiseParallel(input_layouts=Replicate())}),
    "a norm": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        {
            "0": ColwiseParallel(output_layouts=Shard(0)),
            "1": SequenceParallel(sequence_dim=0, use_local_output=True),
        },
    ),
}


@pytest.mark.parametrize("policy", [save_products, save_all])
@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_gradients_under_selective_checkpointing(name: str, policy: Any) -> None:
    make, plan = CASES[name]
    torch.manual_seed(0)
    start: Any = make().double()
    tokens = isinstance(start, nn.Embedding)
    grads = []
    for selective in (False, True):
        torch.manual_seed(1)
        module = parallelize_module(copy.deepcopy(start), all_ranks(), plan)
        x = (
            torch.arange(8) % 9
            if tokens
            else torch.ones(8, 8, dtype=torch.double).cumsum(0).requires_grad_()
        )

        def run(x: Tensor, module: nn.Module = module) -> Any:
            return module(x if tokens else x * 1)

        if selective:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            out: Any = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        else:
            out = run(x)
        out.square().sum().backward()
        grads.append(
            [None if p.grad is None else p.grad.full_tensor() for p in module.parameters()]
        )
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(checkpointed, plain)


@on_ranks(4)
def test_attention_under_selective_checkpointing() -> None:
    module: Any = parallelize_module(
        nn.MultiheadAttention(8, 4, batch_first=True), all_ranks(), HeadParallel()
    )
    x = torch.ones(2, 3, 8, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    out: Any = checkpoint(
        lambda x: module(x, x, x)[0], x * 1, use_reentrant=False, context_fn=contexts
    )
    out.sum().backward()
    assert x.grad is not None


class CheckpointedDropout(nn.Module):
    """A block that is run again in the backward pass, inside of a model."""

    def __init__(self, context_fn: Any) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.options = {"use_reentrant": False} | ({"context_fn": context_fn} if context_fn else {})

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, **self.options)


@pytest.mark.parametrize(
    "context_fn", [None, partial(create_selective_checkpoint_contexts, save_products)]
)
@on_ranks(4)
def test_dropout_behind_a_plain_module_is_recomputed(context_fn: Any) -> None:
    torch.manual_seed(0)
    start = CheckpointedDropout(context_fn).double()
    grads = []
    for plan in ({}, {"block.2": ColwiseParallel(output_layouts=Replicate())}):
        module = (
            parallelize_module(copy.deepcopy(start), all_ranks(), plan)
            if plan
            else copy.deepcopy(start)
        )
        torch.manual_seed(1)
        x = torch.ones(4, 8, dtype=torch.double).cumsum(0).requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
