"""Checks of arguments with one wording for all errors, and names of ranks in texts.

May import: errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from types import FunctionType, UnionType
from typing import Any, TypeVar, cast

from torch import Tensor

from .errors import MeshTypeError

Function = TypeVar("Function", bound=Callable[..., Any])
Kinds = type | UnionType | tuple[type, ...]

FUNCTION = cast(type, Callable)
"""Whatever can be called, as one of the `kinds` of `require`."""

ways_out = {
    ("torch.distributed.device_mesh", "DeviceMesh"): (
        "make a mesh of shoal with init_device_mesh, or over the groups of this one with "
        "DeviceMesh.from_group(m.get_all_groups(), m.device_type, m.mesh, "
        "mesh_dim_names=m.mesh_dim_names)"
    )
}
"""Ways from an object of torch's own class to one of shoal, by package and name of torch's class.

The packages above add the classes that they have.
"""


def require(
    value: object,
    kinds: Kinds,
    taken: str,
    error: type[Exception] = MeshTypeError,
    *,
    without: Kinds = (),
) -> None:
    """Raise `error` unless a value is an instance of `kinds`.

    Args:
        value: the argument.
        kinds: the allowed classes.
        taken: a sentence that describes the allowed values. The error is this sentence and the
            value.
        error: the class of the error.
        without: classes of values that are refused though they are instances of `kinds`; for
            example bool, where `kinds` is int.

    Example:
        >>> require("0", int, "a dim of a tensor is an int")
        Traceback (most recent call last):
        shoal_mesh.errors.MeshTypeError: a dim of a tensor is an int, got str '0'
    """
    if not isinstance(value, kinds) or isinstance(value, without):
        raise error(f"{taken}, got {kind_of(value)}")


def require_each(
    values: object,
    kinds: Kinds,
    taken: str,
    error: type[Exception] = MeshTypeError,
    *,
    without: Kinds = (),
) -> None:
    """Raise `error` unless `values` is a sequence of instances of `kinds`, and not a string.

    The arguments are those of `require`.

    Example:
        >>> require_each([0, "1"], int, "dims of a tensor are ints")
        Traceback (most recent call last):
        shoal_mesh.errors.MeshTypeError: dims of a tensor are ints, got list with str '1' at 1
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise error(f"{taken}, got {kind_of(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, kinds) or isinstance(value, without):
            container = type(values).__name__
            raise error(f"{taken}, got {container} with {kind_of(value)} at {index}")


def kind_of(value: object) -> str:
    """Describe an argument of wrong type: its class, and its value or a way from torch's class."""
    if value is None:
        return "None"
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    for base in cls.__mro__:
        for (package, class_name), way_out in ways_out.items():
            if base.__name__ == class_name and base.__module__.startswith(package):
                return f"torch's own {name}: {way_out}"
    if not cls.__module__.startswith("torch"):
        return f"{cls.__name__} {value!r:.80}"
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{name} of shape {tuple(value.shape)}"
    return name


def near_miss(got: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the most similar name.

    The text is empty if no name is similar.

    Example:
        >>> near_miss("colwize", ["colwise", "rowwise"])
        "; did you mean 'colwise'?"
    """
    similar = get_close_matches(got, list(known), n=1, cutoff=0.7)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def check_keywords(
    call: str, function: Callable[..., Any], keywords: Iterable[str], error: type[TypeError]
) -> None:
    """Raise `error` for an unknown keyword argument; it suggests a similar one."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name in parameters if name not in ("self", "cls")]
    for keyword in keywords:
        if keyword not in known:
            suggestion = near_miss(keyword, known)
            allowed = ", ".join(known) or "no arguments"
            raise error(
                f"{call}() got an unexpected keyword argument {keyword!r}{suggestion}; it takes "
                f"{allowed}"
            )


def suggests_keywords(error: type[TypeError] = MeshTypeError) -> Callable[[Function], Function]:
    """Decorate a function so that an unknown keyword argument is an `error` with a suggestion.

    A call without an error costs a tenth of a microsecond more.

    Example:
        >>> @suggests_keywords()
        ... def halve(value: float) -> float:
        ...     return value / 2
        >>> halve(valu=3)
        Traceback (most recent call last):
        shoal_mesh.errors.MeshTypeError: halve() got an unexpected keyword argument 'valu'; did \
        you mean 'value'?; it takes value
    """

    def decorate(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                check_keywords(function.__qualname__, function, kwargs, error)
                raise

        # A code object of its own: torch.compile counts recompilations by code object, and the
        # name is the one that tracebacks show.
        code = call.__code__.replace(co_name=function.__name__)
        copied = FunctionType(code, call.__globals__, closure=call.__closure__)
        return cast(Function, wraps(function)(copied))

    return decorate


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the name of some ranks in texts: `rank 3`, `ranks 0, 1`, `ranks 0-2, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names: list[str] = []
    for run in runs:
        if len(run) > 2:
            names.append(f"{run[0]}-{run[-1]}")
        else:
            names += map(str, run)
    count = sum(map(len, runs))
    noun = "ranks" if count > 1 else "rank"
    return f"{noun} {', '.join(names)}"


def by_ranks(texts: Mapping[int, str]) -> dict[str, str]:
    """Group ranks with equal texts: from rank -> text, return name of ranks -> text.

    Example:
        >>> by_ranks({0: "lost", 1: "lost", 2: "waits"})
        {'ranks 0, 1': 'lost', 'rank 2': 'waits'}
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_by_text.setdefault(text, []).append(rank)
    return {name_ranks(ranks): text for text, ranks in ranks_by_text.items()}
