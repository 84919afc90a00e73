"""The command line: `python -m shoal_same_bits compare A B` prints where two runs differ first.

May import: runs.
"""

from __future__ import annotations

import argparse
import sys

from shoal_dtensor.errors import StyleError

from .runs.record import RunRecord, compare_runs


def main(argv: list[str] | None = None) -> int:
    """Compare two runs; return 0 if nothing differs, 1 if something does, 2 for wrong arguments."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m shoal_same_bits", description=summary)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    compare = commands.add_parser(
        "compare", help="compare two recorded runs and print the first value that differs"
    )
    compare.add_argument("runs", nargs=2, metavar="FILE", help="written by RunRecord.save")
    compare.add_argument(
        "--tolerance", type=float, help="the allowed difference, relative to the norm of a value"
    )
    arguments = parser.parse_args(argv)
    try:
        one, other = map(RunRecord.load, arguments.runs)
        comparison = compare_runs(one, other, arguments.tolerance)
    except StyleError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{comparison}\n")
    return int(bool(comparison.first))


if __name__ == "__main__":
    sys.exit(main())
