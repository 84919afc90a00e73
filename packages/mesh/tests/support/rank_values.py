"""Values that differ by rank and element, and communicators in another order than the group's."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.shared_memory.channel import OPT_OUT, channel_of

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


COMPLEX = [torch.complex64, torch.complex128]


EVERY = [*FLOATS, *INTS, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.uint16]


# The group's own order, c10d's order turned round, and one axis of two.
ORDERS: dict[str, tuple[list[list[int]], tuple[int, ...]]] = {
    "straight": ([[0, 1], [2, 3]], (0, 1)),
    "turned": ([[3, 1], [0, 2]], (1, 0)),
    "row": ([[0, 1], [2, 3]], (1,)),
}


def over_gloo(comm: Comm) -> Comm:
    """The communicator of all ranks with a group of its own, which does not use shared memory."""
    group = dist.new_group(sorted(comm.ranks))
    own = Comm.over(group, comm.axes, comm.ranks)
    with mock.patch.dict(os.environ, {OPT_OUT: "0"}):
        assert channel_of(group) is None
    return own


def comm_of(order: str) -> Comm:
    ranks, axes = ORDERS[order]
    return DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")).comm(axes)


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank puts in: small numbers, different on each rank and element."""
    count = torch.Size(shape).numel()
    base = (torch.arange(count).view(shape) * 3 + rank * 5) % 7
    return (base % 2 == 0) if dtype is torch.bool else base.to(dtype)


def values_of_all(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [values_of(rank, shape, dtype) for rank in comm.ranks]


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    bits = got.dtype if not got.dtype.is_floating_point else torch.float64
    assert torch.equal(got.to(bits), want.to(bits))


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wide = torch.float64 if got.dtype.is_floating_point else got.dtype
    tolerance = (
        0.15 if got.dtype is torch.float8_e4m3fn else 1e-2 if got.element_size() <= 2 else 1e-6
    )
    if got.is_floating_point() or got.is_complex():
        torch.testing.assert_close(got.to(wide), want.to(wide), rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(got, want)
