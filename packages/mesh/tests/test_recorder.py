"""Covers: recorder.py. The tests of postmortem check its files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from shoal_mesh.watch.recorder import (
    DTYPES,
    ENTRIES,
    OPS,
    describe,
    dump,
    folder,
    note,
    record,
    request,
)


def test_requests_differ_and_say_what_they_are() -> None:
    every = {
        request(kind, dtype, count, op, root)
        for kind in ("all_reduce", "broadcast")
        for dtype in DTYPES
        for count in (0, 1, 1 << 39)
        for op in OPS
        for root in (0, 4095)
    }
    assert len(every) == 2 * len(DTYPES) * 3 * len(OPS) * 2
    assert max(every) < 1 << 64
    assert (
        describe(request("all_reduce", torch.bfloat16, 12, "max"))
        == "all_reduce max of 12 x bfloat16"
    )
    assert describe(request("all_reduce", torch.int16, 0, "bxor")) == "all_reduce bxor of 0 x int16"
    assert describe(request("broadcast", torch.uint8, 3, root=2)) == "broadcast from 2 of 3 x uint8"
    assert (
        describe(request("all_to_all_v", torch.qint8, 0))
        == "all_to_all_v of any number x another dtype"
    )


def test_an_entry_is_cheap_and_the_folder_is_that_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [*ENTRIES]
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            record("group", 5)
        best = min(best, (time.perf_counter() - start) / 1000)
    bound = len(ENTRIES)
    ENTRIES.clear()
    ENTRIES.extend(kept)
    assert bound == 512  # of 20,000
    assert best < 2e-6  # 0.2 us on an idle machine
    monkeypatch.delenv("SHOAL_POSTMORTEM", raising=False)
    assert folder().endswith(f"_{os.getppid()}")
    monkeypatch.setenv("SHOAL_POSTMORTEM", "0")
    assert folder() == ""


def test_a_note_is_said_of_as_many_collectives_as_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_POSTMORTEM", str(tmp_path))
    kept = [*ENTRIES]
    ENTRIES.clear()
    note(("redistribute S(0) -> R", 2))
    for count in range(3):
        record("group", request("all_gather", torch.int8, count))
    dump(0, "", (), {})
    ENTRIES.clear()
    ENTRIES.extend(kept)
    written = json.loads((tmp_path / "rank0.json").read_text())["collectives"]
    assert [(what, purpose) for _, _, what, purpose in written] == [
        ("all_gather of 0 x int8", "redistribute S(0) -> R"),
        ("all_gather of 1 x int8", "redistribute S(0) -> R"),
        ("all_gather of 2 x int8", ""),
    ]
