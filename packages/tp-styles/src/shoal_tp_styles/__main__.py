"""The command line: `python -m shoal_tp_styles preview|verify MODEL PLAN MESH`, and `compare A B` of two runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import StyleError
from .invariant.fingerprints import first_difference
from .plan_commands import add_options, preview_plan, verify_plan
from .runs.compare import compare_runs
from .runs.record import RunRecord

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; 0 if nothing is wrong or different, 1 if something is, 2 for misuse."""
    parser = argparse.ArgumentParser(prog="python -m shoal_tp_styles", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run in (preview_plan, verify_plan):
        command = commands.add_parser(run.__name__.removesuffix("_plan"), help=run.__doc__, description=run.__doc__)
        add_options(command)
        command.set_defaults(run=run)
    compare = commands.add_parser("compare", help="where two runs differ first")
    compare.add_argument("runs", nargs=2, metavar="FILE", help="written by StepFingerprints or RunRecord.save")
    compare.add_argument("--tolerance", type=float, help="how much values of RunRecord may differ, relatively")
    compare.set_defaults(run=_compare)
    asked = parser.parse_args(argv)
    try:
        status: int = asked.run(asked)
    except StyleError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return status


def _compare(asked: argparse.Namespace) -> int:
    if all(Path(path).read_text().startswith('{"ranks"') for path in asked.runs):
        one, other = map(RunRecord.load, asked.runs)
        comparison = compare_runs(one, other, asked.tolerance)
        sys.stdout.write(f"{comparison}\n")
        return int(bool(comparison.first))
    found = first_difference(*asked.runs)
    sys.stdout.write((found or "no fingerprint differs") + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
