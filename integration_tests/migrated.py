"""A program before and after its migration.

    python -m integration_tests.migrated FOLDER PROGRAM [ARGUMENT ...]

A copy of the folder is migrated and the program run from both copies, on gloo ranks. Printed: what
the migration changed, what it left to a person, and the losses. `docs/coming-from-torch.md`
has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from shoal_dtensor.migrate import main as migrate

ROOT = Path(__file__).parents[1]


def losses_of(folder: Path, program: str, arguments: Sequence[str], ranks: int) -> list[float]:
    """The losses of a program on so many ranks, the same on all of them.

    Raises:
        RuntimeError: if the program fails, with the end of its output; or if ranks have other
            losses.
    """
    out = folder / "losses.json"
    start = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    )
    command = (*start, "-m", "integration_tests.migrated_rank", str(out), program, *arguments)
    path = os.pathsep.join(
        [str(ROOT), *map(str, sorted(ROOT.glob("packages/*/src"))), *sys.path[1:]]
    )
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{program} on {ranks} ranks:\n{(done.stdout + done.stderr)[-3000:]}")
    found: list[list[float]] = [
        json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)
    ]
    if any(each != found[0] for each in found):
        raise RuntimeError(f"{program} on {ranks} ranks: losses differ between the ranks: {found}")
    return found[0]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.migrated", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="what is migrated")
    parser.add_argument("program", help="a script, relative to the folder")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--resume", action="store_true", help="both begin with what one run before has left there"
    )
    parser.add_argument(
        "--before",
        type=int,
        help="ranks of the run before the migration; 1: what one device computes",
    )
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        start, before, after = Path(name, "start"), Path(name, "before"), Path(name, "after")
        shutil.copytree(options.folder, start)
        if options.resume:
            losses_of(start, options.program, arguments, options.ranks)
        for copy in (before, after):
            shutil.copytree(start, copy)
        said = StringIO()
        with redirect_stdout(said):
            migrate([str(after), "--write"])
        sys.stdout.write(said.getvalue().replace(f"{after}{os.sep}", ""))
        old = losses_of(before, options.program, arguments, options.before or options.ranks)
        new = losses_of(after, options.program, arguments, options.ranks)
    worst = max(
        (abs(a - b) / max(abs(a), 1e-12) for a, b in zip(old, new, strict=True)), default=0.0
    )
    sys.stdout.write(
        f"before: {old}\nafter:  {new}\n{len(new)} losses, greatest relative difference "
        f"{worst:.1e}\n"
    )


if __name__ == "__main__":
    main()
