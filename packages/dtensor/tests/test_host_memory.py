"""Copies on the CPU, where all are done at once.  Nothing here pins memory.

Covers: host_memory.py.
"""

from __future__ import annotations

import torch

from shoal_dtensor.host_memory import arrival_on, device_of_numbers, download, upload, upload_packed
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

CPU = torch.device("cpu")


def test_what_is_packed_is_cast_and_may_be_written_to_at_once() -> None:
    tensors = [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7),
        torch.arange(4.0)[::2],
        torch.zeros(0, 2),
    ]
    dtypes = [torch.bfloat16, torch.int64, torch.float32, torch.bfloat16]
    expected = [tensor.to(dtype, copy=True) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    sent = upload_packed(tensors, CPU, dtypes)
    for tensor in tensors:
        tensor.zero_()
    for got, want in zip(sent, expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_what_is_downloaded_is_a_copy_of_every_dtype() -> None:
    tensors = [
        torch.ones(2, 3),
        torch.arange(3),
        torch.full((), 5.0),
        torch.arange(6.0).view(2, 3).t(),
    ]
    expected = [tensor.clone() for tensor in tensors]
    arrived = download(tensors)
    for tensor in tensors:
        tensor.zero_()
    for got, want in zip(arrived(), expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert arrival_on(CPU) is None


def test_numbers_are_those_of_a_tensor() -> None:
    assert torch.equal(upload([[1, 2], [3, 4]], CPU), torch.tensor([[1, 2], [3, 4]]))
    assert upload(1.5, CPU, torch.float64).dtype == torch.float64


def test_numbers_travel_by_the_host_where_the_backend_sends_its_tensors() -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        assert device_of_numbers(comm, "meta") == CPU
        comm.backend = "cuda:nccl"
        assert device_of_numbers(comm, "meta") == torch.device("meta")
