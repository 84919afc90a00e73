"""The command line: `python -m shoal_mesh COMMAND`. A command is a module of `commands` that is named here."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "env": "environment",
    "postmortem": "postmortem",
    "topology": "measured_links",
}  # what a user types -> the module


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shoal_mesh", description="Facts about this machine and its ranks.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = import_module(f".commands.{module}", __package__)
        text = (command.__doc__ or "").splitlines()[0]
        options = subparsers.add_parser(name, help=text, description=text)
        command.add_options(options)
        options.set_defaults(run=command.run)
    asked = parser.parse_args(argv)
    status: int = asked.run(asked)
    return status


if __name__ == "__main__":
    sys.exit(main())
