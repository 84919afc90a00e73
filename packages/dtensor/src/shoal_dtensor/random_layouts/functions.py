"""Torch functions that draw random numbers, and modules that may call them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dis import get_instructions
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ..modules.forwards import forward_of

_DROPOUT_MODULES = (
    nn.Dropout
    | nn.Dropout1d
    | nn.Dropout2d
    | nn.Dropout3d
    | nn.AlphaDropout
    | nn.FeatureAlphaDropout
)
_DROPOUTS = frozenset(
    f"{kind}{end}"
    for kind in (
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "native_dropout",
    )
    for end in ("", "_")
) | {"dropout1d", "dropout2d", "dropout3d"}
_FILLS = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "uniform_",
    }
)
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
# Functions that draw if they get a dropout probability, with the position of this argument.
_BY_ARGUMENT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_NAMES = (
    _DROPOUTS | _FILLS | _RECURRENT | _BY_ARGUMENT.keys() | {"rrelu", "rrelu_", "rrelu_with_noise"}
)
# Names by which code is recognized that may draw. Attention and recurrent functions are recognized
# by their dropout arguments.
_CALLED = _FILLS | {"rrelu", "rrelu_"}


# The start of the names of this project's packages ("shoal_", or another one in a vendored copy).
# Their functions replace forwards and are not code of the user.
_LAYERS = __name__.partition("dtensor.")[0]


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a torch function draws random numbers.

    For example a `dropout` that is not training does not draw.
    """
    if name not in _NAMES:
        return False
    training = kwargs.get("training", kwargs.get("train"))
    if name in _DROPOUTS:
        chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        is_training = training is None or bool(training)
        is_off_by_position = len(args) > 2 and not args[2]
        return bool(chance) and is_training and not is_off_by_position
    if name in _BY_ARGUMENT:
        position = _BY_ARGUMENT[name]
        by_position = args[position] if len(args) > position else 0.0
        chance = kwargs.get("dropout_p", by_position)
        return bool(chance) and training is not False
    if name in _RECURRENT:
        # The dropout probability is the only float, and the next argument is `train`.
        chance = next((arg for arg in args if type(arg) is float), 0.0)
        return chance > 0 and bool(args[args.index(chance) + 1])
    if name.startswith("rrelu"):
        return bool(training) or any(arg is True for arg in args)
    return True


def drawers_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree whose own forward may draw.

    They are found by their class or by the names in their code.
    """
    return [module for module in root.modules() if _may_draw(module)]


def active(drawer: nn.Module) -> bool:
    """Tell whether a module that may draw does so now.

    It draws while training, unless its probability is 0.
    """
    if not drawer.training or not _of_torch(drawer):
        return drawer.training
    return getattr(drawer, "p", 1) != 0 and getattr(drawer, "dropout", 1) != 0


def _of_torch(module: nn.Module) -> bool:
    """Tell whether torch defines the class of a module."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _may_draw(module: nn.Module) -> bool:
    """Tell whether a module's own forward may draw numbers that a watch must follow."""
    forward = forward_of(module)
    while forward is not None and forward.inner is not None:
        forward = forward.inner
    if forward is not None and forward.sampling == "own":
        return False
    if _of_torch(module):
        return isinstance(module, _DROPOUT_MODULES | nn.RReLU | nn.MultiheadAttention | nn.RNNBase)
    children = frozenset(part for path, _ in module.named_modules() for part in path.split("."))
    user_classes = [
        cls
        for cls in type(module).__mro__
        if cls is not object and not cls.__module__.startswith("torch.nn.modules.")
    ]
    values = [value for cls in user_classes for value in vars(cls).values()]
    values += vars(module).values()
    return _draws(_functions(values), children)


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions among values.

    Functions in methods, properties, partial calls and containers are included.
    """
    for value in values:
        if isinstance(value, FunctionType):
            is_of_layers = value.__globals__.get("__name__", "").startswith(_LAYERS)
            if value.__name__ != "__init__" and not is_of_layers:
                yield value
        elif isinstance(value, MethodType | property | staticmethod | classmethod | partial):
            yield from _functions(
                getattr(value, name, None) for name in ("__func__", "fget", "func")
            )
        elif isinstance(value, list | tuple | set | dict):
            member = value.values() if isinstance(value, dict) else value
            yield from _functions(
                item for item in member if isinstance(item, FunctionType | partial)
            )
        elif not isinstance(value, nn.Module):
            call = vars(type(value)).get("__call__")
            if isinstance(call, FunctionType):
                yield from _functions([call])


def _draws(functions: Iterable[FunctionType], children: frozenset[str]) -> bool:
    """Tell whether functions draw, by the names in their code.

    Functions that they call by a global name are included.
    """
    todo = [(function.__code__, function.__globals__) for function in functions]
    seen = set[CodeType]()
    while todo:
        code, scope = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        if _names_a_draw(code, children):
            return True
        named = [scope.get(name) for name in code.co_names]
        if _of_user(scope.get("__name__", "")):
            modules = [
                value
                for value in named
                if isinstance(value, ModuleType) and _of_user(value.__name__)
            ]
            named += (vars(module).get(name) for module in modules for name in code.co_names)
        else:
            # Tables and objects of a library do not determine the effect of this call.
            named = [value for value in named if isinstance(value, FunctionType)]
        todo += ((constant, scope) for constant in code.co_consts if isinstance(constant, CodeType))
        todo += ((function.__code__, function.__globals__) for function in _functions(named))
    return False


def _of_user(module: str) -> bool:
    """Tell whether a Python module is neither of torch nor of the standard library."""
    root = module.partition(".")[0]
    return root != "torch" and root not in sys.stdlib_module_names


@lru_cache(maxsize=1024)  # the layers of a model share their code
def _names_a_draw(code: CodeType, children: frozenset[str]) -> bool:
    """Tell whether code uses the name of a draw, or calls attention with dropout arguments.

    Names of child modules do not count.
    """
    # Tuples of strings among the constants are names of keyword arguments.
    names = {name for names in code.co_consts if isinstance(names, tuple) for name in names}
    attends = "scaled_dot_product_attention" in code.co_names
    before_dropout = _BY_ARGUMENT["scaled_dot_product_attention"]
    # whether the next attribute is read from a local variable, such as `self`
    of_local = False
    # number of keyword arguments of the next call
    keywords = 0
    for instruction in get_instructions(code):
        opname = instruction.opname
        value = instruction.argval
        count = instruction.arg or 0
        if opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            if not (of_local and value in children):
                names.add(value)
            continue
        of_local = opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        if opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            names.add(value)
        elif opname == "KW_NAMES":
            keywords = len(code.co_consts[count])
        elif opname == "LOAD_CONST" and isinstance(value, tuple):
            keywords = len(value)
        elif opname in ("CALL", "CALL_KW"):
            if attends and count - keywords > before_dropout:
                return True
            keywords = 0
    return any(
        isinstance(name, str) and (name in _CALLED or "drop" in name.lower()) for name in names
    )
