"""Checks of arguments from users; an error names the expected type and a way to get it.

May import: errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import Tensor, nn, strided

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import (
    check_keywords,
    kind_of,
    near_miss as near_miss,
    suggests_keywords as _suggests_keywords,
)

from .errors import ArgumentTypeError, LayoutError, StyleTypeError

Function = TypeVar("Function", bound=Callable[..., Any])
Kinds = type | tuple[type, ...]

_WORDS: dict[type, str] = {nn.Module: "an nn.Module", int: "an int", str: "a str", bool: "a bool"}


def check_mesh(
    where: str, mesh: object, error: type[ArgumentTypeError] | type[LayoutError] = ArgumentTypeError
) -> None:
    """Refuse a value that is not a mesh of shoal, and name the ways to get one.

    The value may be torch's own mesh, for example, or the name of an axis.
    """
    if not isinstance(mesh, DeviceMesh):
        cls = type(mesh)
        raise error(
            f"{where}: device_mesh is {cls.__module__}.{cls.__qualname__}; make one "
            "with shoal_mesh.init_device_mesh, or convert torch's with "
            f"shoal_dtensor.interop.mesh_from_torch(mesh); got {mesh!r:.80}"
        )


check_device_mesh = partial(check_mesh, error=LayoutError)


CONVERT = "shoal_dtensor.interop.from_torch(tensor)"


def is_torch_dtensor(value: object) -> bool:
    """Tell whether a value is a DTensor of torch's own class, which need not be imported."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.tensor")


def check_type(
    where: str,
    name: str,
    value: object,
    kinds: Kinds,
    expected: str,
    error: type[ArgumentTypeError] | type[StyleTypeError] = ArgumentTypeError,
) -> None:
    """Refuse an argument that is not an instance of `kinds`; `expected` describes them in words."""
    if not isinstance(value, kinds):
        raise error(f"{where}: expected {name} to be {expected}, got {_described(value)}")
    if kinds is Tensor and is_torch_dtensor(value):
        raise error(
            f"{where}: expected {name} to be {expected}, got a DTensor of "
            f"torch.distributed.tensor; convert it with {CONVERT}"
        )
    if kinds is Tensor and isinstance(value, Tensor):
        _check_strided(where, name, value, error)


def _check_strided(where: str, name: str, value: Tensor, error: type[Exception]) -> None:
    """Raise `error` for a nested tensor or a tensor of another layout than strided."""
    if value.is_nested:
        layout = "nested"
        way_out = "to_padded_tensor(0.0)"
    elif value.layout != strided:
        layout = str(value.layout)
        way_out = "to_dense()"
    else:
        return
    raise error(
        f"{where}: {name} is {layout}, but shards must be strided tensors; pass {name}.{way_out}"
    )


def check_callable(where: str, name: str, value: Callable[..., Any] | None) -> None:
    """Raise ArgumentTypeError for a value that is neither callable nor None."""
    if value is not None and not callable(value):
        raise ArgumentTypeError(
            f"{where}: expected {name} to be a function, got {_described(value)}"
        )


def suggests_keywords() -> Callable[[Function], Function]:
    """Decorate a function to raise ArgumentTypeError, with a suggestion, for an unknown keyword."""
    return _suggests_keywords(ArgumentTypeError)


def check_types(**kinds: Kinds) -> Callable[[Function], Function]:
    """Decorate a function to check that arguments are of these types.

    With `list` among the types, a non-empty list of instances is allowed too.

    Raises:
        StyleTypeError: raised by a call, with the name of the argument, the types that it allows,
            and the value.

    Example:
        >>> @check_types(count=int)
        ... def twice(count: int) -> int:
        ...     return 2 * count
        >>> twice("2")
        Traceback (most recent call last):
        shoal_dtensor.errors.StyleTypeError: twice: expected count to be an int, got str '2'
    """

    def checked(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)
        known = frozenset(names)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                check_keywords(function.__name__, function, kwargs, StyleTypeError)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for name, kind in kinds.items():
                if name in arguments:
                    _check_each(function.__name__, name, arguments[name], kind)
            return function(*args, **kwargs)

        return cast(Function, call)

    return checked


def _check_each(where: str, name: str, value: Any, kinds: Kinds) -> None:
    """Raise an error if a value has none of the types; if lists are allowed, check each item."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    item_kinds = tuple(kind for kind in kinds if kind is not list)
    words = " or ".join(_WORDS.get(kind, kind.__name__) for kind in item_kinds)
    is_list = isinstance(value, list) and list in kinds and bool(value)
    for item in value if is_list else [value]:
        check_type(where, name, item, item_kinds, expected=words, error=StyleTypeError)


def submodule_of(where: str, stage: object) -> nn.Module:
    """Return the module of a pipeline stage, of torch's or of any other class.

    Raise StyleTypeError if the stage does not have a module.
    """
    module = getattr(stage, "submod", None)
    check_type(
        where,
        "the submod of stage",
        module,
        nn.Module,
        expected="an nn.Module",
        error=StyleTypeError,
    )
    return cast(nn.Module, module)


def _described(value: object) -> str:
    """Describe a value of a wrong type as the mesh layer does, with a conversion for torch's DTensor."""
    description = kind_of(value)
    if is_torch_dtensor(value):
        return f"{description}; {CONVERT} converts it"
    return description
