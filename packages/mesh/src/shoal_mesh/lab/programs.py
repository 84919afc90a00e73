"""Scripts and modules as programs of a rank, as torchrun starts them."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from ..errors import MeshError


def run_program(program: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> int:
    """Run a script or a module in this process as the main program, and return its exit status.

    Args:
        program: the path of the script, or the name of the module.
        arguments: its command-line arguments.
        is_module: whether `program` is the name of a module.

    Raises:
        MeshError: the program has ended with an error status.
        Exception: the program's exception.
    """
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program))
    sys.argv[:] = [program, *arguments]
    sys.path.insert(0, folder)
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise MeshError(f"{program} has ended with the status {end.code}") from end
    return 0
