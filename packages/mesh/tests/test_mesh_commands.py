"""Covers: commands/mesh_commands.py."""

from __future__ import annotations

import re

import pytest
import torch

from shoal_mesh import __version__
from shoal_mesh.commands.mesh_commands import main


@pytest.mark.parametrize("words", [[], ["nonsense"], ["topology", "--mesh", "2x"]])
def test_what_is_not_understood_ends_in_a_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "python -m shoal_mesh" in capsys.readouterr().err.splitlines()[-1]


def test_env_says_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["env"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["shoal_mesh"] == __version__ and said["torch"] == torch.__version__
    assert "gloo" in said["backends"] and said["$NCCL_DEBUG"] == "INFO"


def test_topology_measures_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--mesh", "1x2", "--bytes", "65536"]) == 0
    head, first, second, use, order, *gains = capsys.readouterr().out.splitlines()
    assert head.split() == ["axis", "ranks", "latency", "bandwidth"]
    assert first.split()[:2] == ["0", "1"] and second.split()[:2] == ["1", "2"]
    assert re.fullmatch(r"set_topology\(mesh, \[Link\(.+\), Link\(.+\)\]\)", use)
    assert order.startswith("order='topology': ranks 0, 1;") and len(gains) == 2
