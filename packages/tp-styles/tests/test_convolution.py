"""Convolutions by columns, by rows and in groups.  Covers: modules/channels.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from one_device import as_one_device
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)

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
    first = ColwiseParallel(output_layouts=Replicate() if gathered else None)
    second = RowwiseParallel(input_layouts=Replicate() if gathered else None)
    as_one_device(
        single, {"0": first, "2": second}, all_ranks(), [torch.randn(shape, dtype=torch.double)]
    )


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False])
def test_convolution_by_rows_with_a_sharded_output(local: bool) -> None:
    single = nn.Conv1d(7, 10, 3, padding=1).double()
    style = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(2), use_local_output=local
    )
    x = torch.randn(3, 7, 8, dtype=torch.double)
    run = as_one_device(single, style, all_ranks(), [x], leaving=Shard(2))
    assert isinstance(run.outputs[0], DTensor) is not local


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
    as_one_device(
        single,
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        all_ranks(),
        [torch.randn(shape, dtype=torch.double)],
    )


@on_ranks(2)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "style",
    [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())],
)
def test_transposed_convolutions_take_the_size_of_their_output(style: Any, groups: int) -> None:
    single = nn.ConvTranspose2d(6, 9, 3, stride=2, groups=groups).double()
    x = torch.randn(2, 6, 4, 4, dtype=torch.double)
    as_one_device(single, style, all_ranks(), [x], output_size=(10, 9))


GATHERED = ColwiseParallel(output_layouts=Replicate())
SPLIT = RowwiseParallel(input_layouts=Replicate())


@on_ranks(4)
# even, uneven, an empty shard, fewer groups than ranks
@pytest.mark.parametrize("groups", [12, 8, 6, 3])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("style", [GATHERED, SPLIT], ids=["columns", "rows"])
@pytest.mark.parametrize("bias", [True, False])
def test_groups_are_sharded(groups: int, kind: Any, style: Any, bias: bool) -> None:
    single = kind(24, 48, 3, padding=1, groups=groups, bias=bias).double()
    as_one_device(single, style, all_ranks(), [torch.randn(3, 24, 5, dtype=torch.double)])
    as_one_device(single, style, all_ranks(), [torch.randn(24, 5, dtype=torch.double)])


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
    plan = {
        "0": ColwiseParallel(),
        "1": ChannelParallel(),
        "2": ChannelParallel(),
        "4": RowwiseParallel(),
    }
    as_one_device(single, plan, all_ranks(), [torch.randn(2, 3, 5, 4, dtype=torch.double)])


@on_ranks(4)
def test_groups_that_do_not_divide_stay_complete() -> None:
    # 5 groups of 2 input and 3 output channels: 2, 2, 1 and no groups.
    single = nn.Sequential(
        nn.Conv1d(4, 10, 1), nn.Conv1d(10, 15, 3, groups=5), nn.Conv1d(15, 4, 1)
    ).double()
    plan: dict[str, Any] = {
        "0": ColwiseParallel().aligned(2),
        "1": ChannelParallel(),
        "2": RowwiseParallel().aligned(3),
    }
    as_one_device(single, plan, all_ranks(), [torch.randn(2, 4, 6, dtype=torch.double)])
    module: Any = parallelize_module(
        copy.deepcopy(single), all_ranks(), {**plan, "0": ColwiseParallel()}
    )
    with pytest.raises(LayoutError, match=r"aligned\(2\)"):
        module(torch.randn(2, 4, 6, dtype=torch.double))


@on_ranks(2)
def test_groups_on_dtensors_without_lowering() -> None:
    single = nn.Sequential(
        nn.Conv1d(4, 12, 1), nn.Conv1d(12, 12, 3, groups=6), nn.Conv1d(12, 4, 1)
    ).double()
    plan = {"0": ColwiseParallel(), "1": ChannelParallel(), "2": RowwiseParallel()}
    as_one_device(
        single, plan, all_ranks(), [torch.randn(2, 4, 6, dtype=torch.double)], lower=False
    )


class Doubled(nn.Conv1d):
    """A convolution with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@fake_world(2)
def test_refused_groups() -> None:
    axis = init_device_mesh("cpu", (2,))
    with pytest.raises(UnsupportedModuleError, match="Doubled"):
        parallelize_module(Doubled(4, 4, 3, groups=2), axis, ColwiseParallel())
    with pytest.raises(UnsupportedModuleError, match="convolutions with several groups"):
        parallelize_module(nn.Conv1d(4, 4, 3), axis, ChannelParallel())
    with pytest.raises(UnsupportedModuleError, match="overlapped"):
        parallelize_module(nn.Conv1d(4, 4, 3, groups=2), axis, RowwiseParallel().overlapped(2))
