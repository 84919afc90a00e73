"""Covers: measured_links.py."""

from __future__ import annotations

import re

import pytest

from shoal_mesh.__main__ import main


def test_topology_measures_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--mesh", "1x2", "--bytes", "65536"]) == 0
    head, first, second, use, order, *gains = capsys.readouterr().out.splitlines()
    assert head.split() == ["axis", "ranks", "latency", "bandwidth"]
    assert first.split()[:2] == ["0", "1"] and second.split()[:2] == ["1", "2"]
    assert re.fullmatch(r"set_topology\(mesh, \[Link\(.+\), Link\(.+\)\]\)", use)
    assert order.startswith("order='topology': ranks 0, 1;") and len(gains) == 2
