"""Covers: docs/reference/*.md: every public name is on its layer's page once, and complete."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any


def test_every_public_name_has_its_entry(layer: Any, root: Any) -> None:
    module = importlib.import_module(layer.name)
    page = (root / "docs" / "reference" / f"{layer.name}.md").read_text()
    # of errors and internal names
    page = re.sub(r"^\.\. module:: .*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    listed = Counter(
        # an alias has no docstring of its own, so its entry is written by hand
        re.findall(
            r"^\.\. (?:auto(?:class|data|exception|function)|py:data):: (\w+)$", page, re.MULTILINE
        )
    )
    values = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    # What a layer passes on from the one below is on that one's page.
    homes = {name: getattr(value, "__module__", "").split(".")[0] for name, value in values.items()}
    passed_on = {name for name, home in homes.items() if home in layer.below}
    public = {name for name, value in values.items() if not inspect.ismodule(value)} - passed_on
    assert set(listed) == public
    assert not [name for name, times in listed.items() if times > 1]


GAPS = Path(__file__).with_name("reference_gaps.txt")
# A docstring whose first word is one of these does not say what comes back, so it has a section
# `Returns:`.
VERBS = re.compile(
    r"(Add|Apply|Bring|Check|Compare|Fill|Find|Give|Load|Make|Record|Reduce|Replace|Run|Save"
    r"|Train|Write)\b"
)
# Where another docstring says the same: "arguments as for `empty`", "are those of the collectives
# of the same names".
ELSEWHERE = re.compile(
    r"\bas (for|in) (`|torch)|under torch's name and arguments|errors are those of|Create "
    r"one\s+with"
)


def documented(layer: str, page: str) -> Iterator[tuple[str, Any]]:
    """Addresses and values of classes and functions.

    They are in a layer's facade and in the modules that its page shows.
    """
    for space in (layer, *re.findall(r"automodule:: (\S+)", page)):
        module = importlib.import_module(space)
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == space
        ]
        for name in getattr(module, "__all__", [name for name in own if name[0] != "_"]):
            value = getattr(module, name)
            home = (getattr(value, "__module__", "") or "").split(".")[0]
            error = inspect.isclass(value) and issubclass(value, BaseException)
            if home == layer and (inspect.isclass(value) or inspect.isroutine(value)) and not error:
                yield f"{space}.{name}", value


def docstring(value: Any) -> str:
    """Of a function; of a class, with those of its methods that have an example."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    methods = (getattr(method, "__doc__", None) or "" for method in vars(value).values())
    return "\n".join((value.__doc__ or "", *(text for text in methods if ">>>" in text)))


def lacks(value: Any, programs: str) -> list[str]:
    """What an entry does not have.

    That is arguments, what comes back, errors, an example (or one in a program of a page).
    """
    text, module = docstring(value), inspect.getmodule(value)
    elsewhere = bool(ELSEWHERE.search(text) or ELSEWHERE.search((module and module.__doc__) or ""))
    signature = signature_of(value)
    found = (
        []
        if elsewhere or "keywords:" in text or "properties:" in text
        else undescribed(signature, text)
    )
    if inspect.isroutine(value):
        result = str(signature.return_annotation)
        if (
            VERBS.match(text)
            and not re.match(r"None$|Iterator|.*_empty", result)
            and "Returns:" not in text
        ):
            found.append("Returns")
        raises = re.search(r"^ +raise \w", inspect.getsource(inspect.unwrap(value)), re.MULTILINE)
        if raises and not elsewhere and "Raises:" not in text:
            found.append("Raises")
    shown = ">>>" in text or elsewhere or re.search(rf"\b{value.__name__}\b", programs)
    return [*found, *([] if shown else ["example"])]


def signature_of(value: Any) -> inspect.Signature:
    """Without arguments for enums, and where a class has a constructor of the standard library."""
    makers = (
        base
        for base in getattr(value, "__mro__", ())
        if {"__init__", "__new__"} & vars(base).keys()
    )
    home = next(makers, value).__module__.split(".")[0]
    if home in sys.stdlib_module_names or (inspect.isclass(value) and issubclass(value, Enum)):
        return inspect.Signature()
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return inspect.Signature()


def undescribed(signature: inspect.Signature, text: str) -> list[str]:
    """The arguments that a docstring does not describe."""
    named = [
        name
        for name in signature.parameters
        if name not in ("self", "args", "kwargs") and name[0] != "_"
    ]
    described = r"^ +[\w, *]*\b{}\b[\w, *]*:"
    return [
        f"argument {name}"
        for name in named
        if not re.search(described.format(name), text, re.MULTILINE)
    ]


def test_every_entry_is_complete(layers: Any, root: Any) -> None:
    """Those that lack something are listed in `reference_gaps.txt`.

    A new entry is complete, a mended one taken out.
    """
    pages = [
        root / "README.md",
        *root.glob("packages/*/README.md"),
        *root.glob("docs/*.md"),
        *root.glob("docs/*/*.md"),
    ]
    texts = "\n".join(path.read_text() for path in pages)
    programs = "\n".join(re.findall(r"^```python\n(.*?)^```", texts, re.MULTILINE | re.DOTALL))
    lines = []
    for layer in layers:
        page = (root / "docs" / "reference" / f"{layer.name}.md").read_text()
        entries = {
            address: lacks(value, programs) for address, value in documented(layer.name, page)
        }
        lines += [f"{address}: {', '.join(found)}" for address, found in entries.items() if found]
    assert sorted(lines) == GAPS.read_text().splitlines()
