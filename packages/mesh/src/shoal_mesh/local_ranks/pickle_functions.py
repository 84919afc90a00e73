"""Values and functions as bytes, for another process of this machine.

Functions and classes that a file defines are sent as module, file and qualified name: a script or
test file that is not importable is loaded from its path. Objects without such a name (lambdas,
inner functions, functions and classes of a notebook or doctest) are sent as code by cloudpickle.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
from contextlib import suppress
from operator import attrgetter
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from ..argument_types import kind_of
from ..errors import MeshTypeError, RankError


def dump_function(function: Any) -> bytes:
    """Pickle a function for another process; raise MeshTypeError for anything else."""
    if not isinstance(function, FunctionType | type) and hasattr(function, "__func__"):
        raise MeshTypeError(
            f"{function!r} is a bound method: pass a function and send the object as an argument"
        )
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module or not qualname or not callable(function):
        raise MeshTypeError(
            "ranks run a function that they can import, or a plain function, got "
            f"{kind_of(function)}"
        )
    # A function that `on_ranks` decorates, and that ranks cannot find by name: send its body.
    if _attribute(module, qualname) is None:
        function = getattr(function, "__shoal_body__", function)
    return dump(function)


def dump(value: Any) -> bytes:
    """Pickle a value for another process; raise MeshTypeError if that fails."""
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(value)  # type: ignore[no-untyped-call]  # cloudpickle has none
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise MeshTypeError(
            f"cannot send {type(value).__name__} {value!r:.80} to another process: {error}"
        ) from error
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):
    """A pickler that has the other process run the files that define functions and classes.

    Objects without such a file go to the pickler of cloudpickle, which sends definitions as code.
    By itself, cloudpickle would also send the definitions of a script as code, and it would send
    copies of the globals that an inner function reads.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild an object; called for all but a few builtin types."""
        module = getattr(obj, "__module__", None)
        qualname = getattr(obj, "__qualname__", None)
        ordinary = super().reducer_override
        if type(module) is not str or type(qualname) is not str or module == __name__:
            return ordinary(obj)  # type: ignore[no-untyped-call]  # as above
        file = _source(module)
        if file is None:
            return ordinary(obj)  # type: ignore[no-untyped-call]  # as above
        named = _attribute(module, qualname)
        # the object under this name may be another decorator's wrapper around `on_ranks`
        is_decorated = named is not None and hasattr(obj, "__shoal_body__")
        if named is obj or is_decorated:
            return find_attribute, (module, file, qualname)
        if isinstance(obj, FunctionType) and obj.__globals__ is vars(sys.modules[module]):
            cells = obj.__closure__ or ()
            start = (module, file, obj.__code__, obj.__name__, len(cells))
            contents = [cell.cell_contents for cell in cells]
            state = _FunctionState(contents, obj.__defaults__, obj.__kwdefaults__)
            return _function_of, start, state, None, None, _fill
        return ordinary(obj)  # type: ignore[no-untyped-call]  # as above


def _function_of(module: str, file: str, code: CodeType, name: str, cells: int) -> FunctionType:
    """Return an inner function of a module, whose closure is still empty."""
    closure = tuple([CellType() for _ in range(cells)])
    return FunctionType(code, vars(find_module(module, file)), name, closure=closure)


class _FunctionState(NamedTuple):
    """The parts of an inner function that may refer to the function itself."""

    closure_contents: list[Any]
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None


def _fill(function: FunctionType, state: _FunctionState) -> None:
    """Give a function the contents of its closure, and its defaults."""
    function.__defaults__ = state.defaults
    function.__kwdefaults__ = state.keyword_defaults
    for cell, value in zip(function.__closure__ or (), state.closure_contents, strict=True):
        cell.cell_contents = value


def _source(module: str) -> str | None:
    """Return the path of a module's source, or None.

    A notebook, or a program that is read from stdin, has no path.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else None


def _attribute(module: str, qualname: str) -> Any:
    """Return the object with a dotted name in a loaded module; None if there is none."""
    try:
        return attrgetter(qualname)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def find_attribute(module: str, file: str, qualname: str) -> Any:
    """Return the object with a dotted name in a module."""
    return attrgetter(qualname)(find_module(module, file))


def find_module(module: str, file: str) -> ModuleType:
    """Import a module by name if that is the same file, or else load it from the file."""
    name = module
    found: ModuleType | None = None
    if module == "__main__":
        name = "__mp_main__"
        found = sys.modules.get(name)
    else:
        with suppress(ImportError):
            found = importlib.import_module(name)
    if found is not None and getattr(found, "__file__", None) == file:
        return found
    return _load_file(name, file)


def _load_file(name: str, file: str) -> ModuleType:
    """Run a file as a module of a name, and return the module."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    # set before the module runs, because dataclasses and pickle look it up while it does
    sys.modules[name] = module
    parent = name.rpartition(".")[0]
    # `a.b.c`: `a.b`, `a`
    while parent:
        try:
            importlib.import_module(parent)
        except ImportError:
            # A test runner may have invented the name of the package. pickle imports the package
            # of a module first, so there has to be one.
            sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    if name == "__mp_main__":
        sys.modules["__main__"] = module
        # As in any script: processes that the program spawns then find it by its file.
        module.__spec__ = None
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
            f"{_LOADING[-1]} starts ranks as soon as it is imported, and the ranks import it to "
            "find the function to run; put the code that starts the ranks under `if __name__ == "
            "'__main__':`"
        )
