"""Names of values: after the modules or operators that make them.

A name becomes free when no later statement reads the value that has it. Another value may then get
the same name.

May import: recorder, statements, trace.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Sequence

from shoal_dtensor.internal import signature_of

from .recorder import EmissionError
from .statements import Statement
from .trace import Trace, TracedValue, values_in

# operator -> the name of its result, for operators whose own name does not fit
_NOUNS = {
    "add": "total",
    "mul": "product",
    "sub": "difference",
    "div": "quotient",
    "pow": "power",
    "cat": "joined",
    "mm": "product",
    "bmm": "product",
    "addmm": "product",
    "_to_copy": "cast",
    "_softmax": "softmax",
    "_unsafe_view": "view",
    "slice": "part",
    "split": "part",
    "split_with_sizes": "part",
    "sum": "total",
    "scalar_tensor": "number",
    "bitwise_and": "both",
    "native_layer_norm": "norm",
}
# Names with a fixed meaning in the emitted file: imports, functions, and the argument `weights`.
# `t` is the name of torch's transpose.
_RESERVED = frozenset(
    {"weights", "torch", "F", "I", "P", "R", "S", "assert_type", "pending", "forward", "t"}
    | {"all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter", "constants"}
)
# names that `forward` assigns while it checks its arguments
_OF_CHECKS = frozenset(
    {"axis", "size", "given", "name", "shape", "dtype", "types", "grad", "tensor"}
    | {"Mapping", "Tensor", "MESH", "WEIGHTS", "INPUTS", "computed_once", "normalize_axis"}
)


def check_names_of_inputs(names: Iterable[str]) -> None:
    """Refuse inputs whose names have another meaning in the emitted file.

    Args:
        names: the names of the arguments of the forward.

    Raises:
        EmissionError: for such a name.
    """
    # The function `constants` is named apart from an input, and `t` is only a method.
    refused = (_RESERVED | _OF_CHECKS) - {"constants", "t"}
    for name in names:
        if name in refused:
            raise EmissionError(
                f"emit: the emitted file uses the name {name!r}, so the forward cannot have an "
                "argument of this name; rename the argument"
            )


class NameTable:
    """The names of values; a name is free again after the last use of its value.

    For each statement, in order, the caller calls `reach`, then `release`, then `new` for each
    value that the statement assigns. `of` may be called between them.
    """

    def __init__(self, trace: Trace, statements: Sequence[Statement]) -> None:
        # id of a value -> name
        self._names: dict[int, str] = {}
        # name -> number of the last statement that reads its value
        self._taken: dict[str, int] = {}
        # id of a value -> number of the last statement that reads it
        self._last_use: dict[int, int] = {}
        # number of the present statement
        self._number = 0
        for number, statement in enumerate(statements):
            for value in statement.operands:
                self._last_use[id(value)] = number
        for value in values_in(trace.results):
            self._last_use[id(value)] = len(statements)
        for name, value in trace.inputs.items():
            self._names[id(value)] = name
            self._taken[name] = len(statements)
        for name, value in trace.parameters.items():
            self._names[id(value)] = f'weights["{name}"]'
        # the name of the function that computes the constants
        self.constants = "constants"
        while self.constants in trace.arguments:
            self.constants = f"_{self.constants}"
        self._taken[self.constants] = len(statements)

    def of(self, value: TracedValue) -> str:
        """Return the name of a value that has been assigned."""
        return self._names[id(value)]

    def reach(self, number: int) -> None:
        """Set the number of the present statement."""
        self._number = number

    def release(self) -> None:
        """Free the names of values that no statement after the present one reads."""
        self._taken = {name: last for name, last in self._taken.items() if last > self._number}

    def new(self, value: TracedValue, statement: Statement) -> str:
        """Name a value that a statement assigns; call `release` before."""
        # A hint is the name of an input, or of the module that computes the value.
        wanted = value.hint or self._inherited_name(statement) or _noun(statement)
        name = wanted
        count = 1
        while name in self._taken or _is_reserved(name):
            count += 1
            name = f"{wanted}_{count}"
        self._names[id(value)] = name
        self._taken[name] = self._last_use.get(id(value), self._number)
        return name

    def _inherited_name(self, statement: Statement) -> str:
        """Return the name of the only operand, if no later statement reads the operand; or ''.

        `release` has freed such a name. The name of a parameter is shortened to its last part.
        """
        if len(statement.operands) != 1 or len(statement.outputs) != 1:
            return ""
        (operand,) = statement.operands
        if operand.parameter:
            return operand.parameter.rpartition(".")[2]
        name = self._names[id(operand)]
        is_free = name.isidentifier() and name not in self._taken
        return name if is_free else ""


def _noun(statement: Statement) -> str:
    """Return a name for the result of a statement, after its operator."""
    if not statement.operations:
        # The statement is a move between ranks or a conversion of types.
        return "moved"
    if len(statement.operations) > 1:
        # Only a linear layer is one statement for several operations. It is named after its module.
        parts = [part for part in statement.path.split(".") if not part.isdigit()]
        return parts[-1] if parts and parts[-1] else "linear"
    name = signature_of(statement.operations[-1].operator).name.removeprefix("aten::")
    if name.startswith("_scaled_dot_product"):
        return "attention"
    noun: str = _NOUNS.get(name, name)
    return noun.strip("_")


def _is_reserved(name: str) -> bool:
    return keyword.iskeyword(name) or hasattr(builtins, name) or name in _RESERVED
