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
    require,
    suggests_keywords as _suggests_keywords,
    ways_out,
)

from .errors import ArgumentTypeError, LayoutError, StyleTypeError

Function = TypeVar("Function", bound=Callable[..., Any])
Kinds = type | tuple[type, ...]

_WORDS: dict[type, str] = {nn.Module: "an nn.Module", int: "an int", type(None): "None"}


def check_mesh(
    call: str, mesh: object, error: type[ArgumentTypeError] | type[LayoutError] = ArgumentTypeError
) -> None:
    """Refuse a value that is not a mesh of shoal, and name the ways to get one.

    The value may be torch's own mesh, for example, or the name of an axis.
    """
    if not isinstance(mesh, DeviceMesh):
        cls = type(mesh)
        raise error(
            f"{call}: device_mesh is {cls.__module__}.{cls.__qualname__}; make one "
            "with shoal_mesh.init_device_mesh, or convert torch's with "
            f"shoal_dtensor.interop.mesh_from_torch(mesh); got {mesh!r:.80}"
        )


check_device_mesh = partial(check_mesh, error=LayoutError)


CONVERT = "shoal_dtensor.interop.from_torch(tensor)"

ways_out["torch.distributed.tensor", "DTensor"] = f"convert it with {CONVERT}"


def is_torch_dtensor(value: object) -> bool:
    """Tell whether a value is a DTensor of torch's own class, which need not be imported."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.tensor")


def require_tensor(tensor: object, taken: str) -> None:
    """Refuse an argument that is not a strided tensor, or that is a DTensor of torch's own class.

    Args:
        tensor: the argument.
        taken: the sentence of `require` that describes the allowed values.
    """
    if type(tensor) is Tensor and tensor.layout is strided and not tensor.is_nested:
        return
    # A DTensor of torch is a tensor too, but its values are those of another mesh.
    kinds = () if is_torch_dtensor(tensor) else Tensor
    require(tensor, kinds, taken, ArgumentTypeError)
    assert isinstance(tensor, Tensor), "required"
    if tensor.is_nested:
        layout = "a nested tensor"
        way_out = "to_padded_tensor(0.0)"
    elif tensor.layout != strided:
        layout = str(tensor.layout)
        way_out = "to_dense()"
    else:
        return
    raise ArgumentTypeError(
        f"{taken}, got {layout}, but shards must be strided tensors; call tensor.{way_out} first"
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
        shoal_dtensor.errors.StyleTypeError: twice: count is an int, got str '2'
    """

    def add_checks(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)
        known = frozenset(names)
        where = function.__name__
        sentences = {name: f"{where}: {name} is {_in_words(kind)}" for name, kind in kinds.items()}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                check_keywords(where, function, kwargs, StyleTypeError)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for name, kind in kinds.items():
                if name in arguments:
                    _require_value_or_list(arguments[name], kind, sentences[name])
            return function(*args, **kwargs)

        return cast(Function, call)

    return add_checks


def _item_kinds(kinds: Kinds) -> tuple[type, ...]:
    """Return the types without `list`."""
    if not isinstance(kinds, tuple):
        return (kinds,)
    return tuple([kind for kind in kinds if kind is not list])


def _in_words(kinds: Kinds) -> str:
    """Return the types in words, without `list`: "an int or None"."""
    words = []
    for kind in _item_kinds(kinds):
        name = kind.__name__
        article = "an" if name[0] in "AEIO" else "a"
        words.append(_WORDS.get(kind, f"{article} {name}"))
    return " or ".join(words)


def _require_value_or_list(value: Any, kinds: Kinds, taken: str) -> None:
    """Require a value of one of the types or, if `list` is among them, a list of such values."""
    item_kinds = _item_kinds(kinds)
    allows_list = isinstance(kinds, tuple) and list in kinds
    is_filled_list = allows_list and isinstance(value, list) and bool(value)
    for item in value if is_filled_list else [value]:
        # Nearly all values are right, and cost one `isinstance`.
        if not isinstance(item, item_kinds):
            require(item, item_kinds, taken, StyleTypeError)


def submodule_of(call: str, stage: object) -> nn.Module:
    """Return the module of a pipeline stage, of torch's or of any other class.

    Raise StyleTypeError if the stage does not have a module.
    """
    module = getattr(stage, "submod", None)
    require(module, nn.Module, f"{call}: the submod of stage is an nn.Module", StyleTypeError)
    return cast(nn.Module, module)
