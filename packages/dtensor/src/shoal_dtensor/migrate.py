"""`python -m shoal_dtensor.migrate PATH`: rewrites imports of torch's stack to imports of shoal.

Imports of the public package spmd_types become imports of shoal_spmd_types.

By default no file is changed, and a diff is printed. `--write` rewrites the files. Names that no
package of shoal has, and imports that cannot be rewritten automatically, are listed by file and
line for a person to decide about.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Migrated", "main", "migrate"]

_TENSORS = ("shoal_dtensor", "shoal_mesh", "shoal_context_parallel", "shoal_tp_styles")
# Modules of torch, the longest prefix first. For each of them: the packages of shoal that may have
# its names, and whether a name that these lack stays torch's. If it does not, a person decides.
_LAYERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "torch.distributed.tensor.parallel": (("shoal_tp_styles",), False),
    "torch.distributed.tensor._shards_wrapper": ((), True),
    "torch.distributed.tensor": (_TENSORS, False),
    "torch.distributed._tensor": (_TENSORS, False),
    "torch.distributed.device_mesh": (("shoal_mesh",), False),
    "torch.distributed._shard": (("shoal_shard_api",), False),
    "torch.distributed._composable": (("shoal_data_parallel",), False),
    "torch.distributed.fsdp": (("shoal_data_parallel",), False),
    "torch.distributed.checkpoint.state_dict": (("shoal_dtensor",), True),
    "torch.utils._debug_mode": (("shoal_dtensor",), True),
    "spmd_types": (("shoal_spmd_types",), False),
}
# packages that are imported whole, `import spmd_types as spmd`, and the packages in their place
_PACKAGES = {"spmd_types": "shoal_spmd_types"}
# Modules of torch from which its private functions of context parallelism are imported, and these
# functions.
_CONTEXT_MODULES = (
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.experimental._context_parallel",
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._context_parallel._load_balancer",
)
_CONTEXT_NAMES = {
    "_context_parallel_shard": "context_parallel_shard",
    "_enable_context_parallel_dispatcher": "enable_context_parallel_dispatcher",
    "_disable_context_parallel_dispatcher": "disable_context_parallel_dispatcher",
    "_HeadTailLoadBalancer": "head_tail_layout",
}
# private names of torch, and the public functions of shoal in their place
_RENAMED = {
    "torch.distributed.fsdp._fully_shard._fsdp_init._get_mesh_info": (
        "shoal_data_parallel.mesh_info"
    ),
    **{
        f"{module}.{name}": f"shoal_context_parallel.{new}"
        for module in _CONTEXT_MODULES
        for name, new in _CONTEXT_NAMES.items()
    },
}
# names of torch.distributed that shoal_mesh has; its other names belong to c10d and stay
_MESH_NAMES = {"DeviceMesh", "init_device_mesh"}
# names that can be imported although `__all__` does not list them
_UNLISTED = {"shoal_mesh._mesh_resources", "shoal_dtensor._StridedShard"}
# torch's functional collectives take a group, or a mesh of torch's own class
_FUNCTIONAL = "torch.distributed._functional_collectives"
# private attributes, and what to use instead
_PRIVATE = {"_op_dispatcher": "cache_info, explain, register_rule"}
# methods of sharded modules that shoal refuses, and their replacements
_METHODS = {
    "set_symm_mem_for_comm": (
        "shoal gathers without buffers: leave it out, or set_custom_all_gather"
    ),
    "set_allocate_memory_from_process_group_for_comm": (
        "shoal gathers without buffers: leave it out, or set_custom_all_gather"
    ),
    "_set_unshard_async_op": "gathers are always asynchronous: leave it out",
    "_get_fsdp_state": "shoal does not have this state object: use the methods of the module",
}


class Migrated(NamedTuple):
    """A source file after the rewriting.

    Attributes:
        text: its new text.
        left: (line, question for a person), in order of the lines.

    Example:
        >>> text, left = migrate("from torch.distributed.tensor import Shard")
        >>> text, left
        ('from shoal_dtensor import Shard', [])
    """

    text: str
    left: list[tuple[int, str]]


@cache
def _is_module(dotted: str) -> bool:
    """Tell whether torch has a module of this name."""
    if not dotted.startswith("torch."):
        return False
    path = Path(torch.__file__).parent.joinpath(*dotted.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


class _Home(NamedTuple):
    """The layer that has a name of a module of torch, or a question for a person.

    Both are empty if the name stays torch's. `name` is the name in the layer, if it is another one.
    """

    layer: str = ""
    question: str = ""
    name: str = ""


@cache
def _find(module: str, name: str) -> _Home:
    """Return the home of a name of a module of torch."""
    root = _root_of(module)
    renamed = _RENAMED.get(f"{module}.{name}", "")
    if renamed:
        layer, _, new_name = renamed.rpartition(".")
        return _Home(layer, name=new_name)
    if not root or _is_module(f"{module}.{name}"):
        is_mesh_name = module == "torch.distributed" and name in _MESH_NAMES
        return _Home("shoal_mesh" if is_mesh_name else "")
    layers, stays = _LAYERS[root]
    hints = []
    absent = []
    for layer in layers:
        try:
            # Imports like `from layer import name`, so that an error contains the package's hint.
            package = __import__(layer, fromlist=[name])
        except ModuleNotFoundError:
            absent.append(layer)
        except ImportError as error:
            hints.append(str(error))
        else:
            if name in package.__all__ or f"{layer}.{name}" in _UNLISTED:
                return _Home(layer)
    if stays:
        return _Home()
    missing = "no package of shoal has this name"
    if absent:
        missing = f"this name may be in {', '.join(absent)}, which is not installed"
    reason = hints[0] if hints else missing
    return _Home(question=f"{module}.{name}: {reason}")


def _root_of(module: str) -> str:
    """Return the first module of the table that is, or contains, a module; "" if none does."""
    for root in _LAYERS:
        if f"{module}.".startswith(f"{root}."):
            return root
    return ""


class Finding(NamedTuple):
    """A node to rewrite, with its new text or a question for a person."""

    node: ast.stmt | ast.expr
    text: str = ""
    question: str = ""


def _findings(tree: ast.AST, text: str) -> Iterator[Finding]:
    """Yield the findings for imports of torch and spmd_types, and for dotted names of theirs.

    Comments inside import statements are kept.
    """
    # modules of torch by their names in the file: {"dist": "torch.distributed"}
    modules = dict[str, str]()
    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, _ = alias.name.partition(".")
                modules[alias.asname or top] = alias.name if alias.asname else top
            yield from _findings_in_package_import(node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _is_module(name):
                    modules[alias.asname or alias.name] = name
            yield from _findings_in_import(node, text)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from _findings_in_name(node, modules)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _findings_in_collectives(node, modules)


def _findings_in_package_import(node: ast.Import) -> Iterator[Finding]:
    """Yield the new text of one `import spmd_types as spmd`: names in the file stay as they are."""
    if not any(_package_of(alias.name) for alias in node.names):
        return
    names = []
    for alias in node.names:
        package = _package_of(alias.name)
        if not package:
            names.append(ast.unparse(alias))
            continue
        home = _PACKAGES[package]
        if find_spec(home) is None:
            yield Finding(node, question=f"{package}: its names are in {home}: install it")
            return
        if alias.asname:
            names.append(f"{home}{alias.name.removeprefix(package)} as {alias.asname}")
            continue
        names.append(f"{home} as {package}")
        if alias.name != package:
            names.append(f"{home}{alias.name.removeprefix(package)}")
    yield Finding(node, f"import {', '.join(dict.fromkeys(names))}")


def _package_of(module: str) -> str:
    """Return the package that has another name in shoal and contains a module; "" if none does."""
    top, _, _ = module.partition(".")
    return top if top in _PACKAGES else ""


def _findings_in_import(node: ast.ImportFrom, text: str) -> Iterator[Finding]:
    """Yield the new text of one `from torch... import ...`, with questions for its names."""
    module = str(node.module)
    names_from = dict[str, list[str]]()
    for alias in node.names:
        home = _find(module, alias.name)
        imported = ast.unparse(alias)
        if home.name:
            imported = f"{home.name} as {alias.asname or alias.name}"
        names_from.setdefault(home.layer or module, []).append(imported)
        yield Finding(node, question=home.question)
    if set(names_from) == {module}:
        return
    # The names that stay torch's come first.
    in_order = [home for home in dict.fromkeys((module, *names_from)) if home in names_from]
    statements = [f"from {home} import {', '.join(names_from[home])}" for home in in_order]
    comments = re.findall(r"#.*", ast.get_source_segment(text, node) or "")
    line_start = f"\n{' ' * node.col_offset}"
    yield Finding(node, "  ".join([line_start.join(statements), *comments]))


def _findings_in_name(node: ast.Attribute, modules: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the new text of one dotted name, or a question for it."""
    first, _, rest = ast.unparse(node).partition(".")
    module, _, name = f"{modules.get(first, '')}.{rest}".rpartition(".")
    if node.attr in _PRIVATE:
        yield Finding(node, question=f"{node.attr}: use {_PRIVATE[node.attr]}")
    elif node.attr in _METHODS:
        yield Finding(node, question=f"{node.attr}: {_METHODS[node.attr]}")
    elif module in _LAYERS or _is_module(module):
        home = _find(module, name)
        # the import of a package is rewritten, and the file's name of it stays
        is_rewritten = home.layer and not _package_of(module)
        new = f"{home.layer}.{home.name or name}" if is_rewritten else ""
        yield Finding(node, new, home.question)


def _findings_in_collectives(
    function: ast.FunctionDef | ast.AsyncFunctionDef, modules: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield groups in place of the meshes that a function passes to functional collectives.

    A parameter of the function that is annotated as a DeviceMesh is a mesh: `group=mesh` becomes
    `group=mesh.get_group()`, and `(mesh, 0)` becomes `mesh.get_group(0)`.
    """
    parameters = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    meshes = {
        parameter.arg
        for parameter in parameters
        if parameter.annotation is not None
        and re.search(r"\bDeviceMesh\b", ast.unparse(parameter.annotation))
    }
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        owner = ast.unparse(call.func.value)
        first, _, rest = owner.partition(".")
        module = f"{modules.get(first, '')}.{rest}".removesuffix(".")
        if module != _FUNCTIONAL:
            continue
        for value in (*call.args, *[keyword.value for keyword in call.keywords]):
            if isinstance(value, ast.Name) and value.id in meshes:
                yield Finding(value, f"{value.id}.get_group()")
            elif isinstance(value, ast.Tuple) and len(value.elts) == 2:
                mesh, axis = value.elts
                if isinstance(mesh, ast.Name) and mesh.id in meshes:
                    yield Finding(value, f"{mesh.id}.get_group({ast.unparse(axis)})")


def migrate(text: str) -> Migrated:
    r"""Return a source text with torch's imports rewritten.

    Args:
        text: Python source.

    Raises:
        SyntaxError: if the text is not valid Python.

    Example:
        >>> migrate("from torch.distributed.tensor import DTensor, Shard, nonsense").text
        'from torch.distributed.tensor import nonsense\nfrom shoal_dtensor import DTensor, Shard'
        >>> migrate("from torch.distributed.device_mesh import nonsense").left
        [(1, 'torch.distributed.device_mesh.nonsense: no package of shoal has this name')]
    """
    tree = ast.parse(text)
    source = text.encode()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    edits: list[tuple[int, int, str]] = []
    left: list[tuple[int, str]] = []
    layers: set[str] = set()
    for node, new, question in _findings(tree, text):
        line_start = starts[node.lineno - 1]
        begin = line_start + node.col_offset
        last_line = starts[(node.end_lineno or node.lineno) - 1]
        end = last_line + (node.end_col_offset or 0)
        if new and isinstance(node, ast.ImportFrom):
            before = source[line_start:begin]
            behind, _, _ = source[end:].partition(b"\n")
            if before.strip() or behind.lstrip().startswith(b";"):
                question = "an import that shares a line with other statements"
        if question:
            left.append((node.lineno, question))
        elif new:
            edits.append((begin, end, new))
            if isinstance(node, ast.Attribute):
                layer, _, _ = new.partition(".")
                layers.add(layer)
    # nested functions have the calls of their collectives twice
    for begin, end, new in sorted({*edits}, reverse=True):
        source = source[:begin] + new.encode() + source[end:]
    return Migrated(_with_imports(source.decode(), layers), sorted(left))


def _with_imports(text: str, layers: Iterable[str]) -> str:
    """Return a source with imports of these packages before its first import of torch."""
    first = re.search(r"^(import|from) torch\b", text, re.MULTILINE)
    position = first.start() if first else 0
    imports = "".join([f"import {layer}\n" for layer in sorted(layers)])
    return text[:position] + imports + text[position:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 1 if a file could not be parsed as Python.

    Args:
        arguments: files, folders and `--write`; the arguments of the process when left out.

    Returns:
        The exit status, 0 or 1.
    """
    parser = argparse.ArgumentParser(prog="python -m shoal_dtensor.migrate", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files and folders")
    parser.add_argument(
        "--write", action="store_true", help="rewrite the files instead of printing a diff"
    )
    options = parser.parse_args(arguments)
    files = []
    for path in options.paths:
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    changed = 0
    left = 0
    broken = 0
    for path in files:
        old = path.read_text(encoding="utf-8")
        try:
            new = migrate(old)
        except SyntaxError as error:
            broken += 1
            sys.stderr.write(f"{path}: {error}\n")
            continue
        before = old.splitlines(keepends=True)
        after = new.text.splitlines(keepends=True)
        diff = list(difflib.unified_diff(before, after, str(path), str(path), n=0))
        added = [line for line in diff if line.startswith("+")]
        changed += sum(not line.startswith("+++") for line in added)
        left += len(new.left)
        if options.write and diff:
            path.write_text(new.text, encoding="utf-8")
        elif diff:
            sys.stdout.writelines(diff)
        for line, advice in new.left:
            sys.stdout.write(f"{path}:{line}: {advice}\n")
    verb = "written" if options.write else "would change"
    sys.stdout.write(f"{changed} lines {verb}, {left} to change by hand\n")
    return 1 if broken else 0


def command(arguments: Sequence[str]) -> int:
    """Run `shoal migrate ...`: `main` with the arguments after the name of the command."""
    return main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
