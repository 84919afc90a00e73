"""The cell magic `%%ranks 4`: run a cell on four local ranks, which keep their variables.

Load it by `%load_ext shoal_mesh`. The ranks stay up between cells, a pool for each number of ranks,
and `launch` uses them too. A cell sees the variables of earlier `%%ranks` cells of the same number.
If it reads a name that no such cell has set, it gets the notebook's own value of the name. The
notebook shows the output and the value of the last line of each rank, with the number of the rank.
Ranks with equal texts share one entry.

May import: argument_types, errors, local_ranks.
"""

from __future__ import annotations

import ast
import contextlib
import io
import pickle
from types import CodeType
from typing import Any

from .argument_types import name_ranks
from .errors import MeshError, MeshTypeError
from .local_ranks.launch import keep_ranks
from .local_ranks.pickle_functions import dump
from .local_ranks.pool import kept_pool

# Declared mutable state of a rank: the variables of its cells, and the values that the notebook has
# sent. A variable that is still the value in `_SENT` was not set by a cell.
_VARIABLES: dict[str, Any] = {"__name__": "__main__"}
_SENT: dict[str, Any] = {}


def register_magics(shell: Any) -> None:
    """Give an IPython shell the cell magic `%%ranks`, and have `launch` keep its ranks."""
    keep_ranks()

    def ranks(line: str, cell: str) -> None:
        """Run the cell on N local ranks (`%%ranks N`), which keep their variables."""
        run_cell(line, cell, shell.user_ns, _display)

    shell.register_magic_function(ranks, "cell")


def run_cell(line: str, cell: str, variables: dict[str, Any], show: Any) -> None:
    """Run a cell on as many ranks as the line says, and show outputs and last values.

    The notebook's variables that the cell reads and that no cell has set are sent. For each output,
    `show` is called with its kind ("text" or "html"), the output, and the ranks that printed it.
    After a RankError the next cell gets new ranks, without variables.
    """
    if not line.strip().isdigit():
        raise MeshError(f"%%ranks takes a number of ranks, as in `%%ranks 4`, got {line.strip()!r}")
    sent: dict[str, bytes] = {}
    unsent: dict[str, str] = {}
    for name in _names(compile(cell, "<cell>", "exec")) & variables.keys():
        try:
            sent[name] = dump(variables[name])
        except MeshTypeError as error:
            # reported if the cell turns out to need it
            unsent[name] = str(error)
    ranks_by_output: dict[tuple[str, str], list[int]] = {}
    pool = kept_pool(int(line), backend=None, show_output=True)
    for rank, outputs in enumerate(pool.run(_run_on_rank, cell, sent, unsent, timeout=None)):
        for output in outputs:
            ranks_by_output.setdefault(output, []).append(rank)
    # first the texts, then the HTML, each in the order of the ranks
    outputs_in_order = sorted(ranks_by_output, key=lambda output: output[0] == "html")
    for kind, text in outputs_in_order:
        show(kind, text, ranks_by_output[kind, text])


def _names(code: CodeType) -> set[str]:
    """Return the names that code reads or sets, inner functions included."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def _run_on_rank(
    cell: str, sent: dict[str, bytes], unsent: dict[str, str]
) -> list[tuple[str, str]]:
    """Run a cell, and return its output and the value of its last line, each as (kind, text)."""
    for name, data in sent.items():
        # a value that a cell of these ranks has set takes precedence over the notebook's
        is_unset = name not in _VARIABLES
        was_sent = name in _SENT and _VARIABLES.get(name) is _SENT[name]
        if is_unset or was_sent:
            value = pickle.loads(data)
            _VARIABLES[name] = value
            _SENT[name] = value
    try:
        return _outputs(cell)
    except NameError as error:
        if error.name in unsent:
            error.add_note(f"The notebook has {error.name!r}, but {unsent[error.name]}")
        raise


def _outputs(cell: str) -> list[tuple[str, str]]:
    """Run a cell; return what it prints, and the value of its last line."""
    body = ast.parse(cell, "<cell>").body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    statements = compile(ast.Module(body, []), "<cell>", "exec")
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(statements, _VARIABLES)
        if isinstance(last, ast.Expr):
            expression = compile(ast.Expression(last.value), "<cell>", "eval")
            value = eval(expression, _VARIABLES)
    outputs = []
    if printed.getvalue():
        outputs.append(("text", printed.getvalue()))
    if value is None or cell.rstrip().endswith(";"):
        return outputs
    html = getattr(value, "_repr_html_", None)
    if html is None:
        outputs.append(("text", f"{value!r}\n"))
    else:
        outputs.append(("html", html()))
    return outputs


def _display(kind: str, text: str, ranks: list[int]) -> None:
    from IPython.display import HTML, display

    label = f"[{name_ranks(ranks)}]"
    if kind == "html":
        display(HTML(f"<small>{label}</small>{text}"))  # type: ignore[no-untyped-call]  # untyped
        return
    end = "" if text.endswith("\n") else "\n"
    print(f"{label} {text}", end=end)  # noqa: T201  # the cell has printed it
