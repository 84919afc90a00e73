"""Checks the reference of a built site.

Every public name and method has an entry, and nothing internal has one.

`python tools/entries.py docs/_build/html` exits with the number of faults.
"""

from __future__ import annotations

import inspect
import re
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from links import report

LAYERS = sorted(path.name for path in Path(__file__).parent.parent.glob("packages/*/src/shoal_*"))


def entries(site: Path) -> dict[str, str]:
    """The Python names that the site's inventory has, with their kinds: `py:class` and so on."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    columns = (line.split(" ") for line in zlib.decompress(packed).decode().splitlines())
    return {name: kind for name, kind, *_ in columns if kind.startswith("py:")}


def imported_by_pages(site: Path) -> set[str]:
    """Modules below a layer that a program of a page imports from."""
    programs = "\n".join(path.read_text() for path in sorted((site / "_sources").rglob("*.md.txt")))
    return set(re.findall(r"^ *from (shoal_\w+\.[\w.]+) import", programs, re.MULTILINE))


def documented(module: str) -> Iterator[tuple[str, Any]]:
    """Return addresses and values of the public names that a module defines itself."""
    space = import_module(module)
    own = [
        name
        for name, value in vars(space).items()
        if getattr(value, "__module__", "") == module and not name.startswith("_")
    ]
    public = {name: getattr(space, name) for name in getattr(space, "__all__", own)}
    for name, value in public.items():
        home = getattr(value, "__module__", "") or ""
        if inspect.ismodule(value):
            yield from (one for one in documented(value.__name__) if one[1] not in public.values())
        elif home.startswith(module.partition(".")[0]) and (
            inspect.isclass(value) or inspect.isroutine(value)
        ):
            yield f"{module}.{name}", value


def methods(cls: type) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our methods and properties with a docstring, and names under which an entry may be."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        member = inspect.getattr_static(cls, name)
        shown = isinstance(member, (property, staticmethod, classmethod)) or inspect.isfunction(
            member
        )
        described = (inspect.getdoc(member) or "").strip()
        if (
            not name.startswith("_")
            and owner.__module__.startswith("shoal_")
            and shown
            and described
        ):
            yield name, tuple(f"{base.__name__}.{name}" for base in cls.__mro__)


def faults(site: Path) -> list[str]:
    """One line for each name without an entry, and for each entry of something internal."""
    found = entries(site)
    short = {".".join(name.split(".")[-2:]) for name in found}
    modules = sorted(name for name, kind in found.items() if kind == "py:module")
    lines = [
        f"{name}: internal"
        for name in sorted(found)
        if any(part[0] == "_" for part in name.split("."))
    ]
    lines += [
        f"{name}: a page imports from it, no entry"
        for name in sorted(imported_by_pages(site) - {*modules})
    ]
    for module in (*LAYERS, *modules):
        for name, value in documented(module):
            if not {name, f"{module.partition('.')[0]}.{name.rpartition('.')[2]}"} & {*found}:
                lines.append(f"{name}: no entry")
            elif inspect.isclass(value) and not issubclass(value, BaseException):
                lines += [
                    f"{name}.{one}: no entry"
                    for one, names in methods(value)
                    if not short & {*names}
                ]
    return lines


if __name__ == "__main__":
    sys.exit(report(faults))
