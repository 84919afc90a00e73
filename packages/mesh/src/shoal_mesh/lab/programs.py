"""Scripts and modules as programs of a rank, as torchrun starts them."""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Sequence

from ..errors import MeshError

# Packages that are slow to import, and do nothing on import that differs between ranks.
_SLOW_PACKAGES = ("torch", "transformers", "numpy")

# modules that torch imports when a program makes its first optimizer
_OF_OPTIMIZERS = ("torch._dynamo", "torch._inductor.pattern_matcher")


def imports_of(program: str) -> list[str]:
    """Return the modules of slow packages that a script imports, to import them once for all ranks.

    Args:
        program: the path of the script.
    """
    with open(program, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    slow = [name for name in names if name.partition(".")[0] in _SLOW_PACKAGES]
    return [*slow, *_OF_OPTIMIZERS] if slow else []


def loaded_modules() -> list[str]:
    """Return the parts of torch.distributed that this process has imported."""
    return [name for name in sys.modules if name.startswith("torch.distributed.")]


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
