"""Checks of what public functions are given: `takes`, `check_device_mesh`, `submodule_of`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn

from ..errors import LayoutError, StyleTypeError

_WORDS: dict[type, str] = {nn.Module: "an nn.Module", int: "an int", str: "a str", bool: "a bool"}

Function = TypeVar("Function", bound=Callable[..., Any])


def takes(**kinds: type | tuple[type, ...]) -> Callable[[Function], Function]:
    """Decorator: arguments are instances of these types, or non-empty lists of them where `list` is one.

    Raises:
        StyleTypeError: from a call, naming the argument, what it takes, and what it got.

    Example:
        >>> @takes(count=int)
        ... def twice(count: int) -> int:
        ...     return 2 * count
        >>> twice("2")
        Traceback (most recent call last):
        shoal_dtensor.errors.StyleTypeError: twice: expected count to be an int, got str '2'
    """

    def checked(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            for name, kind in kinds.items():
                if name in given:
                    _check(f"{function.__name__}: expected {name} to be", given[name], kind)
            return function(*args, **kwargs)

        return cast(Function, call)

    return checked


def check_device_mesh(where: str, mesh: object) -> None:
    """Refuse what is not a mesh of shoal: torch's own, or an axis by its name.

    Raises:
        LayoutError: naming the ways to a mesh.
    """
    if not hasattr(mesh, "axis_names"):  # by an attribute: simulated ranks have meshes of their own
        raise LayoutError(
            f"{where}: device_mesh is {type(mesh).__module__}.{type(mesh).__qualname__}; make one with "
            "shoal_mesh.init_device_mesh, or convert torch's with shoal_dtensor.interop.mesh_from_torch(mesh)"
        )


def submodule_of(where: str, stage: object) -> nn.Module:
    """The module of a pipeline stage, of torch's or of anyone's.

    Raises:
        StyleTypeError: it has none.
    """
    module = getattr(stage, "submod", None)
    _check(f"{where}: expected the submod of stage to be", module, nn.Module)
    return cast(nn.Module, module)


def _check(what: str, value: Any, kinds: type | tuple[type, ...]) -> None:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    of_lists = tuple(kind for kind in kinds if kind is not list)
    for each in value if isinstance(value, list) and list in kinds and value else [value]:
        if not isinstance(each, of_lists):
            names = " or ".join(_WORDS.get(kind, kind.__name__) for kind in of_lists)
            raise StyleTypeError(f"{what} {names}, got {type(each).__name__} {each!r:.60}")
