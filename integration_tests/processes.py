"""Processes that need nothing of each other: side by side, or forked from one that has imported torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# Importing torch takes two seconds of a processor, a fork takes none. Reads programs from stdin, runs
# each in a fork as the main module, and leaves its output in a file of the folder in the argument.
FORKS = """
import gc, json, os, sys
import torch, torch.distributed
outputs = sys.argv.pop(1)
gc.collect()
gc.freeze()  # the garbage collector of a fork does not visit, and so copy, what all of them share
for number, (source, arguments, folder) in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child == 0:
        output = os.open(f"{outputs}/{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path[0] = os.getcwd()
        sys.argv[1:] = arguments
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
    """

    source: str
    arguments: tuple[str, ...] = ()
    folder: str = "."


def two_at_a_time(
    start: Callable[..., T], cases: Iterable[tuple[Any, ...]]
) -> dict[Any, Future[T]]:
    """What a function that starts a process and waits for it returns or raises, by the first argument of each call."""
    with ThreadPoolExecutor(2) as threads:
        return {case[0]: threads.submit(start, *case) for case in cases}


def outputs_of(
    programs: Sequence[Program], *flags: str, environment: Mapping[str, str]
) -> list[str]:
    """Run programs in processes that have imported torch and nothing else, one after the other.

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
            timeout=280,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return [Path(folder, str(number)).read_text() for number in range(len(programs))]
