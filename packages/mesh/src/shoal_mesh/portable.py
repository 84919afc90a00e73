"""Functions as bytes: by reference where a rank can import them, by value where it cannot.

A function of a module is sent as module, file and qualified name; a test file that is not importable is loaded from its
path. What has no such name - lambdas, inner functions, functions of a notebook - is sent as code with its closure and,
for a notebook, the globals it uses. Nothing but the standard library is needed for either.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import marshal
import os
import pickle
import sys
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["Failure", "Job", "Reference", "dump", "find_module", "load"]


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a function is to be found, or what it is made of.

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


@dataclass(frozen=True, slots=True)
class Job:
    """One call, sent to every rank.

    Attributes:
        function: a `Reference`.
        payload: pickled (args, kwargs), read only after the function's module is loaded.
        state: attributes of the test instance when the function is a method, None otherwise.
        path: `sys.path` of the parent.
        cwd: working directory of the parent.
        store: port of the parent's store, and a prefix that is new with every job.
        backend: of the default group.
    """

    function: Reference
    payload: bytes
    state: dict[str, Any] | None
    path: list[str]
    cwd: str
    store: tuple[int, str]
    backend: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong on one rank.

    Attributes:
        kind: name of the exception's type.
        message: its text.
        trace: the formatted traceback, with the locals of the failing function.
        skip: whether it asked to skip the test.
        error: the pickled exception, None when it cannot be pickled.
    """

    kind: str
    message: str
    trace: str
    skip: bool = False
    error: bytes | None = None


def dump(function: Any) -> Reference:
    """A reference that `load` turns back into the function, in another process.

    Raises:
        TypeError: it is no function, or its closure holds what cannot be pickled.
    """
    if not isinstance(function, FunctionType | type) and hasattr(function, "__func__"):
        raise TypeError(f"{function!r} is a bound method: pass a function and send the object as an argument")
    name, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name is None or qualname is None:
        raise TypeError(f"{function!r} is no function that another process could find: pass a plain function")
    file = _source(name)
    named = "<" not in qualname and (file is not None or name != "__main__")
    if named:
        return Reference(name, file, qualname)
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} has no importable name and is no plain function")
    return Reference(name, file, qualname, _dump_code(function, with_globals=file is None))


def _source(module: str) -> str | None:
    """The path of a module's source; None when there is none (a notebook, a program read from stdin)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else None


def load(reference: Reference) -> Any:
    """The function that was referred to."""
    if reference.by_value is not None:
        home = find_module(reference) if reference.file is not None else None
        return _load_code(reference.by_value, home)
    found: Any = find_module(reference)
    for part in reference.qualname.split("."):
        found = getattr(found, part)
    return found


def find_module(reference: Reference) -> ModuleType:
    """The module of a reference: imported by name if that gives the same file, else loaded from the file."""
    name = "__mp_main__" if reference.module == "__main__" else reference.module
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == reference.file:
        return known
    if reference.module != "__main__":
        try:
            found = importlib.import_module(name)
        except ImportError:
            found = None
        if found is not None and getattr(found, "__file__", None) == reference.file:
            return found
    return _load_file(name, str(reference.file))


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look themselves up
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


_LOADING: list[str] = []


def loading() -> str:
    """The file that this rank is running to find a function in it; empty when it is not."""
    return _LOADING[-1] if _LOADING else ""


def _dump_code(function: FunctionType, *, with_globals: bool, seen: tuple[str, ...] = ()) -> bytes:
    cells = [_dump_value(cell.cell_contents, seen) for cell in function.__closure__ or ()]
    used: dict[str, bytes] = {}
    if with_globals:
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__ and name not in seen:
                used[name] = _dump_value(function.__globals__[name], (*seen, name))
    parts = (
        marshal.dumps(function.__code__),
        function.__name__,
        _dump_value(function.__defaults__, seen),
        _dump_value(function.__kwdefaults__, seen),
        cells,
        used,
    )
    return pickle.dumps(parts)


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def _dump_value(value: Any, seen: tuple[str, ...]) -> bytes:
    if isinstance(value, ModuleType):
        return pickle.dumps(("module", value.__name__))
    if isinstance(value, FunctionType):
        reference = Reference(value.__module__, None, value.__qualname__)
        file = _source(value.__module__)
        if "<" in value.__qualname__ or (value.__module__ == "__main__" and file is None):
            return pickle.dumps(
                ("code", _dump_code(value, with_globals=file is None, seen=seen), value.__module__, file)
            )
        return pickle.dumps(("reference", Reference(reference.module, file, reference.qualname)))
    try:
        return pickle.dumps(("value", value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"cannot send {type(value).__name__} {value!r:.80} to another process: {error}") from error


def _load_value(data: bytes) -> Any:
    kind, *rest = pickle.loads(data)
    if kind == "module":
        return importlib.import_module(rest[0])
    if kind == "reference":
        return load(rest[0])
    if kind == "code":
        home = find_module(Reference(rest[1], rest[2], "")) if rest[2] is not None else None
        return _load_code(rest[0], home)
    return rest[0]


def _load_code(data: bytes, home: ModuleType | None) -> FunctionType:
    code, name, defaults, kwdefaults, cells, used = pickle.loads(data)
    scope: dict[str, Any] = vars(home) if home is not None else {"__builtins__": builtins, "__name__": "__main__"}
    closure = tuple(CellType(_load_value(cell)) for cell in cells)
    function = FunctionType(marshal.loads(code), scope, name, _load_value(defaults), closure)
    function.__kwdefaults__ = _load_value(kwdefaults)
    if home is None:
        scope.update({key: _load_value(value) for key, value in used.items()})
        scope.setdefault(name, function)  # recursion
    return function
