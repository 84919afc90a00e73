"""Covers: the commands that the packages register for the program `shoal`."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def registered() -> dict[str, str]:
    """Return the function of each command, as `module:name`."""
    commands: dict[str, str] = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        commands |= project.get("entry-points", {}).get("shoal.commands", {})
    return commands


@pytest.mark.parametrize("name", sorted(registered()))
def test_a_registered_command_prints_its_arguments(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, function = registered()[name].partition(":")
    with pytest.raises(SystemExit) as ended:
        getattr(import_module(module), function)([name, "--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_packages_register_the_commands_of_the_guides() -> None:
    of_guides = {"certify", "compare", "env", "migrate", "postmortem", "preview", "run"}
    assert of_guides | {"topology", "verify"} <= set(registered())


def test_every_package_with_a_command_line_registers_it() -> None:
    modules = {function.partition(".")[0] for function in registered().values()}
    for path in ROOT.glob("packages/*/src/*/__main__.py"):
        assert path.parent.name in modules
