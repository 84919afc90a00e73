"""Covers: lab/isolation/arena.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal_mesh.lab.isolation.arena import Arena, Extent, create_file
from shoal_mesh.lab.scheduling.posted_calls import Meta

TENSORS = [
    torch.arange(3000.0).view(30, 100).t(),
    torch.tensor(True),
    torch.zeros(0, 4, dtype=torch.int64),
    torch.arange(5, dtype=torch.bfloat16),
    torch.view_as_complex(torch.arange(8.0).view(4, 2)),
]


@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[1:], []], ids=["file", "inline", "none"])
def test_other_ranks_read_what_one_has_written(tensors: list[Tensor], tmp_path: Path) -> None:
    files = [create_file(str(tmp_path), rank) for rank in range(2)]
    paths = [file.path for file in files]
    packet = Arena(0, paths).write(tuple(map(Meta.of, tensors)), tensors)
    assert isinstance(packet.data, Extent) == (len(tensors) == 5)
    reader = Arena(1, paths)
    with reader.read(packet) as read:
        assert all(torch.equal(read[n], tensor) for n, tensor in enumerate(tensors))
        assert len(read) == len(tensors)
    for number, tensor in enumerate(tensors):
        with reader.read(packet.tensor(number)) as read:
            assert list(read) == [number] and torch.equal(read[number], tensor)
    for file in files:
        os.close(file.descriptor)


def test_memory_is_used_again_and_given_back(tmp_path: Path) -> None:
    file = create_file(str(tmp_path), 0)
    arena = Arena(0, [file.path])
    tensor = torch.zeros(1 << 20)
    metas = (Meta.of(tensor),)
    first, second = (arena.write(metas, [tensor]).data for _ in range(2))
    assert isinstance(first, Extent) and isinstance(second, Extent)
    assert (first.offset, second.offset) == (0, 1 << 22)
    arena.free([first.offset])
    third, fourth = (arena.write(metas, [tensor]).data for _ in range(2))
    assert isinstance(third, Extent) and isinstance(fourth, Extent)
    assert (third.offset, fourth.offset) == (0, 2 << 22)
    assert os.fstat(file.descriptor).st_size == 3 << 22
    arena.free([third.offset, second.offset, fourth.offset])
    assert os.fstat(file.descriptor).st_size == 0
    os.close(file.descriptor)
