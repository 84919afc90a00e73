"""Covers: request.py."""

from __future__ import annotations

import torch

from shoal_mesh.shared_memory.request import DTYPES, announcement, describe, describe_announced, request


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


def test_announcements_name_every_reduction_and_dtype() -> None:
    assert describe_announced(announcement("all_reduce", torch.int16, 12, "bxor")) == "all_reduce bxor of 12 x int16"
    assert describe_announced(announcement("broadcast", torch.uint8, 3, root=2)) == "broadcast from 2 of 3 x uint8"
    assert (
        describe_announced(announcement("all_to_all_v", torch.qint8, 0)) == "all_to_all_v of any number x another dtype"
    )
    assert announcement("all_reduce", torch.complex128, 1 << 38, "avg") < 1 << 64
