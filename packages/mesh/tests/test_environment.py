"""Covers: environment.py."""

from __future__ import annotations

import pytest
import torch

from shoal_mesh import __version__
from shoal_mesh.__main__ import main


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["env"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["shoal_mesh"] == __version__ and said["torch"] == torch.__version__
    assert "gloo" in said["backends"] and said["$NCCL_DEBUG"] == "INFO"
