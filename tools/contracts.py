"""Checks that every folder imports exactly the siblings that its contract names.

Run: ``python tools/contracts.py``.

The docstring of a folder's `__init__.py` names the siblings that its files import: `May
import: errors, layout.` or `May import: nothing.` So does a file beside the folders of a package,
if it imports any. A package names the layers below it in its pyproject.toml. Imports inside
functions and for type checkers count, and no siblings, files included, import each other in a
circle.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^May import: ([\w,\s]+)\.$", re.MULTILINE)


def imported(path: Path, sources: dict[str, Path]) -> Iterator[tuple[int, Path]]:
    """Lines of a file that import from our packages.

    Each has the folder, or the file without suffix, that it imports.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for module in (home / alias.name for alias in node.names):
                yield (
                    node.lineno,
                    module if module.is_dir() or module.with_suffix(".py").is_file() else home,
                )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            yield from (
                (node.lineno, sources[top])
                for name in names
                if (top := name.partition(".")[0]) in sources
            )


def imports(root: Path, sources: dict[str, Path]) -> dict[Path, dict[str, str]]:
    """Map each package, folder and file (without suffix) to its imported siblings.

    Each sibling has one importing line.
    """
    used: dict[Path, dict[str, str]] = {}
    for path in sorted(path for source in sources.values() for path in source.rglob("*.py")):
        for child in (path.parent, path.with_suffix("")):
            used.setdefault(child, {})
        for line, module in imported(path, sources):
            here = next(folder for folder in path.parents if module.is_relative_to(folder))
            importer, *_ = path.relative_to(here).with_suffix("").parts
            sibling, *_ = *module.relative_to(here).parts, "__init__"
            used.setdefault(here / importer, {}).setdefault(
                sibling, f"{path.relative_to(root)}:{line}"
            )
    return used


def says(child: Path) -> tuple[Path, set[str] | None]:
    """Return the file with a package's, folder's or file's contract, and it; None without one."""
    file = child / "pyproject.toml"
    if file.is_file():
        needs = tomllib.loads(file.read_text())["project"]["dependencies"]
        return file, {found[1] for need in needs if (found := re.match(r"shoal-([\w-]+)", need))}
    file = child / "__init__.py" if child.is_dir() else child.with_suffix(".py")
    line = LINE.search(
        ast.get_docstring(ast.parse(file.read_text() if file.is_file() else "")) or ""
    )
    return file, set(line[1].replace(",", " ").split()) - {"nothing"} if line else None


def below(root: Path, package: str) -> set[str]:
    """The packages that a package lists; none for a folder or a file."""
    home = root / "packages" / package
    return (says(home)[1] or set()) if (home / "pyproject.toml").is_file() else set()


def findings(root: Path) -> Iterator[str]:
    """One line for each forbidden import, each allowance that no import needs, and each circle."""
    sources = {init.parent.name: init.parent for init in root.glob("packages/*/src/*/__init__.py")}
    used = imports(root, sources)
    for child in used.keys() - sources.values() | {
        source.parents[1] for source in sources.values()
    }:
        file, said = says(child)
        name, needed = file.relative_to(root), used.get(child, {})
        if said is None and child.is_dir():
            yield f"{name}: the docstring has no line `May import: ...`"
        elif child.name != "__init__" and (said is not None or child.parent in sources.values()):
            # a package also lists the layers below the layers that it imports, for pip and folders
            implied = {low for one in needed for low in below(root, one)} - needed.keys()
            for one in needed.keys() ^ ((said or set()) - implied):
                unsaid = f"{needed.get(one)}: imports {one}, which {name} does not allow"
                yield unsaid if one in needed else f"{name}: no file imports {one}, which it allows"
    for folder in {child.parent for child in used}:
        try:
            TopologicalSorter(
                {child.name: used[child] for child in used if child.parent == folder}
            ).prepare()
        except CycleError as circle:
            names = " imports ".join(reversed(circle.args[1]))
            yield f"{folder.relative_to(root)}: a circle: {names}"


def main() -> int:
    """Print the findings; fail if there are any."""
    found = sorted(findings(ROOT))
    print("\n".join(found) or "every folder imports only its declared siblings")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
