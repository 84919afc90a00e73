"""Covers: terminal.py."""

from __future__ import annotations

import io
import sys

import pytest
import torch.distributed as dist

from shoal_mesh.internal import progress
from shoal_mesh.testing import fake_world


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(monkeypatch: pytest.MonkeyPatch, seconds: float, stream: io.StringIO) -> list[str]:
    """What five items write that take so long each."""
    clock = iter(seconds * step for step in range(20))
    monkeypatch.setattr("shoal_mesh.terminal.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(range(5), "loading")) == [0, 1, 2, 3, 4]
    return stream.getvalue().split("\r\x1b[K")


def test_a_terminal_is_told_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 1.0, Terminal()) == [
        "",
        "loading: 1 of 5, 8 s left",
        "loading: 2 of 5, 4 s left",
        "loading: 3 of 5, 3 s left",
        "loading: 4 of 5, 1 s left",
        "",
    ]


def test_short_work_and_logs_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 0.1, Terminal()) == [""]
    assert lines(monkeypatch, 1.0, io.StringIO()) == [""]


def test_only_the_first_rank_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2, rank=1):
        assert dist.get_rank() == 1
        assert lines(monkeypatch, 1.0, Terminal()) == [""]


def test_the_line_goes_where_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    clock = iter(range(20))
    monkeypatch.setattr("shoal_mesh.terminal.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyError):
        for item in progress(iter("abcdef"), "loading"):
            if item == "d":
                raise KeyError(item)
    assert stream.getvalue().split("\r\x1b[K") == ["", "loading: 1", "loading: 2", "loading: 3", ""]
