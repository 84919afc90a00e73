"""Covers: rounds.py: the step that is not a request."""

from __future__ import annotations

import torch

from shoal_mesh.shared_memory.rounds import WAIT_FOR_SLOT
from shoal_mesh.watch.recorder import request


def test_waiting_for_a_slot_is_no_request() -> None:
    assert request("all_gather", torch.uint8, 0) != WAIT_FOR_SLOT < 0
