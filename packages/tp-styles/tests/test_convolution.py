"""Covers: modules/convolution.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate, Shard
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from shoal_tp_styles.testing import all_ranks, assert_same_parameters, own_shard

CONVS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv1d, (3, 6, 9)),
    (nn.Conv2d, (4, 6, 5, 5)),
    (nn.Conv3d, (4, 6, 4, 4, 4)),
]


def assert_as_one_device(single: Any, plan: Any, shape: tuple[int, ...], lower: bool = True, **options: Any) -> None:
    """Replicated inputs and outputs, and all gradients."""
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), plan, lower=lower)
    full = torch.randn(shape, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, got = single(x, **options), module(y, **options)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize(("kind", "shape"), CONVS)
@pytest.mark.parametrize("gathered", [False, True])
def test_convolution_pairs(kind: Any, shape: tuple[int, ...], gathered: bool) -> None:
    single: Any = nn.Sequential(kind(6, 10, 3, padding=1), nn.ReLU(), kind(10, 6, 3)).double()
    first = ColwiseParallel(output_layouts=Replicate() if gathered else None)
    second = RowwiseParallel(input_layouts=Replicate() if gathered else None)
    assert_as_one_device(single, {"0": first, "2": second}, shape)


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False])
def test_convolution_by_rows_with_a_sharded_output(local: bool) -> None:
    single: Any = nn.Conv1d(7, 10, 3, padding=1).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(2), use_local_output=local)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn(3, 7, 8, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected, got = single(x), module(y)
    torch.testing.assert_close(got if local else got.to_local(), own_shard(expected, 2))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    (got if local else got.to_local()).backward(own_shard(seed, 2))
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


TRANSPOSED: list[tuple[Any, tuple[int, ...]]] = [
    (nn.ConvTranspose1d, (3, 6, 5)),
    (nn.ConvTranspose2d, (6, 4, 3)),
    (nn.ConvTranspose3d, (2, 6, 3, 2, 2)),
]


@on_ranks(4)
@pytest.mark.parametrize(("kind", "shape"), TRANSPOSED)
@pytest.mark.parametrize("channels", [8, 5, 3])  # even, uneven, and fewer than ranks
def test_transposed_convolution_pairs(kind: Any, shape: tuple[int, ...], channels: int) -> None:
    first = kind(6, channels, 3, stride=2, padding=1, output_padding=1)
    single = nn.Sequential(first, nn.Tanh(), kind(channels, 6, 2, dilation=2)).double()
    assert_as_one_device(single, {"0": ColwiseParallel(), "2": RowwiseParallel()}, shape)


@on_ranks(2)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "style", [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())]
)
def test_transposed_convolutions_take_the_size_of_their_output(style: Any, groups: int) -> None:
    single = nn.ConvTranspose2d(6, 9, 3, stride=2, groups=groups).double()
    assert_as_one_device(single, style, (2, 6, 4, 4), output_size=(10, 9))


GATHERED = ColwiseParallel(output_layouts=Replicate())
SPLIT = RowwiseParallel(input_layouts=Replicate())


@on_ranks(4)
@pytest.mark.parametrize("groups", [12, 8, 6, 3])  # even, uneven, an empty shard, fewer groups than ranks
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("style", [GATHERED, SPLIT], ids=["columns", "rows"])
@pytest.mark.parametrize("bias", [True, False])
def test_groups_are_sharded(groups: int, kind: Any, style: Any, bias: bool) -> None:
    single = kind(24, 48, 3, padding=1, groups=groups, bias=bias).double()
    assert_as_one_device(single, style, (3, 24, 5))
    assert_as_one_device(single.zero_grad() or single, style, (24, 5))


@on_ranks(4)
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
@pytest.mark.parametrize("channels", [12, 10, 3])  # even, uneven, and fewer than ranks
def test_depthwise_between_columns_and_rows(channels: int, mode: Any) -> None:
    single = nn.Sequential(
        nn.Conv2d(3, channels, 1),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, padding_mode=mode),
        nn.BatchNorm2d(channels),
        nn.Hardswish(),
        nn.Conv2d(channels, 3, 1),
    ).double()
    plan = {"0": ColwiseParallel(), "1": ChannelParallel(), "2": ChannelParallel(), "4": RowwiseParallel()}
    assert_as_one_device(single, plan, (2, 3, 5, 4))


@on_ranks(4)
def test_groups_that_do_not_divide_stay_complete() -> None:
    # 5 groups of 2 input and 3 output channels: 2, 2, 1 and no groups.
    single = nn.Sequential(nn.Conv1d(4, 10, 1), nn.Conv1d(10, 15, 3, groups=5), nn.Conv1d(15, 4, 1)).double()
    plan: dict[str, Any] = {
        "0": ColwiseParallel().aligned(2),
        "1": ChannelParallel(),
        "2": RowwiseParallel().aligned(3),
    }
    assert_as_one_device(single, plan, (2, 4, 6))
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), {**plan, "0": ColwiseParallel()})
    with pytest.raises(LayoutError, match=r"aligned\(2\)"):
        module(torch.randn(2, 4, 6, dtype=torch.double))


@on_ranks(2)
def test_groups_on_dtensors_without_lowering() -> None:
    single = nn.Sequential(nn.Conv1d(4, 12, 1), nn.Conv1d(12, 12, 3, groups=6), nn.Conv1d(12, 4, 1)).double()
    plan = {"0": ColwiseParallel(), "1": ChannelParallel(), "2": RowwiseParallel()}
    assert_as_one_device(single, plan, (2, 4, 6), lower=False)


class Doubled(nn.Conv1d):
    """A convolution with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@on_ranks(2)
def test_refused_groups() -> None:
    with pytest.raises(UnsupportedModuleError, match="Doubled"):
        parallelize_module(Doubled(4, 4, 3, groups=2), all_ranks(), ColwiseParallel())
    with pytest.raises(UnsupportedModuleError, match="convolutions of several groups"):
        parallelize_module(nn.Conv1d(4, 4, 3), all_ranks(), ChannelParallel())
    with pytest.raises(UnsupportedModuleError, match="overlapped"):
        parallelize_module(nn.Conv1d(4, 4, 3, groups=2), all_ranks(), RowwiseParallel().overlapped(2))
