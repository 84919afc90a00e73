"""Covers: flat_messages.py: the tensors of one message, and where each is in it."""

from __future__ import annotations

import torch

from shoal_mesh.collectives.flat_messages import parts_like, positions_by_dtype


def test_tensors_of_one_dtype_share_a_message() -> None:
    assert positions_by_dtype([]) == []
    dtypes = [torch.int64, None, torch.float32, torch.int64]
    assert positions_by_dtype(dtypes) == [[0, 3], [2]]


def test_parts_are_views_with_the_shapes_of_tensors() -> None:
    flat = torch.arange(7)
    tensors = [torch.empty(()), torch.empty(0, 3), torch.empty(3, 2).t()]
    parts = parts_like(flat, tensors)
    assert [part.tolist() for part in parts] == [0, [], [[1, 2, 3], [4, 5, 6]]]
    parts[2].zero_()
    assert flat.tolist() == [0, 0, 0, 0, 0, 0, 0]
