"""The program `shoal`: one name for the command lines of all installed packages.

A package adds a command by an entry point of the group `shoal.commands` in its pyproject.toml:

    [project.entry-points."shoal.commands"]
    preview = "shoal_models.__main__:main"

`shoal preview ...` calls that function with the list `["preview", ...]` and exits with the status
that the function returns. Nothing is imported before the command is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

GROUP = "shoal.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        arguments: the command and its own arguments; the arguments of the process when left out.

    Returns:
        The exit status of the command; 0 for the list of commands; 2 for an unknown command.

    Example:
        >>> main(["--help"])  # doctest: +ELLIPSIS
        usage: shoal COMMAND ...
        ...
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = find_commands()
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(describe(commands))
        return 0
    name = words[0]
    if name not in commands:
        sys.stderr.write(f"shoal: unknown command {name!r}\n{describe(commands)}")
        return 2
    run: Callable[[list[str]], int] = commands[name].load()
    return run(words)


def find_commands() -> dict[str, metadata.EntryPoint]:
    """Return the commands of all installed packages by name, in alphabetical order."""
    found = sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found}


def describe(commands: Mapping[str, metadata.EntryPoint]) -> str:
    """Return the list of commands, with the package of each."""
    lines = ["usage: shoal COMMAND ...", ""]
    width = max(map(len, commands), default=0)
    for name, entry in commands.items():
        package = entry.dist.name if entry.dist else entry.module
        lines.append(f"  {name:{width}}  of {package}")
    lines += ["", "`shoal COMMAND --help` prints the arguments of a command.", ""]
    return "\n".join(lines)
