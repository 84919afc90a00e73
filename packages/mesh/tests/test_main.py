"""Covers: __main__.py: what the command line understands."""

from __future__ import annotations

import pytest

from shoal_mesh.__main__ import main


@pytest.mark.parametrize("words", [[], ["nonsense"], ["topology", "--mesh", "2x"]])
def test_what_is_not_understood_ends_in_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert "python -m shoal_mesh" in capsys.readouterr().err.splitlines()[-1]
