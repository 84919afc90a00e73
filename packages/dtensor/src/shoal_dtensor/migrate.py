"""`python -m shoal_dtensor.migrate PATH`: imports of torch's stack become those of shoal, and what is left is listed.

By default nothing is changed: the difference is printed. `--write` writes it. What a person has to decide is listed by
file and line: names that no layer of shoal has, and imports that cannot be rewritten by themselves.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from shoal_mesh.internal import dataclass

__all__ = ["Migrated", "main", "migrate"]

_STYLES, _SHARDS = ("shoal_tp_styles",), ("shoal_shard_api",)
_DATA, _CONTEXT = ("shoal_data_parallel",), "shoal_context_parallel"
_TENSORS = ("shoal_dtensor", "shoal_mesh", _CONTEXT, "shoal_tp_styles")
# Modules of torch, the longest prefix first, and the layers that may have their names. Where `strict` is said, a name
# without a home is for a person; elsewhere (torch keeps what shoal has not) it stays torch's.
_HOMES: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "torch.distributed.tensor.parallel": (_STYLES, True),
    "torch.distributed.tensor._shards_wrapper": ((), False),
    "torch.distributed.tensor": (_TENSORS, True),
    "torch.distributed._tensor": (_TENSORS, True),
    "torch.distributed.device_mesh": (("shoal_mesh",), True),
    "torch.distributed._shard": (_SHARDS, True),
    "torch.distributed._composable": (_DATA, True),
    "torch.distributed.fsdp": (_DATA, True),
    "torch.distributed.checkpoint.state_dict": (("shoal_dtensor",), False),
    "torch.utils._debug_mode": (("shoal_dtensor",), False),
    "torch.distributed": (("shoal_mesh",), False),
}
_UNLISTED = {"shoal_mesh": {"_mesh_resources"}, "shoal_dtensor": {"_StridedShard"}}
_ONLY = {"torch.distributed": {"DeviceMesh", "init_device_mesh"}}  # its other names are those of c10d
_PRIVATE = {"_op_dispatcher": "cache_info, explain, register_rule"}


@dataclass
class Migrated:
    """A source file after the rewriting.

    Attributes:
        text: its new text.
        left: (line, what a person has to decide), in order of the lines.
    """

    text: str
    left: list[tuple[int, str]] = field(default_factory=list)


@cache
def _names(layer: str) -> frozenset[str]:
    """The public names of a layer, read without importing it; none if it is not installed."""
    spec = find_spec(layer)
    if spec is None or spec.origin is None:
        return frozenset()
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            found = {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
            return frozenset({str(name) for name in found} | _UNLISTED.get(layer, set()))
    return frozenset()


def _root(module: str) -> str | None:
    """The entry of `_HOMES` that a module of torch falls under."""
    return next((root for root in _HOMES if module == root or module.startswith(f"{root}.")), None)


def _home(module: str, name: str) -> str | None:
    """The layer that has a name of a module of torch."""
    root = _root(module)
    if root is None or name not in _ONLY.get(module, {name}) or (root == "torch.distributed" and module != root):
        return None
    return next((layer for layer in _HOMES[root][0] if name in _names(layer)), None)


@cache
def _is_module(dotted: str) -> bool:
    """Whether torch has a module of this name."""
    path = Path(torch.__file__).parent.joinpath(*dotted.split(".")[1:])
    return dotted.startswith("torch.") and (path.is_dir() or path.with_suffix(".py").is_file())


def _leave(line: int, module: str, name: str, result: Migrated) -> None:
    """Note a name that has to be here and is not."""
    root = _root(module)
    if root is not None and _HOMES[root][1]:
        result.left.append((line, f"{module}.{name}: {_instead(root, name)}"))


def _instead(root: str, name: str) -> str:
    """What a layer says of a name that it has not."""
    absent = [layer for layer in _HOMES[root][0] if find_spec(layer) is None]
    for layer in _HOMES[root][0]:
        try:
            if layer not in absent:
                __import__(layer, fromlist=[name])  # as `from layer import name` does, whose error has the hint
        except ImportError as error:
            return str(error)
    return f"{', '.join(absent)} is not installed, which may have it" if absent else "no layer of shoal has it"


def migrate(text: str) -> Migrated:
    r"""A source text with torch's imports rewritten.

    Raises:
        SyntaxError: if the text is no Python.

    Example:
        >>> migrate("from torch.distributed.tensor import DTensor, Shard, nonsense").text
        'from torch.distributed.tensor import nonsense\nfrom shoal_dtensor import DTensor, Shard\n'
        >>> migrate("from torch.distributed.device_mesh import nonsense").left
        [(1, 'torch.distributed.device_mesh.nonsense: no layer of shoal has it')]
    """
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    result, edits, wanted = Migrated(text), [], set()
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        _note_modules(node, aliases)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            new = _import_from(node, lines, result)
            if new is not None:
                edits.append((node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset, new))
    for node, dotted in _chains(tree, aliases):
        module, _, name = dotted.rpartition(".")
        layer = _home(module, name)
        if layer is not None:
            wanted.add(layer)
            place = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset)
            edits.append((*place, f"{layer}.{name}"))
        elif node.attr in _PRIVATE:
            result.left.append((node.lineno, f"{node.attr}: use {_PRIVATE[node.attr]}"))
        elif _is_module(module) and not _is_module(dotted):
            _leave(node.lineno, module, name, result)
    for first, start, last, end, new in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        tail = _bytes_from(lines[last - 1], end)
        lines[first - 1 : last] = [_bytes_to(lines[first - 1], start) + new + tail]
    result.text = _with_imports("".join(lines), wanted)
    result.left.sort()
    return result


def _note_modules(node: ast.AST, aliases: dict[str, str]) -> None:
    """`import torch.distributed as dist`, `from torch import distributed as dist`: names of modules."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            aliases[alias.asname or first] = alias.name if alias.asname else first
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            if _is_module(f"{node.module}.{alias.name}"):
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"


def _import_from(node: ast.ImportFrom, lines: Sequence[str], result: Migrated) -> str | None:
    """The statements that take the place of an import; None where it stays."""
    module = node.module or ""
    root = _root(module)
    if root is None or (root == "torch.distributed" and module != root):
        return None
    moved: dict[str, list[str]] = {}
    for alias in node.names:
        layer = _home(module, alias.name)
        spelled = alias.name + (f" as {alias.asname}" if alias.asname else "")
        moved.setdefault(layer or module, []).append(spelled)
        if layer is None and not _is_module(f"{module}.{alias.name}"):
            _leave(node.lineno, module, alias.name, result)
    if set(moved) == {module}:
        return None
    source = lines[node.lineno - 1 : node.end_lineno]
    if ";" in source[-1] or source[0][: node.col_offset].strip():
        result.left.append((node.lineno, "an import beside other statements of its line"))
        return None
    indent = " " * node.col_offset
    comments = [comment for line in source for comment in re.findall(r"#.*", line)]
    in_order = sorted(moved.items(), key=lambda item: item[0] != module)  # what stays torch's comes first
    statements = [f"from {home} import {', '.join(names)}" for home, names in in_order]
    last = statements[-1] + (f"  {'  '.join(comments)}" if comments else "")
    return f"\n{indent}".join([*statements[:-1], last]) + ("" if source[-1].endswith("\n") else "\n")


def _chains(tree: ast.AST, aliases: Mapping[str, str]) -> Iterator[tuple[ast.Attribute, str]]:
    """Every `a.b.c` that begins with a module of torch, with the module's own name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and (inner.id in aliases or node.attr in _PRIVATE):
            yield node, ".".join([aliases.get(inner.id, inner.id), *reversed(names)])


def _bytes_to(line: str, column: int) -> str:
    return line.encode()[:column].decode()


def _bytes_from(line: str, column: int | None) -> str:
    tail = line.encode()[column:].decode()
    return tail if not tail.lstrip().startswith("#") else "\n"  # the comment has moved with its import


def _with_imports(text: str, layers: set[str]) -> str:
    """The text with `import LAYER` behind its first import of torch."""
    if not layers:
        return text
    statements = "".join(f"import {layer}\n" for layer in sorted(layers))
    found = re.search(r"^import torch\b.*\n|^from torch\b.*\n", text, re.MULTILINE)
    return text[: found.start()] + statements + text[found.start() :] if found else statements + text


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, or 1 where a file could not be read as Python."""
    parser = argparse.ArgumentParser(prog="python -m shoal_dtensor.migrate", description=__doc__)
    parser.add_argument("paths", nargs="+", help="files and folders")
    parser.add_argument("--write", action="store_true", help="write the files instead of printing a difference")
    options = parser.parse_args(arguments)
    changed = left = broken = 0
    for path in _files(options.paths):
        old = path.read_text(encoding="utf-8")
        try:
            new = migrate(old)
        except SyntaxError as error:
            broken += 1
            sys.stderr.write(f"{path}: {error}\n")
            continue
        before, after = old.splitlines(keepends=True), new.text.splitlines(keepends=True)
        diff = list(difflib.unified_diff(before, after, str(path), str(path), n=0))
        changed += sum(line.startswith("+") and not line.startswith("+++") for line in diff)
        if options.write and diff:
            path.write_text(new.text, encoding="utf-8")
        elif diff:
            sys.stdout.writelines(diff)
        for line, what in new.left:
            left += 1
            sys.stdout.write(f"{path}:{line}: {what}\n")
    sys.stdout.write(f"{changed} lines {'written' if options.write else 'would change'}, {left} for a person\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
