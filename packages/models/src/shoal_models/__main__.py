"""The command line: `python -m shoal_models preview|verify MODEL PLAN MESH`.

May import: plan_commands.
"""

from __future__ import annotations

import argparse
import sys

from shoal_dtensor.errors import StyleError

from .plan_commands import add_options, preview_plan, verify_plan


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; 0 if nothing is wrong, 1 if something is, 2 for misuse."""
    parser = argparse.ArgumentParser(prog="python -m shoal_models", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run in (preview_plan, verify_plan):
        command = commands.add_parser(run.__name__.removesuffix("_plan"), help=run.__doc__, description=run.__doc__)
        add_options(command)
        command.set_defaults(run=run)
    asked = parser.parse_args(argv)
    try:
        status: int = asked.run(asked)
    except StyleError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
