"""Covers: request.py."""

from __future__ import annotations

import torch

from shoal_mesh.shared_memory.request import DTYPES, describe, request


def test_requests_differ_and_say_what_they_are() -> None:
    every = {
        request(kind, dtype, count, op, root)
        for kind in ("all_reduce", "broadcast")
        for dtype in DTYPES
        for count in (0, 1, 1 << 40)
        for op in ("", "sum", "product")
        for root in (0, 4095)
    }
    assert len(every) == 2 * len(DTYPES) * 3 * 3 * 2
    assert max(every) < 1 << 62
    assert describe(request("all_reduce", torch.bfloat16, 12, "max")) == "all_reduce max of 12 x bfloat16"
    assert describe(request("broadcast", torch.uint8, 3, root=2)) == "broadcast from 2 of 3 x uint8"
