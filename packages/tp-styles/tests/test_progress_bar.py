"""Covers: plan/progress_bar.py."""

from __future__ import annotations

import io
import sys

import pytest

from shoal_mesh.testing import fake_world
from shoal_tp_styles.internal import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, seconds: float, stream: io.StringIO) -> str:
    """What five items write that take so long each."""
    clock = iter(seconds * step for step in range(100))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(range(5), "loading")) == [0, 1, 2, 3, 4]
    return stream.getvalue()


def test_a_terminal_is_told_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 1.0, Terminal())
    assert "loading:  80%" in text and "4/5" in text
    assert text.rpartition("\r")[0].endswith(" ")  # the bar is gone


def test_short_work_and_logs_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 0.1, Terminal()).strip() == ""
    assert shown(monkeypatch, 1.0, io.StringIO()) == ""


def test_only_the_first_rank_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2, rank=1):
        assert shown(monkeypatch, 1.0, Terminal()) == ""
