"""Modules that may draw random numbers, found in their code before they run.

A watch makes draws equal to the draws of one device (`watch.py`). Modules that never draw must run
without a watch: a watched forward is a graph break, so `torch.compile(fullgraph=True)` of such a
model would fail, and a watch of every training forward costs 17 % of the time (ADR 32). The first
forward cannot decide, because a model may draw in its second forward only. Neither Python nor torch
has a function that tells, without running another function, whether that function may draw.

Therefore the names are read that the code of a module loads. This is the only file that reads
byte code. For example, the code of

    def forward(self, x):
        return helpers.noisy(self.up(x), p=0.1)

loads the names "helpers", "noisy" and "p", and the child module "up". None of them is the name of a
draw. `noisy` is a function of a module of the user, so its code is read too.

Instructions are read, and not only the list of names (`code.co_names`), because the list does not
tell `self.dropout` from `F.dropout`: the first is a child module, which may be in eval mode or have
a probability of 0.

A name of a draw that is never called costs the time of a watch, but changes no number. A draw that
no name shows, such as `getattr(functional, "drop" + "out")`, is watched only while a module that
was found draws in the same `DrawRegion` (`region.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dis import get_instructions
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ..modules.forwards import forward_of
from .drawing_calls import ALWAYS_DRAWING, DROPOUT_POSITIONS

_DROPOUT_MODULES = (
    nn.Dropout
    | nn.Dropout1d
    | nn.Dropout2d
    | nn.Dropout3d
    | nn.AlphaDropout
    | nn.FeatureAlphaDropout
)
_DRAWING_MODULES_OF_TORCH = _DROPOUT_MODULES | nn.RReLU | nn.MultiheadAttention | nn.RNNBase
# Names by which code is recognized that may draw. Every name that contains "drop" is one too, and
# attention is recognized by its dropout argument.
_NAMES_OF_DRAWS = ALWAYS_DRAWING | {"rrelu", "rrelu_"}
# The start of the names of this project's packages ("shoal_", or another one in a vendored copy).
# Their functions replace forwards and are not code of the user.
_PACKAGE_PREFIX = __name__.partition("dtensor.")[0]


def find_drawing_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree whose own forward may draw."""
    return [module for module in root.modules() if _may_draw(module)]


def draws_now(module: nn.Module) -> bool:
    """Tell whether a module that may draw does so in its present mode.

    It draws while training, unless it is a module of torch whose probability is 0.
    """
    if not module.training or not _is_of_torch(module):
        return module.training
    return getattr(module, "p", 1) != 0 and getattr(module, "dropout", 1) != 0


def _is_of_torch(module: nn.Module) -> bool:
    """Tell whether torch defines the class of a module."""
    return _is_class_of_torch(type(module))


def _is_class_of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.modules.")


def _may_draw(module: nn.Module) -> bool:
    """Tell whether a module's own forward may draw numbers that a watch must follow."""
    forward = forward_of(module)
    while forward is not None and forward.inner is not None:
        forward = forward.inner
    if forward is not None and forward.sampling == "own":
        # The innermost forward replaces the module's code, and draws as one device by itself.
        return False
    if _is_of_torch(module):
        return isinstance(module, _DRAWING_MODULES_OF_TORCH)
    values: list[Any] = []
    for cls in type(module).__mro__:
        if cls is not object and not _is_class_of_torch(cls):
            values += vars(cls).values()
    # The attributes of the instance may be functions too.
    values += vars(module).values()
    return _functions_may_draw(_functions_in(values), _names_of_children(module))


def _names_of_children(module: nn.Module) -> frozenset[str]:
    """Return the names in the paths of a module's children: "mlp" and "drop" for "mlp.drop"."""
    paths = [path for path, _ in module.named_modules()]
    return frozenset(name for path in paths for name in path.split("."))


def _functions_in(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions among the attributes of a class or an instance.

    Functions in methods, properties, partial calls and containers are included, and `__call__` of
    other objects. Modules are left out, because each module of a tree is decided alone.
    """
    for value in values:
        if isinstance(value, FunctionType):
            if _may_run_in_forward(value):
                yield value
        elif isinstance(value, MethodType | property | staticmethod | classmethod | partial):
            names = ("__func__", "fget", "func")
            yield from _functions_in(getattr(value, name, None) for name in names)
        elif isinstance(value, list | tuple | set | dict):
            items = value.values() if isinstance(value, dict) else value
            callables = [item for item in items if isinstance(item, FunctionType | partial)]
            yield from _functions_in(callables)
        elif not isinstance(value, nn.Module):
            call = vars(type(value)).get("__call__")
            if isinstance(call, FunctionType):
                yield from _functions_in([call])


def _may_run_in_forward(function: FunctionType) -> bool:
    """Tell whether a function is code of the user that may run in a forward."""
    if function.__name__ == "__init__":
        return False
    module: str = function.__globals__.get("__name__", "")
    return not module.startswith(_PACKAGE_PREFIX)


def _functions_may_draw(functions: Iterable[FunctionType], children: frozenset[str]) -> bool:
    """Tell whether the code of functions, and of the functions that they call by name, may draw.

    Args:
        functions: the functions.
        children: names of child modules, which are not names of draws.
    """
    # A global name is looked up in the module that defines the code.
    pending_code = [(function.__code__, function.__globals__) for function in functions]
    visited_code = set[CodeType]()
    while pending_code:
        code, scope = pending_code.pop()
        if code in visited_code:
            continue
        visited_code.add(code)
        if _code_may_draw(code, children):
            return True
        # Functions that the code defines, such as lambdas, are constants of it.
        inner_code = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        pending_code += [(definition, scope) for definition in inner_code]
        called_functions = _functions_in(_globals_of_code(code, scope))
        pending_code += [(function.__code__, function.__globals__) for function in called_functions]
    return False


def _globals_of_code(code: CodeType, scope: Mapping[str, Any]) -> list[Any]:
    """Return the global values that code may use, by its names.

    For `helpers.noisy(x)`, these are the module `helpers` and its function `noisy`.
    """
    values = [scope.get(name) for name in code.co_names]
    if not _is_of_user(scope.get("__name__", "")):
        # Tables and objects of a library do not determine the effect of this call.
        return [value for value in values if isinstance(value, FunctionType)]
    modules = [value for value in values if isinstance(value, ModuleType)]
    for module in modules:
        if _is_of_user(module.__name__):
            values += [vars(module).get(name) for name in code.co_names]
    return values


def _is_of_user(module: str) -> bool:
    """Tell whether a Python module is neither a part of torch nor of the standard library."""
    package = module.partition(".")[0]
    return package != "torch" and package not in sys.stdlib_module_names


# The layers of a model share their code.
@lru_cache(maxsize=1024)
def _code_may_draw(code: CodeType, children: frozenset[str]) -> bool:
    """Tell whether code loads the name of a draw, or calls attention with a dropout argument."""
    if "scaled_dot_product_attention" in code.co_names and _gives_dropout_by_position(code):
        return True
    names = [*_loaded_names(code, children), *_names_in_constants(code)]
    return any(name in _NAMES_OF_DRAWS or "drop" in name.lower() for name in names)


def _loaded_names(code: CodeType, children: frozenset[str]) -> Iterator[str]:
    """Yield the names of globals and attributes that code loads.

    In `self.drop(F.dropout(x))`, these are "F" and "dropout" if "drop" is a child module. A child
    counts only where the name is read from a local variable such as `self`: `F.dropout` is the
    function of torch, whatever the children are.
    """
    is_read_from_local = False
    for instruction in get_instructions(code):
        opname = instruction.opname
        if opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            if not (is_read_from_local and instruction.argval in children):
                yield instruction.argval
            # The next attribute in `self.mlp.drop` belongs to the same variable.
            continue
        is_read_from_local = opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        if opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            yield instruction.argval


def _names_in_constants(code: CodeType) -> Iterator[str]:
    """Yield the names of keyword arguments in calls.

    Code keeps the names of each call as one constant, such as ("dropout_p", "is_causal").
    """
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (name for name in constant if isinstance(name, str))


def _gives_dropout_by_position(code: CodeType) -> bool:
    """Tell whether some call has so many positional arguments that one may be attention's dropout.

    In `scaled_dot_product_attention(q, k, v, mask, 0.1)`, the dropout is the fifth argument.
    """
    before_dropout = DROPOUT_POSITIONS["scaled_dot_product_attention"]
    # number of keyword arguments of the next call
    keywords = 0
    for instruction in get_instructions(code):
        # the operand of the instruction; of a call, the number of its arguments
        operand = instruction.arg or 0
        # Python up to 3.12 has the names of keyword arguments in an instruction of their own. Later
        # versions load them as a constant.
        if instruction.opname == "KW_NAMES":
            keywords = len(code.co_consts[operand])
        elif instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, tuple):
            keywords = len(instruction.argval)
        elif instruction.opname in ("CALL", "CALL_KW"):
            if operand - keywords > before_dropout:
                return True
            keywords = 0
    return False
