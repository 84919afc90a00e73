"""The command line: run a script on many ranks of this machine, or certify it against one device.

May import: certify, errors, ranks.
"""

from __future__ import annotations

import argparse
import sys
from math import prod

from .certify import certify
from .errors import CertifyError
from .ranks import ScriptProgram, run_script_on_ranks

_USAGE = """\
shoal run [-m] SCRIPT --ranks N [--device cpu] [ARGUMENTS]
       shoal certify SCRIPT (--ranks N | --mesh dp=2,tp=4) [OPTIONS] [ARGUMENTS]"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    The code is 0 if it succeeds, 1 if a mesh differs from one device, 2 for wrong arguments.
    """
    words = sys.argv[1:] if argv is None else argv
    is_certify = words[:1] == ["certify"]
    # `python -m shoal_lab SCRIPT` is the same as `shoal run SCRIPT`
    names_command = is_certify or words[:1] == ["run"]
    parser = _make_parser(is_certify)
    options, arguments = parser.parse_known_args(words[1:] if names_command else words)
    # Arguments after -- always belong to the script.
    arguments = [word for word in arguments if word != "--"]
    try:
        if not is_certify:
            program = ScriptProgram(options.script, tuple(arguments), is_module=options.module)
            run_script_on_ranks(program, (options.ranks, options.device))
            return 0
        mesh = _read_mesh(options.mesh) if options.mesh else {"ranks": options.ranks}
        dtype = "" if options.dtype == "keep" else options.dtype
        report = certify(
            options.script,
            meshes=[mesh],
            arguments=arguments,
            dtype=dtype,
            tolerance=options.tolerance,
            device=options.device,
        )
    except CertifyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    return int(not report.passed)


def _make_parser(is_certify: bool) -> argparse.ArgumentParser:
    """Make the parser of `shoal certify`, or of `shoal run`."""
    parser = argparse.ArgumentParser(
        prog="shoal certify" if is_certify else "shoal run",
        usage=_USAGE,
        description="Options of the script may follow; all options after -- belong to the script.",
        # a script may have an option that begins like one of these
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", help="a script that can be started by torchrun")
    count = parser.add_mutually_exclusive_group(required=True)
    count.add_argument("--ranks", type=int, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--device", choices=["cpu"], help="run programs for an accelerator on the CPU"
    )
    if is_certify:
        count.add_argument(
            "--mesh", help="names and sizes of the axes, in the order of the ranks: dp=2,tp=4"
        )
        parser.add_argument(
            "--dtype",
            default="float64",
            help='the default dtype of the run; "keep" does not change torch\'s',
        )
        parser.add_argument(
            "--tolerance", type=float, help="the allowed difference, relative to the norm"
        )
    else:
        parser.add_argument(
            "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
        )
    return parser


def _read_mesh(text: str) -> dict[str, int]:
    """Read axes and sizes such as dp=2,tp=4."""
    mesh = dict[str, int]()
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdecimal():
            raise CertifyError(f"--mesh: expected axes and sizes such as dp=2,tp=4, got {text!r}")
        mesh[name.strip()] = int(size)
    if prod(mesh.values()) < 1:
        raise CertifyError(f"--mesh: the sizes must be positive, got {text!r}")
    return mesh


if __name__ == "__main__":
    sys.exit(main())
