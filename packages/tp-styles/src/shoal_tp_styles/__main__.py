"""The command line: `python -m shoal_tp_styles compare A B` says where the fingerprints of two runs differ first."""

from __future__ import annotations

import argparse
import sys

from .invariant.fingerprints import first_difference

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Compare two files; 0 if they agree, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m shoal_tp_styles", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    compare = commands.add_parser("compare", help="where the fingerprints of two runs differ first")
    compare.add_argument("runs", nargs=2, metavar="FILE", help="written by StepFingerprints")
    found = first_difference(*parser.parse_args(argv).runs)
    sys.stdout.write((found or "no fingerprint differs") + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
