"""Covers: exchange.py: packing of messages that take several rounds, without ranks."""

from __future__ import annotations

import gc
import weakref

import torch

from shoal_mesh.shared_memory.exchange import Packer


def test_pieces_fill_slots_in_order_and_are_released_when_they_are_packed() -> None:
    tensors = [torch.arange(0, 3), torch.arange(3, 3), torch.arange(3, 10), torch.arange(10, 11)]
    alive = [weakref.ref(tensor) for tensor in tensors if len(tensor)]
    pieces = Packer(tensors)
    tensors.clear()
    packed: list[int] = []
    for length in (2, 4, 0, 5):
        slot = torch.full((length,), -1)
        pieces.pack(slot, len(packed))
        packed += slot.tolist()
        gc.collect()
        assert [ref() is not None for ref in alive] == [len(packed) < end for end in (3, 10, 11)]
    assert packed == list(range(11))
    assert pieces.length == 11


def test_a_slot_takes_no_more_than_there_is() -> None:
    slot = torch.full((5,), -1)
    Packer([torch.arange(2), torch.arange(1)]).pack(slot, 0)
    assert slot.tolist() == [0, 1, 0, -1, -1]
