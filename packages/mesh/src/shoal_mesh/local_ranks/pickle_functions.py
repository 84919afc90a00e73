"""Functions as bytes: by reference where another process can import them, by value where it cannot.

A function of a module is sent as module, file and qualified name; a test file that is not importable is loaded from its
path. What has no such name - lambdas, inner functions, functions of a notebook or doctest - is sent as code with its
closure and, where its globals are not those of a file, the globals it uses. Nothing but the standard library is needed.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import marshal
import os
import pickle
import sys
from collections.abc import Iterator
from operator import attrgetter
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from ..argument_types import kind_of
from ..errors import MeshTypeError, RankError
from ..values import dataclass


@dataclass(frozen=True, slots=True)
class Reference:
    """Where another process finds a function, or the function as code.

    Attributes:
        module: name of its module.
        file: path of that module's source, None when it has none (a notebook).
        qualname: dotted name inside the module.
        by_value: code, defaults, closure and globals of a function that has no importable name.
    """

    module: str
    file: str | None
    qualname: str
    by_value: bytes | None = None


def dump_function(function: Any) -> Reference:
    """A reference that `load_function` turns back into the function, in another process.

    Raises:
        MeshTypeError: it is no function, or its closure holds what cannot be pickled.
    """
    if not isinstance(function, FunctionType | type) and hasattr(function, "__func__"):
        raise MeshTypeError(f"{function!r} is a bound method: pass a function and send the object as an argument")
    named = getattr(function, "__module__", None) and getattr(function, "__qualname__", None)
    if not named or not callable(function):
        raise MeshTypeError(f"ranks run a function that they can import, or a plain function, got {kind_of(function)}")
    return _reference(function, ())


def _reference(function: Any, seen: tuple[str, ...]) -> Reference:
    """A function by name where that finds it again, else as code; `seen` are globals that are sent already."""
    name, qualname = function.__module__, function.__qualname__
    file = _source(name)
    named = "<" not in qualname and (file is not None or name != "__main__")
    if named and _is_attribute(name, qualname):
        return Reference(name, file, qualname)
    function = getattr(function, "__shoal_body__", function)  # of what on_ranks decorates the ranks run the body
    if not isinstance(function, FunctionType):
        raise MeshTypeError(f"ranks run a function that they can import, or a plain function, got {kind_of(function)}")
    if function.__globals__ is not vars(sys.modules.get(name, builtins)):
        file = None  # defined by exec, as in a doctest: its globals are not those of the file
    return Reference(name, file, qualname, _dump_code(function, with_globals=file is None, seen=seen))


def _is_attribute(module: str, qualname: str) -> bool:
    """Whether a module, as far as it is loaded, has an attribute of that dotted name."""
    try:
        attrgetter(qualname)(sys.modules[module])
    except (AttributeError, KeyError):
        return module not in sys.modules
    return True


def _source(module: str) -> str | None:
    """The path of a module's source; None when there is none (a notebook, a program read from stdin)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else None


def load_function(reference: Reference) -> Any:
    """The function of a reference."""
    if reference.by_value is not None:
        home = find_module(reference) if reference.file is not None else None
        return _load_code(reference.by_value, home)
    return attrgetter(reference.qualname)(find_module(reference))


def find_module(reference: Reference) -> ModuleType:
    """The module of a reference: imported by name if that is the same file, else loaded from the file."""
    name = "__mp_main__" if reference.module == "__main__" else reference.module
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == reference.file:
        return known
    if reference.module != "__main__":
        try:
            module: ModuleType | None = importlib.import_module(name)
        except ImportError:
            module = None
        if module is not None and getattr(module, "__file__", None) == reference.file:
            return module
    return _load_file(name, str(reference.file))


def _parents(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b`, `a`; those that cannot be imported."""
    while "." in name:
        name = name.rpartition(".")[0]
        try:
            importlib.import_module(name)
        except ImportError:
            yield name


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look themselves up
    for parent in _parents(name):  # a test runner may have made them up: pickle imports what is before the first dot
        sys.modules.setdefault(parent, ModuleType(parent))
    if name == "__mp_main__":
        sys.modules["__main__"] = module
    _LOADING.append(file)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _LOADING.pop()
    return module


# Declared mutable state: files that this rank is running to find functions in them.
_LOADING: list[str] = []


def refuse_while_loading() -> None:
    """Raise a RankError if this rank is running a file to find a function in it."""
    if _LOADING:
        raise RankError(
            f"{_LOADING[-1]} starts ranks as soon as it is imported, and the ranks import it to find the function that "
            "they are to run; put what starts them under `if __name__ == '__main__':`"
        )


def _dump_code(function: FunctionType, *, with_globals: bool, seen: tuple[str, ...]) -> bytes:
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    cells = [b"" if value is function else dump_value(value, seen) for value in contents]  # b"": it calls itself
    used: dict[str, bytes] = {}
    if with_globals:
        for name in sorted(code_names(function.__code__)):
            if name in function.__globals__ and name not in seen:
                used[name] = dump_value(function.__globals__[name], (*seen, name))
    fields = (
        marshal.dumps(function.__code__),
        function.__name__,
        dump_value(function.__defaults__, seen),
        dump_value(function.__kwdefaults__, seen),
        cells,
        used,
    )
    return pickle.dumps(fields)


def code_names(code: CodeType) -> set[str]:
    """The names that code reads or sets, inner functions included."""
    inner = [code_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def dump_value(value: Any, seen: tuple[str, ...] = ()) -> bytes:
    """A value as `load_value` of another process takes it: functions as `dump_function` does, modules by name."""
    if isinstance(value, ModuleType):
        return pickle.dumps(("module", value.__name__))
    if isinstance(value, FunctionType):
        return pickle.dumps(("function", _reference(value, seen)))
    try:
        return pickle.dumps(("value", value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise MeshTypeError(f"cannot send {type(value).__name__} {value!r:.80} to another process: {error}") from error


def load_value(data: bytes) -> Any:
    """The value that `dump_value` took."""
    kind, value = pickle.loads(data)
    if kind == "module":
        return importlib.import_module(value)
    return load_function(value) if kind == "function" else value


def _load_code(fields: bytes, home: ModuleType | None) -> FunctionType:
    code, name, defaults, kwdefaults, cells, used = pickle.loads(fields)
    scope: dict[str, Any] = vars(home) if home is not None else {"__builtins__": builtins, "__name__": "__main__"}
    closure = tuple(CellType(load_value(cell)) if cell else CellType() for cell in cells)
    function = FunctionType(marshal.loads(code), scope, name, load_value(defaults), closure)
    for cell, data in zip(closure, cells, strict=True):
        if not data:
            cell.cell_contents = function
    function.__kwdefaults__ = load_value(kwdefaults)
    if home is None:
        scope.update({key: load_value(value) for key, value in used.items()})
        scope.setdefault(name, function)  # recursion
    return function
