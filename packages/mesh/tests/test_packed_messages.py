"""Packing and unpacking of messages that take several rounds, without other ranks.

Covers: packed_messages.py.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shoal_mesh.shared_memory import packed_messages
from shoal_mesh.shared_memory.packed_messages import Packer


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


class Alone:
    """A stream of one rank with a slot of so many elements."""

    rank, size, depth = 0, 1, 1

    def __init__(self, elements: int) -> None:
        self.slot_bytes = 4 * elements
        self._slot = torch.zeros(elements, dtype=torch.int32)

    def slots(self, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
        return self._slot[None, :count], self._slot[:count]


@pytest.mark.parametrize("one_round_bytes", [0, 1 << 20])
def test_results_take_windows_of_any_length(one_round_bytes: int) -> None:
    for sizes in ([3, 0, 7, 1], [0, 0], [0], [11, 0]):
        whole = torch.arange(sum(sizes), dtype=torch.int32)
        for elements in (1, 2, 5, 100):
            got: list[Tensor] = []
            stream: Any = Alone(elements)
            with mock.patch.object(packed_messages, "_ONE_ROUND_SUM_BYTES", one_round_bytes):
                assert [
                    *packed_messages.all_reduce_packed(
                        stream, torch.split(whole, sizes), "sum", got.extend
                    )
                ]
            assert [len(tensor) for tensor in got] == sizes
            assert torch.equal(torch.cat(got), whole)


def test_a_result_gets_memory_when_it_begins() -> None:
    stream: Any = Alone(3)
    steps: Any = packed_messages.all_reduce_packed(
        stream, [torch.ones(4, dtype=torch.int32)] * 2, "sum", lambda _: None
    )
    begun = [sum(map(len, steps.gi_frame.f_locals["totals"].tensors)) for _ in steps]
    # a round, then a slot that is free, and so on
    assert begun == [0, 4, 4, 8, 8]
