"""Covers: lowering/lowered.py, and every lowering under autocast and checkpointing."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import Replicate
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    HeadParallel,
    Heads,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    SecondOrderError,
    parallelize_module,
    unparallelize_module,
)
from small_models import MLP, assert_same_parameters
from toy_modules import Conv1D, FusedGate, SelfAttention


@on_ranks(2)
def test_second_derivatives_are_refused_unless_not_lowered() -> None:
    axis = all_ranks()
    single: Any = nn.Linear(4, 4).double()
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    lowered: Any = parallelize_module(copy.deepcopy(single), axis, ColwiseParallel())
    with pytest.raises(SecondOrderError, match="lower=False"):
        torch.autograd.grad(lowered(x).square().sum(), x, create_graph=True)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_the_plain_module(dtype: torch.dtype) -> None:
    single: Any = MLP()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), MLP.plan)
    full = torch.randn(6, 10)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        expected, got = single(x), module(y)
    assert got.dtype == expected.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    expected.float().square().sum().backward()
    got.float().square().sum().backward()
    assert y.grad is not None and y.grad.dtype == torch.float32
    torch.testing.assert_close(y.grad, x.grad, rtol=0.05, atol=0.05)
    for name, param in module.named_parameters():
        assert param.grad is not None and param.grad.dtype == torch.float32, name


@on_ranks(2)
def test_a_parallel_model_is_freed_copied_and_pickled() -> None:
    axis = all_ranks()
    module: Any = parallelize_module(MLP(), axis, MLP.plan)
    x = torch.randn(3, 10)
    expected = module(x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded: Any = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(loaded(x), expected)
    loaded.net1.weight.data.mul_(2)
    assert not torch.equal(loaded(x), expected)
    gc.disable()
    try:
        ref = weakref.ref(module)
        h = module.net1(x.requires_grad_() * 1.0)
        del module, h
        assert ref() is None, "a reference cycle keeps the model alive"
    finally:
        gc.enable()


@on_ranks(2)
def test_what_a_lowering_reads_of_its_module_is_unpickled_before_it() -> None:
    x = torch.randn(3, 2, 4)
    plan: dict[str, Any] = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "1": RowwiseParallel(),
    }
    transposed = parallelize_module(
        nn.Sequential(nn.Identity(), Conv1D(4, 6)), all_ranks(), {"1": plan["1"]}
    )
    for module, input in (
        (parallelize_module(nn.LSTM(4, 6), all_ranks(), plan["0"]), x),
        (transposed, x.chunk(2, -1)[torch.distributed.get_rank()]),
    ):
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        torch.testing.assert_close(torch.load(buffer, weights_only=False)(input), module(input))


def with_tanh_between(first: nn.Module, second: nn.Module) -> nn.Module:
    """Columns, an activation, rows."""
    return nn.Sequential(first, nn.Tanh(), second)


def linears() -> nn.Module:
    return with_tanh_between(nn.Linear(12, 7), nn.Linear(7, 12))


def transposed_linears() -> nn.Module:
    return with_tanh_between(Conv1D(12, 7), Conv1D(7, 12))


def convolutions() -> nn.Module:
    return with_tanh_between(nn.Conv1d(6, 7, 3, padding=1), nn.Conv1d(7, 6, 1))


def convolutions_around_groups() -> nn.Module:
    return nn.Sequential(nn.Conv1d(6, 15, 1), nn.GroupNorm(3, 15), nn.Conv1d(15, 6, 1))


COLUMNS_ROWS: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}


ADAPTERS = {name: LoRA(base=style, rank=2, train_base=True) for name, style in COLUMNS_ROWS.items()}


FUSED = {
    "fused": PackedColwiseParallel(blocks={"a": Heads(7, 1), "b": Heads(7, 1)}),
    "rows": RowwiseParallel().heads(7, 1),
}


# Name -> how it is built, its plan; all take and give (4, 6, 12), and no width divides by the
# ranks.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "linear": (linears, COLUMNS_ROWS),
    "overlapped": (
        linears,
        {"0": ColwiseParallel(), "2": RowwiseParallel().overlapped(2)},
    ),
    "transposed": (transposed_linears, COLUMNS_ROWS),
    "convolution": (
        convolutions,
        COLUMNS_ROWS,
    ),
    "groups": (
        convolutions_around_groups,
        {
            "0": ColwiseParallel().aligned(5),
            "1": ChannelParallel(),
            "2": RowwiseParallel().aligned(5),
        },
    ),
    "adapters": (linears, ADAPTERS),
    "attention": (partial(SelfAttention, 12, 3), {"inner": HeadParallel()}),
    "fused": (partial(FusedGate, 12, 7), FUSED),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_autocast_and_checkpointing(
    name: str, dtype: torch.dtype | None, reentrant: bool | None
) -> None:
    make, plan = CASES[name]
    torch.manual_seed(5)
    start = make()
    kind = torch.double if dtype is None else torch.float32
    module: Any = parallelize_module(copy.deepcopy(start).to(kind), all_ranks(), plan)
    single: Any = (
        unparallelize_module(copy.deepcopy(module)) if name == "adapters" else start.to(kind)
    )
    full = torch.randn(4, 6, 12, dtype=kind)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        expected = single(x)
        got = module(y) if reentrant is None else checkpoint(module, y, use_reentrant=reentrant)
    assert got.dtype == expected.dtype == (dtype or kind)
    close: dict[str, Any] = {} if dtype is None else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(got, expected, **close)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    got.backward(seed)
    assert x.grad is not None and y.grad is not None and y.grad.dtype == kind
    torch.testing.assert_close(y.grad, x.grad, **close)
    if name == "adapters":
        for param in module.parameters():
            assert param.grad is not None and param.grad.dtype == kind
        return
    for param in module.parameters():
        assert param.grad is not None and param.grad.dtype == kind
    assert_same_parameters(module, single, **close)
