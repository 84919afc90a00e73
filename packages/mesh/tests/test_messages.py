"""Covers: messages.py: packing and unpacking of messages that take several rounds, without ranks."""

from __future__ import annotations

import gc
import weakref

import torch

from shoal_mesh.shared_memory.messages import Packer, Unpacker


def test_pieces_fill_slots_in_order_and_are_released_when_they_are_packed() -> None:
    tensors = [torch.arange(0, 3), torch.arange(3, 3), torch.arange(3, 10), torch.arange(10, 11)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    pieces = Packer(tensors)
    tensors.clear()
    packed = []
    for length in (2, 4, 0, 5):
        slot = torch.full((length,), -1)
        pieces.pack(slot)
        packed += slot.tolist()
        gc.collect()
        held = [ref() is not None for ref in alive]
        assert held == [len(packed) < end for end in (3, 3, 10, 11)] or len(packed) == 2
    assert packed == list(range(11))
    assert pieces.length == 11


def test_results_take_rows_of_any_length() -> None:
    for sizes in ([3, 0, 7, 1], [0, 0], [], [11, 0]):
        whole = torch.arange(sum(sizes))
        for step in (1, 2, 5, 100):
            unpacked = Unpacker(sizes, torch.int64)
            for rows in (whole[a : a + step] for a in range(0, len(whole), step)):
                unpacked.unpack(torch.split(rows, 2))
            assert [len(tensor) for tensor in unpacked.tensors] == list(sizes)
            assert torch.cat([whole[:0], *unpacked.tensors]).tolist() == whole.tolist()


def test_a_result_gets_memory_when_it_begins() -> None:
    unpacked = Unpacker([4, 4], torch.float32)
    unpacked.unpack([torch.ones(3)])
    assert len(unpacked.tensors) == 1
    unpacked.unpack([torch.ones(2)])
    assert len(unpacked.tensors) == 2
