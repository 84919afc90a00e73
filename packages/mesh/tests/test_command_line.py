"""Covers: commands/command_line.py."""

from __future__ import annotations

from importlib import metadata

import pytest

from shoal_mesh.commands import command_line
from shoal_mesh.commands.command_line import describe, find_commands, main


def count_arguments(arguments: list[str]) -> int:
    return len(arguments)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands as if packages had registered them, whatever is installed here."""
    entries = [
        metadata.EntryPoint("zip", f"{__name__}:missing", command_line.GROUP),
        metadata.EntryPoint("count", f"{__name__}:count_arguments", command_line.GROUP),
    ]
    functions = {"count": count_arguments}
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda entry: functions[entry.name])
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)


def test_the_command_gets_its_name_and_its_arguments() -> None:
    assert main(["count", "a", "--b"]) == 3


def test_an_unknown_command_lists_the_commands_and_is_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["counts"]) == 2
    assert "unknown command 'counts'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_commands_with_their_packages_and_loads_none(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed == describe(find_commands())
    assert printed.index("count") < printed.index("zip")


def test_the_arguments_of_the_process_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["shoal", "count", "a"])
    assert main() == 2
