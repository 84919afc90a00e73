"""Covers: observers/memory.py: bytes of storages over time, freed ones and those that were there before."""

from __future__ import annotations

import torch

from shoal_mesh import MemoryTrace


def test_what_is_freed_is_no_longer_counted() -> None:
    with MemoryTrace() as memory:
        x = torch.ones(256)
        view = x.view(16, 16)
        y = view + 1
        del x
        assert memory.samples[-1][1] == 2048  # the view holds the storage
        del view, y
    assert memory.peak == 2048 and memory.samples[-1][1] == 0


def test_what_was_there_counts_from_the_start() -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    weight = 64 * 64 * 4
    with MemoryTrace() as memory:
        model(torch.ones(2, 64)).sum().backward()
    assert memory.samples[0] == (0.0, weight)
    assert memory.samples[-1][1] == 2 * weight  # and its gradient
