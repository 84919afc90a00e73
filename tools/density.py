"""Print how dense Python code is, per folder: `python tools/density.py FOLDER... [--worst N]`.

Figures count statements, which no formatter can move. The size of a statement is the number of
expression nodes that it holds itself: without statements nested in it, annotations, docstrings and
Load/Store markers. Statements of a module itself (tables, constants) are not sized.

The columns, per folder:

- statements: how many are sized; mean and p90 of their sizes;
- per 1,000 statements: parallel (assignments of several unrelated values, `a, b = x, y`; swaps
  excluded), nested (a comprehension, conditional or lambda inside of another), ifexp (conditional
  expressions), lambda;
- func>40, file>300: functions and files with more statements than that;
- >100: the share of code lines that are wider than 100 characters;
- comments: comments per code line; own:trail: comments on their own line per trailing comment;
- nounless: docstrings whose first word is neither verb nor noun (What, Whether, Who, Of, ...).

`--worst N` lists the N largest statements of all folders.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re

HEAD = [
    "folder",
    "statements",
    "mean",
    "p90",
    "parallel",
    "nested",
    "ifexp",
    "lambda",
    "func>40",
    "file>300",
    ">100",
    "comments",
    "own:trail",
    "nounless",
]
NESTING = (ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
NOUNLESS = re.compile(r"(What|Whether|Who|Whose|Until|Of|From|That|Where)\b")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNMEASURED = (*DEFINITIONS, ast.Import, ast.ImportFrom)
OTHER_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def is_parallel(node):
    """Tell if a statement assigns several values that have nothing to do with each other."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            written = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            return not written <= read  # a swap reads all that it writes
    return False


def nested(node, depth=0):
    """Count the comprehensions, conditionals and lambdas inside of another one."""
    total = 0
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, NESTING)
        total += bool(inside and depth)
        total += nested(child, depth + inside)
    return total


def expression_nodes(root):
    """Count the nodes of an expression."""
    return sum(not isinstance(n, ast.expr_context) for n in ast.walk(root))


def size_of(statement):
    """Count the expression nodes of a statement itself."""
    total = 0
    pending = list(ast.iter_child_nodes(statement))
    while pending:
        node = pending.pop()
        if isinstance(node, (*OTHER_STATEMENTS, ast.expr_context)):
            continue
        total += 1
        pending += ast.iter_child_nodes(node)
    if isinstance(statement, ast.AnnAssign):
        total -= expression_nodes(statement.annotation)
    return total


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def statements_in(node):
    return sum(isinstance(n, ast.stmt) and not is_docstring(n) for n in ast.walk(node))


def measure(folder, worst):
    counters = (
        "parallel nested ifexp lambdas long_functions long_files code w100 own trailing docs "
        "nounless"
    )
    t = dict.fromkeys(counters.split(), 0)
    t["sizes"] = []
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    for file in files:
        text = file.read_text()
        tree = ast.parse(text)
        docstring_lines = set()
        of_module = set(map(id, tree.body))
        t["nested"] += nested(tree)
        t["long_files"] += statements_in(tree) > 300
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, *DEFINITIONS)):
                doc = ast.get_docstring(node, clean=False)
                if doc is not None:
                    docstring_lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
                    t["docs"] += 1
                    t["nounless"] += bool(NOUNLESS.match(doc.strip()))
            if isinstance(node, FUNCTIONS):
                t["long_functions"] += statements_in(node) - 1 > 40
            t["ifexp"] += isinstance(node, ast.IfExp)
            t["lambdas"] += isinstance(node, ast.Lambda)
            if (
                isinstance(node, ast.stmt)
                and not isinstance(node, UNMEASURED)
                and not is_docstring(node)
            ):
                t["parallel"] += is_parallel(node)
                if id(node) not in of_module:
                    t["sizes"].append(size_of(node))
                    worst.append((t["sizes"][-1], file, node.lineno))
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if not stripped or number in docstring_lines:
                continue
            if stripped.startswith("#"):
                t["own"] += 1
                continue
            t["code"] += 1
            t["w100"] += len(line) > 100
            t["trailing"] += "  # " in line and "type: ignore" not in line and "noqa" not in line
    return t


def row_of(name, figures):
    """The cells of one row: the name of a folder and its figures."""
    sizes = sorted(figures["sizes"])
    count = max(len(sizes), 1)
    code = max(figures["code"], 1)
    per_thousand = [
        f"{figures[c] / count * 1000:.1f}" for c in ("parallel", "nested", "ifexp", "lambdas")
    ]
    return [
        name,
        len(sizes),
        f"{sum(sizes) / count:.2f}",
        sizes[int(count * 0.9)] if sizes else 0,
        *per_thousand,
        figures["long_functions"],
        figures["long_files"],
        f"{figures['w100'] / code * 100:.1f}%",
        f"{(figures['own'] + figures['trailing']) / code:.3f}",
        f"{figures['own'] / max(figures['trailing'], 1):.1f}",
        f"{figures['nounless']}/{figures['docs']}",
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--worst", type=int, default=0)
    arguments = parser.parse_args()
    worst = []
    total = {}
    table = [HEAD]
    for folder in arguments.folders:
        figures = measure(folder, worst)
        short = str(folder).replace("packages/", "").replace("/src", "")[-21:]
        table.append(row_of(short, figures))
        for key, value in figures.items():
            total[key] = total.get(key, type(value)()) + value
    table.append(row_of("sum", total))
    for name, *cells in table:
        print(f"{name:22s}" + "".join(f"{cell!s:>11s}" for cell in cells))
    worst.sort(key=lambda found: -found[0])
    for size, file, line in worst[: arguments.worst]:
        print(f"{size:4d} nodes  {file}:{line}")


if __name__ == "__main__":
    main()
