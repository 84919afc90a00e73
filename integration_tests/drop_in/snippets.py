"""Snippets of programs, run with both libraries' names, and the differences of the results."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from integration_tests.drop_in.libraries import names

__all__ = ["Snippet", "compare", "snippets"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Snippet:
    """A few lines of a program.

    Attributes:
        area: the file that it stands in.
        code: the lines; the value of the last one is what is compared.
        row: anchor of the row of docs/differences.md that explains why the answers differ; empty
            where they do not.
    """

    area: str
    code: str
    row: str = ""


def snippets(*areas: str) -> list[Snippet]:
    """Those of some areas, or all: blocks of lines between empty ones.

    A block has `# differs: ROW` first where the results do.
    """
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        if areas and path.stem not in areas:
            continue
        for block in re.split(r"\n\s*\n", path.read_text().strip()):
            first, _, rest = block.partition("\n")
            row = first.removeprefix("# differs: ") if first.startswith("# differs: ") else ""
            found.append(Snippet(path.stem, rest if row else block, row))
    return found


def compare(snippet: Snippet) -> str:
    """What differs on this rank: empty, or a kind and both answers.

    Kinds: `refused` (torch answers, shoal raises), `error` (both raise, and shoal's is not an
    instance of the builtin that torch's is), `values`, `local` (the same global values, and another
    local part of the same shape), `layout` (the same global values in other parts), `answer`
    (anything else). What torch refuses and shoal answers is not a difference.
    """
    theirs, ours = _answer(snippet.code, "torch"), _answer(snippet.code, "shoal")
    if isinstance(theirs, Exception):
        # torch did not mean to refuse
        accident = isinstance(theirs, AttributeError | UnboundLocalError)
        if not isinstance(ours, Exception) or isinstance(ours, _builtin(theirs)) or accident:
            return ""
        return f"error: {type(theirs).__name__} | {type(ours).__name__}: {_short(ours)}"
    if isinstance(ours, Exception):
        return f"refused: {_short(theirs)} | {type(ours).__name__}: {_short(ours)}"
    if theirs == ours:
        return ""
    return f"{_kind(theirs, ours)}: {_short(theirs)} | {_short(ours)}"


def _answer(code: str, library: str) -> Any:
    """What a snippet evaluates to with one library's names, as plain data.

    If it raises, this is the error.
    """
    scope = dict(names(library))
    tree = ast.parse(code)
    last: ast.expr | None = None
    if isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1].value
        tree.body.pop()
    # not torch.manual_seed, which formats a stack for each missing device
    torch.default_generator.manual_seed(0)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exec(compile(tree, "snippet", "exec"), scope)
            if last is None:
                return _plain(None)
            return _plain(eval(compile(ast.Expression(last), "snippet", "eval"), scope))
    except Exception as error:
        # whatever a library raises is its answer
        return error


def _plain(value: Any) -> Any:
    """A value as data that compares.

    Tensors compare by shape, dtype and numbers, DTensors also by layout and parts.
    """
    if isinstance(value, torch.Tensor) and hasattr(value, "placements"):
        tensor: Any = value
        with torch.no_grad():
            parts = {"whole": _plain(tensor.full_tensor()), "local": _plain(tensor.to_local())}
            return parts | {"placements": str(_plain(tensor.placements))}
    if isinstance(value, torch.nn.Parameter):
        return ("Parameter", _plain(value.data))
    if type(value).__name__ == "ShardedTensor":
        shards = [(_plain(s.tensor), s.metadata.shard_offsets) for s in value.local_shards()]
        return ("ShardedTensor", tuple(value.size()), shards)
    if isinstance(value, torch.Tensor):
        numbers = (
            value.detach().double()
            if value.dtype != torch.bool and not value.is_complex()
            else value.detach()
        )
        rounded = [] if value.is_meta else _rounded(numbers.tolist())
        return ("tensor", tuple(value.shape), str(value.dtype), rounded)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | torch.Size):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"torch\.distributed\.[\w.]+\.|shoal_\w+\.[\w.]*\.", "", value)
    if value is None or isinstance(value, bool | int | float | complex):
        return _rounded(value)
    if hasattr(value, "is_shard"):
        text = re.sub(r"Partial\(norm(\d+)\)", r"NormPartial(\1)", repr(value).lstrip("_"))
        return re.sub(r"MaskPartial\(.*\)", "Partial(sum)", text)
    return type(value).__name__.lstrip("_")


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value else "nan"
    return value


def _kind(theirs: Any, ours: Any) -> str:
    if not (
        isinstance(theirs, dict)
        and isinstance(ours, dict)
        and "whole" in theirs
        and "whole" in ours
    ):
        return "answer" if not (isinstance(theirs, tuple) and isinstance(ours, tuple)) else "values"
    if theirs["whole"] != ours["whole"]:
        return "values"
    same_shape = theirs["local"][1:3] == ours["local"][1:3]
    return "local" if same_shape and theirs["local"] != ours["local"] else "layout"


def _builtin(error: Exception) -> type[BaseException]:
    """The builtin exception that an error is."""
    known = [kind for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind]
    return known[0] if issubclass(known[0], BaseException) else Exception


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 160 else text[:157] + "..."
