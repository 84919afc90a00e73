"""Covers: recorder.py. What it writes is in the tests of postmortem."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shoal_mesh.shared_memory.recorder import ENTRIES, dump, folder, note, record


def test_an_entry_is_cheap_and_the_folder_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_note_is_said_of_as_many_collectives_as_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_POSTMORTEM", str(tmp_path))
    kept = [*ENTRIES]
    ENTRIES.clear()
    note(("redistribute S(0) -> R", 2))
    for request in range(3):
        record("group", request)
    dump({"rank": 0, "world": 1}, str)
    ENTRIES.clear()
    ENTRIES.extend(kept)
    written = json.loads((tmp_path / "rank0.json").read_text())["collectives"]
    assert [(what, purpose) for _, _, what, purpose in written] == [
        ("0", "redistribute S(0) -> R"),
        ("1", "redistribute S(0) -> R"),
        ("2", ""),
    ]
