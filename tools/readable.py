"""Find statements that a reader has to take apart: `python tools/readable.py FOLDER...`.

The rules, each for a construct that `tools/density.py` counts:

- an assignment has one target, unless it unpacks one value or swaps two;
- a conditional expression stands in no tuple, subscript or other conditional expression;
- a comprehension holds no other comprehension and no lambda;
- a comment of more than 40 characters stands on its own line, above the code;
- no line of a comment begins with "type:", which parsers (Sphinx's too) read as a type;
- a call of a function or class of these folders has at most four positional arguments;
- no parameter or result is a tuple of three or more parts: a NamedTuple or a dataclass has names
  for them. A tuple that is only compared, such as a key, is annotated `tuple[object, ...]`,
  `Hashable` or `object`;
- a function has at most 40 statements, a file at most 300.

`apply` of an autograd function is called with any number of positional arguments: it takes no
keyword arguments. Operators of torch (`torch.ops.aten.mm`) are too: rules of our own have their
names. torch and pickle, not readers, unpack the results of `forward` and `backward` of an autograd
function, and of `reducer_override`. `dispatch` may be longer than
40 statements: one more call in Python adds 60 ns to each operator.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from density import is_parallel, statements_in

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_POSITIONAL = 4
LONGEST_TRAILING = 40
LONGEST_FUNCTION = 40
LONGEST_FILE = 300
MAY_BE_LONG = {"dispatch"}
LONGEST_TUPLE = 2
TAKE_NO_KEYWORDS = {"apply"}
METHODS_OF_AUTOGRAD_FUNCTIONS = {"forward", "backward"}
METHODS_OF_PICKLERS = {"reducer_override"}
# A comment that a tool reads stands where the tool looks for it, with its reason behind it.
FOR_TOOLS = re.compile(r"#\s*(type:|noqa|fmt:|pragma)")
READ_AS_TYPE = re.compile(r"#\s*type:")

Finding = tuple[int, str]


def find_assignments(nodes: list[ast.AST]) -> Iterator[Finding]:
    """Find assignments of several unrelated values, and assignments to several targets."""
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        if len(node.targets) > 1:
            yield node.lineno, "one target for each assignment"
        elif is_parallel(node):
            yield node.lineno, "one value for each assignment"


def find_conditionals(nodes: list[ast.AST]) -> Iterator[Finding]:
    """Find conditional expressions in tuples, subscripts and other conditional expressions."""
    for node in nodes:
        if isinstance(node, ast.Tuple):
            parts = node.elts
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.IfExp):
            parts = [node.test, node.body, node.orelse]
        else:
            continue
        if any(isinstance(part, ast.IfExp) for part in parts):
            yield node.lineno, f"a name for the conditional in this {type(node).__name__.lower()}"


def find_comprehensions(nodes: list[ast.AST]) -> Iterator[Finding]:
    """Find comprehensions that hold a comprehension or a lambda."""
    for node in nodes:
        if not isinstance(node, COMPREHENSIONS):
            continue
        inner = (part for part in ast.walk(node) if part is not node)
        if any(isinstance(part, (*COMPREHENSIONS, ast.Lambda)) for part in inner):
            yield node.lineno, "a name or a loop for the expression inside of this comprehension"


def find_comments(text: str) -> Iterator[Finding]:
    """Find long comments behind code, and lines of prose that parsers read as types."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        is_trailing = bool(token.line[: token.start[1]].strip())
        if not is_trailing and READ_AS_TYPE.match(token.string):
            yield token.start[0], 'another first word than "type:" in this line of a comment'
        if FOR_TOOLS.match(token.string):
            continue
        if is_trailing and len(token.string) > LONGEST_TRAILING + len("# "):
            yield token.start[0], "the comment above this line"


def find_positional(nodes: list[ast.AST], names: set[str]) -> Iterator[Finding]:
    """Find calls of our own functions with too many positional arguments."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        if name not in names or name in TAKE_NO_KEYWORDS or is_torch_operator(node):
            continue
        is_spread = any(isinstance(argument, ast.Starred) for argument in node.args)
        if len(node.args) > MOST_POSITIONAL and not is_spread:
            yield node.lineno, f"keywords for the arguments of {name} after the fourth"


def find_tuples(tree: ast.Module, nodes: list[ast.AST]) -> Iterator[Finding]:
    """Find long tuples that are parameters or results of functions, and names of such types."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_long_tuple_type(node.value):
            yield node.lineno, f"a NamedTuple for {ast.unparse(node.value)}"
    for node in nodes:
        if not isinstance(node, FUNCTIONS) or is_unpacked_by_torch_or_pickle(node):
            continue
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        annotations = [parameter.annotation for parameter in parameters]
        for annotation in filter(None, [*annotations, node.returns]):
            for part in filter(is_long_tuple_type, ast.walk(annotation)):
                yield node.lineno, f"a NamedTuple for {ast.unparse(part)}"
        returns_any = isinstance(node.returns, ast.Name) and node.returns.id == "Any"
        if returns_any and any(map(returns_long_tuple, own_nodes(node))):
            yield node.lineno, f"a NamedTuple for the tuple that {node.name} returns"


def find_long(tree: ast.Module, nodes: list[ast.AST]) -> Iterator[Finding]:
    """Find functions and files with too many statements."""
    count = statements_in(tree)
    if count > LONGEST_FILE:
        yield 1, f"a second file: {count} statements, at most {LONGEST_FILE}"
    for node in nodes:
        if not isinstance(node, FUNCTIONS) or node.name in MAY_BE_LONG:
            continue
        # the definition itself is a statement too
        count = statements_in(node) - 1
        if count > LONGEST_FUNCTION:
            yield node.lineno, f"a second function: {count} statements, at most {LONGEST_FUNCTION}"


def is_long_tuple_type(node: ast.AST) -> bool:
    """Tell whether an expression is the type of a tuple of three or more parts."""
    if not isinstance(node, ast.Subscript) or ast.unparse(node.value) != "tuple":
        return False
    return isinstance(node.slice, ast.Tuple) and len(node.slice.elts) > LONGEST_TUPLE


def is_unpacked_by_torch_or_pickle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether the result of a function is a tuple because torch or pickle takes it apart."""
    is_static = any(
        ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list
    )
    if is_static and function.name in METHODS_OF_AUTOGRAD_FUNCTIONS:
        return True
    return function.name in METHODS_OF_PICKLERS


def returns_long_tuple(node: ast.AST) -> bool:
    """Tell whether a statement returns a tuple of three or more parts."""
    if not isinstance(node, ast.Return) or not isinstance(node.value, ast.Tuple):
        return False
    parts = node.value.elts
    return len(parts) > LONGEST_TUPLE and not any(isinstance(part, ast.Starred) for part in parts)


def own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without the functions and classes inside of it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def called_name(call: ast.Call) -> str:
    """Return the last part of the name of a called function; '' if it has no name."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def is_torch_operator(call: ast.Call) -> bool:
    """Tell whether a call is one of an operator of torch, by its full name."""
    return ast.unparse(call.func).startswith("torch.ops.")


def accepts_keywords(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether no parameter is positional only; a property is not called with arguments."""
    is_property = any(ast.unparse(decorator) == "property" for decorator in function.decorator_list)
    return not is_property and not function.args.posonlyargs and function.args.vararg is None


def defined_names(trees: list[ast.Module]) -> set[str]:
    """Collect the functions and classes that some modules define."""
    names = set[str]()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) or (
                isinstance(node, FUNCTIONS) and accepts_keywords(node)
            ):
                names.add(node.name)
    return names


def main() -> int:
    """Print the findings; fail if there are any."""
    files = sorted(file for folder in sys.argv[1:] for file in Path(folder).rglob("*.py"))
    texts = {file: file.read_text() for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    names = defined_names([*trees.values()])
    count = 0
    for file, tree in trees.items():
        # six rules read them, and a walk takes longer than a rule
        nodes = [*ast.walk(tree)]
        findings = [
            *find_assignments(nodes),
            *find_conditionals(nodes),
            *find_comprehensions(nodes),
            *find_comments(texts[file]),
            *find_positional(nodes, names),
            *find_tuples(tree, nodes),
            *find_long(tree, nodes),
        ]
        for line, advice in sorted(findings):
            print(f"{file}:{line}: {advice}")
        count += len(findings)
    print(f"{count} places to take apart" if count else "every statement can be read as it stands")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
