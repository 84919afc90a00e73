"""Programs that run in forks of one process, which has imported torch and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Program", "outputs_of"]

# Importing torch takes two seconds of a processor, a fork takes none. Reads programs from stdin,
# runs each in a fork as the main module, and leaves its output in a file of the folder in the
# argument.
FORKS = """
import gc, json, os, sys
import torch, torch.distributed
outputs = sys.argv.pop(1)
gc.collect()
gc.freeze()  # the garbage collector of a fork does not visit, and so copy, what all of them share
for number, (source, arguments, folder, variables) in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child == 0:
        output = os.open(f"{outputs}/{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path[0] = os.getcwd()
        sys.argv[1:] = arguments
        os.environ.update(variables)
        exec(source)
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        with open(f"{outputs}/{number}", "a") as file:
            file.write(str(status))
"""


class Program(NamedTuple):
    """A main program.

    Attributes:
        source: its source.
        arguments: its command-line arguments.
        folder: the folder that it runs in and imports from.
        variables: its own environment variables.
    """

    source: str
    arguments: tuple[str, ...] = ()
    folder: str = "."
    variables: Mapping[str, str] = {}


def outputs_of(
    programs: Sequence[Program], *flags: str, environment: Mapping[str, str]
) -> list[str]:
    """Run programs in processes that have imported torch and nothing else, one after the other.

    The time limit is that of the test.

    Args:
        programs: the programs.
        *flags: options of the Python interpreter.
        environment: the environment variables.

    Returns:
        What each program prints, and its exit status if that is not 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *flags, "-c", FORKS, folder]
        done = subprocess.run(
            command,
            input=json.dumps(programs),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return [Path(folder, str(number)).read_text() for number in range(len(programs))]
