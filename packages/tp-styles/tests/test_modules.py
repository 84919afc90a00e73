"""Convolutions, Bilinear, embedding bags and multi-head attention on real ranks, in float64.

Covers: heads.py, lowering/channels.py, lowering/attention.py, lowering/embedding.py, lowering/forward.py.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    RowwiseParallel,
    SecondOrderError,
    SequenceParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from shoal_tp_styles.testing import MLP, all_ranks, assert_same_parameters, own_part

CONVS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv1d, (3, 6, 9)),
    (nn.Conv2d, (4, 6, 5, 5)),
    (nn.Conv3d, (4, 6, 4, 4, 4)),
]


@on_ranks(4)
@pytest.mark.parametrize(("kind", "shape"), CONVS)
@pytest.mark.parametrize("gathered", [False, True])
def test_convolution_pairs(kind: Any, shape: tuple[int, ...], gathered: bool) -> None:
    single: Any = nn.Sequential(kind(6, 10, 3, padding=1), nn.ReLU(), kind(10, 6, 3)).double()
    module: Any = copy.deepcopy(single)
    first = ColwiseParallel(output_layouts=Replicate() if gathered else None)
    second = RowwiseParallel(input_layouts=Replicate() if gathered else None)
    parallelize_module(module, all_ranks(), {"0": first, "2": second})
    full = torch.randn(shape, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, got = single(x), module(y)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
def test_bilinear_and_embedding_bag() -> None:
    single: Any = nn.Bilinear(5, 7, 10).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), ColwiseParallel(output_layouts=Replicate()))
    full = [torch.randn(3, 5, dtype=torch.double), torch.randn(3, 7, dtype=torch.double)]
    theirs = [x.clone().requires_grad_() for x in full]
    ours = [x.clone().requires_grad_() for x in full]
    single(*theirs).square().sum().backward()
    module(*ours).square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert_same_parameters(module, single)
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(9, 10, mode=mode).double()
        parallel = parallelize_module(copy.deepcopy(bag), all_ranks(), ColwiseParallel())
        tokens, offsets = torch.randint(9, (12,)), torch.tensor([0, 5, 5, 9])
        out = parallel(tokens, offsets)
        torch.testing.assert_close(out, own_part(bag(tokens, offsets), 1))
        out.square().sum().backward()
        bag(tokens, offsets).square().sum().backward()
        assert_same_parameters(parallel, bag)


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(heads: int, batch_first: bool, weights: bool) -> None:
    single: Any = nn.MultiheadAttention(24, heads, batch_first=batch_first).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), HeadParallel())
    shape = (3, 4, 24)
    full = torch.randn(shape, dtype=torch.double)
    length, batch = (4, 3) if batch_first else (3, 4)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -1] = True
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    other = torch.randn(shape, dtype=torch.double)
    for options in ({"key_padding_mask": padding}, {"attn_mask": mask}, {}):
        for same in (True, False):
            x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
            k = other
            expected, scores = single(x, x if same else k, x if same else k, need_weights=weights, **options)
            got, ours = module(y, y if same else k, y if same else k, need_weights=weights, **options)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(ours, scores)
            expected.square().sum().backward()
            with CommDebugMode() as mode:
                got.square().sum().backward()
            assert mode.get_total_counts() == 1
            torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize("weights", [True, False])
def test_dropout_of_attention_is_that_of_one_device(heads: int, weights: bool) -> None:
    single: Any = nn.MultiheadAttention(24, heads, dropout=0.4, batch_first=True).double()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), HeadParallel())
    full = torch.randn(2, 5, 24, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    torch.manual_seed(11)
    expected, scores = single(x, x, x, need_weights=weights)
    torch.manual_seed(11)
    got, ours = module(y, y, y, need_weights=weights)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours, scores)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_leaves_along_the_sequence(batch_first: bool) -> None:
    lies = Shard(1 if batch_first else 0)
    single: Any = nn.MultiheadAttention(24, 6, batch_first=batch_first).double()
    nn.init.normal_(single.out_proj.bias)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), HeadParallel(output_layouts=lies))
    full = torch.randn((3, 8, 24) if batch_first else (8, 3, 24), dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, _ = single(x, x, x)
    got, _ = module(y, y, y)
    torch.testing.assert_close(got, own_part(expected, lies.dim))
    seed = torch.randn_like(full)
    expected.backward(seed)
    got.backward(own_part(seed, lies.dim))
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False])
def test_convolution_by_rows_leaves_in_parts(local: bool) -> None:
    single: Any = nn.Conv1d(7, 10, 3, padding=1).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(2), use_local_output=local)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn(3, 7, 8, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, got = single(x), module(y)
    torch.testing.assert_close(got if local else got.to_local(), own_part(expected, 2))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    (got if local else got.to_local()).backward(own_part(seed, 2))
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(2)
def test_what_cannot_be_cut_is_refused_by_name() -> None:
    axis = all_ranks()
    with pytest.raises(UnsupportedModuleError, match="groups=2"):
        parallelize_module(nn.Conv2d(4, 4, 3, groups=2), axis, ColwiseParallel())
    with pytest.raises(UnsupportedModuleError, match="max_norm"):
        parallelize_module(nn.Embedding(4, 4, max_norm=1.0), axis, RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(UnsupportedModuleError, match="sparse gradients"):
        parallelize_module(nn.Embedding(4, 4, sparse=True), axis, ColwiseParallel())
    with pytest.raises(UnsupportedModuleError, match="HeadParallel has no sharding for Linear"):
        parallelize_module(nn.Linear(4, 4), axis, HeadParallel())
    attention: Any = parallelize_module(nn.MultiheadAttention(8, 2), axis, HeadParallel())
    x = torch.randn(3, 2, 8)
    with pytest.raises(UnsupportedModuleError, match="average them"):
        attention(x, x, x, average_attn_weights=False)
    with pytest.raises(UnsupportedModuleError, match="mask per head"):
        attention(x, x, x, attn_mask=torch.zeros(4, 3, 3))


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


class Norm(nn.Module):
    """A norm as model libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class MyRMSNorm(Norm):
    """Recognised by its name."""


@on_ranks(4)
@pytest.mark.parametrize("kind", ["Norm", "MyRMSNorm"])
def test_norms_of_other_libraries(kind: str) -> None:
    single: Any = {"Norm": Norm, "MyRMSNorm": MyRMSNorm}[kind]()
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), SequenceParallel(use_local_output=True))
    full = torch.randn(2, 8, 8, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_part(full, 1).clone().requires_grad_()
    single(x).square().sum().backward()
    out = module(y)
    assert type(out) is Tensor
    total: Any = out.square().sum()
    total.backward()
    assert x.grad is not None and isinstance(module.weight, DTensor)
    torch.testing.assert_close(y.grad, own_part(x.grad, 1))
    assert_same_parameters(module, single)


@on_ranks(4)
def test_layouts_that_need_a_move() -> None:
    axis = all_ranks()
    single: Any = nn.Linear(8, 12).double()
    full = torch.randn(8, 8, dtype=torch.double)
    for style, arrive, leave in (
        (ColwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(0)), 1, 0),
        (RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1)), 0, 1),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), None, 0),
    ):
        module = parallelize_module(copy.deepcopy(single), axis, style)
        x = full.clone().requires_grad_()
        y = (full if arrive is None else own_part(full, arrive)).clone().requires_grad_()
        single.zero_grad()
        expected, got = single(x), module(y)
        torch.testing.assert_close(got, own_part(expected, leave))
        seed = torch.randn_like(expected)
        expected.backward(seed)
        got.backward(own_part(seed, leave))
        assert x.grad is not None
        torch.testing.assert_close(y.grad, x.grad if arrive is None else own_part(x.grad, arrive))
        assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("layout", [Replicate(), Shard(1), Shard(0)])
@pytest.mark.parametrize("bias", [True, False])
def test_overlapped_reduction(layout: Any, bias: bool) -> None:
    single: Any = nn.Linear(12, 8, bias=bias).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), all_ranks(), RowwiseParallel(output_layouts=layout).overlapped(3)
    )
    full = torch.randn(4, 8, 12, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_part(full, -1).clone().requires_grad_()
    expected, seed = single(x), torch.randn(4, 8, 8, dtype=torch.double)
    with CommDebugMode() as mode:
        got = module(y)
    # Four rows in three chunks are chunks of two; a cut along the chunked dim stays one collective.
    assert mode.get_total_counts() == (1 if layout == Shard(0) else 2)
    torch.testing.assert_close(got, expected if layout == Replicate() else own_part(expected, layout.dim))
    expected.backward(seed)
    got.backward(seed if layout == Replicate() else own_part(seed, layout.dim))
    assert x.grad is not None
    torch.testing.assert_close(y.grad, own_part(x.grad, -1))
    assert_same_parameters(module, single)
