"""Scripts and modules as programs of a rank, as torchrun starts them."""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Iterator, Sequence

from ..errors import MeshError
from ..local_ranks.pool import slow_imports

# Packages that are slow to import, and do nothing on import that differs between ranks. pandas and
# pyarrow are not among them: they start a thread, and a process with threads is not forked.
_SLOW_PACKAGES = ("torch", "transformers", "numpy")

# modules that torch imports when a program makes its first optimizer
_OF_OPTIMIZERS = ("torch._dynamo", "torch._inductor.pattern_matcher")


def imports_of(program: str, *, is_module: bool = False) -> list[str]:
    """Return the slow packages' modules that a program imports, to import them once for all ranks.

    The sources of the program are read, and not executed: the script and the modules beside it, or
    the modules of the package that has the main module.

    Args:
        program: the path of the script, or the name of the module.
        is_module: whether `program` is the name of a module.
    """
    sources = _own_sources(program, is_module=is_module)
    slow = dict[str, None]()
    while sources.unread:
        for name in _imported_names(*sources.unread.popitem()):
            if name.partition(".")[0] in _SLOW_PACKAGES:
                slow[name] = None
            else:
                sources.add(name)
    return [*slow, *_OF_OPTIMIZERS] if slow else []


def _own_sources(program: str, *, is_module: bool) -> _OwnSources:
    """Return the sources of a program, of which the main one is known."""
    if not is_module:
        sources = _OwnSources([os.path.dirname(os.path.abspath(program))])
        sources.unread["__main__"] = program
        return sources
    sources = _OwnSources([os.getcwd(), *sys.path], program.partition(".")[0])
    sources.add(program)
    return sources


class _OwnSources:
    """Files of a program's own modules, found without an import.

    Args:
        folders: the folders that have its modules.
        package: the package of its modules; "" for all modules in the folders.

    Attributes:
        unread: module -> its file, for the modules that were found and not read.
    """

    def __init__(self, folders: list[str], package: str = "") -> None:
        self.unread: dict[str, str] = {}
        self._folders = folders
        self._package = package
        self._seen = set[str]()

    def add(self, name: str) -> None:
        """Find a module, and the packages that contain it.

        Args:
            name: its name, with dots; also a name that is not a module.
        """
        if self._package and name.partition(".")[0] != self._package:
            return
        folders = self._folders
        module = ""
        for part in name.split("."):
            module = f"{module}.{part}" if module else part
            file, folders = _find_module(part, folders)
            if file and module not in self._seen:
                self.unread[module] = file
            self._seen.add(module)


def _find_module(name: str, folders: list[str]) -> tuple[str, list[str]]:
    """Return the source of a module, or "", and the folders of its submodules."""
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(f"{path}/__init__.py"):
            return f"{path}/__init__.py", [path]
        if os.path.isfile(f"{path}.py"):
            return f"{path}.py", []
        if os.path.isdir(path):
            return "", [path]
    return "", []


def _imported_names(module: str, path: str) -> Iterator[str]:
    """Yield the names that a source imports; some are functions or classes.

    Args:
        module: the name of the module.
        path: its file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError):
        # A rank that imports the file raises the error; a rank need not import it.
        return
    is_package = os.path.basename(path) == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # two dots: the package that contains this one
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def loaded_modules() -> list[str]:
    """Return the parts of torch.distributed and the slow modules that this process has imported."""
    parts = [name for name in sys.modules if name.startswith("torch.distributed.")]
    return parts + slow_imports()


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
