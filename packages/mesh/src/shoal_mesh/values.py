"""Dataclasses that cost little to define, and cached properties that cost little to compute.

Importing the layers defines some two hundred dataclasses. The standard library's decorator compiles up to six functions
for each, which was half of the time of an import: here only `__init__` is compiled, and the other methods are shared.

Deciding about an operator's new shape computes a dozen cached properties: until Python 3.12 the standard library's took
a lock for each, which was a twentieth of the decision.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError
from functools import partial
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property", "dataclass"]

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property:
        """The standard library's, without its lock: threads that read it at once may each compute it."""

        def __init__(self, function):
            self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

        def __get__(self, owner, kind=None):
            if owner is None:
                return self
            value = owner.__dict__[self.name] = self.function(owner)
            return value


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # to a type checker, and to a reader of a class, it is the same
else:

    def dataclass(cls=None, /, *, init=True, repr=True, eq=True, unsafe_hash=False, frozen=False, **others):
        """The standard library's `dataclass`, defined in a quarter of the time; without `order` and `InitVar`.

        `dataclasses.fields`, `replace` and `asdict`, pickle and compiled code take its classes as any dataclass.

        Args:
            cls: the class; None where the decorator is called with options.
            init: give it an `__init__`.
            repr: give it a `__repr__`.
            eq: objects of it with equal fields are equal.
            unsafe_hash: give it a hash of its fields although they can be assigned.
            frozen: its fields cannot be assigned; with `eq`, it has a hash of them.
            others: `kw_only`, `slots` and `weakref_slot`, as there.

        Returns:
            The class with its methods; with `slots`, a new one of the same name.

        Raises:
            TypeError: for what the standard library refuses, such as a field without a default after one that has one.

        Examples:
            >>> @dataclass(frozen=True, slots=True)
            ... class Point:
            ...     x: int
            ...     y: int = 0
            >>> Point(3), Point(3) == Point(3, 0)
            (Point(x=3, y=0), True)
        """
        if cls is None:
            return partial(dataclass, init=init, repr=repr, eq=eq, unsafe_hash=unsafe_hash, frozen=frozen, **others)
        # Beside an `__eq__` in a class, Python itself sets a hash of None.
        own = {name for name, value in vars(cls).items() if value is not None}
        # A subclass of a frozen class has to say that it is frozen: the methods that it inherits are compiled again.
        extends = any(base.__dataclass_params__.frozen for base in cls.__mro__[1:] if dataclasses.is_dataclass(base))
        cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, frozen=frozen and extends, **others)
        cls.__dataclass_params__.frozen = frozen  # compiled code asks it: a frozen object has no side effects
        fields = dataclasses.fields(cls)
        methods = {}
        if frozen:
            methods |= _FROZEN_SLOTS if others.get("slots") else _FROZEN
        if init:
            methods["__init__"] = _init(cls, fields, frozen)
        if repr:
            methods["__repr__"] = _repr([field.name for field in fields if field.repr])
        if eq:
            methods |= _eq_and_hash([field.name for field in fields if field.compare], frozen or unsafe_hash)
        for name in methods.keys() - own:
            setattr(cls, name, methods[name])
        return cls


def _init(cls: type, fields: Sequence[Field[Any]], frozen: bool) -> Callable[..., None]:
    """Defaults come by closure: a class may have names of its own. One of `...` stands for what a factory makes."""
    closed: dict[str, object] = {"_object": object}
    ordered, keywords, lines = ["self"], ["*"], ["pass"]
    for field in fields:
        name, value = field.name, field.name if field.init else f"_default_{field.name}"
        if field.default_factory is not MISSING:
            closed |= {f"_default_{name}": ..., f"_make_{name}": field.default_factory}
            value = f"_make_{name}() if {value} is ... else {value}"
        elif field.default is not MISSING:
            closed[f"_default_{name}"] = field.default
        default = f"=_default_{name}" if f"_default_{name}" in closed else ""
        if field.init:
            (keywords if field.kw_only else ordered).append(name + default)
        if field.init or default:
            lines.append(f"_object.__setattr__(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(ordered + keywords if len(keywords) > 1 else ordered)
    source = [f"def around({', '.join(closed)}):", f" def __init__({parameters}):", *[f"  {line}" for line in lines]]
    made: dict[str, Any] = {}
    exec("\n".join([*source, " return __init__"]), vars(sys.modules[cls.__module__]), made)
    init: Callable[..., None] = made["around"](**closed)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return init


def _repr(names: Sequence[str]) -> Callable[[object], str]:
    @recursive_repr()
    def __repr__(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

    return __repr__


def _eq_and_hash(names: Sequence[str], hashed: bool) -> dict[str, Callable[..., Any] | None]:
    def values(of: object) -> tuple[object, ...]:
        return tuple([getattr(of, name) for name in names])

    def __eq__(self: object, other: object) -> bool:
        if self is other:
            return True
        return values(self) == values(other) if type(self) is type(other) else NotImplemented

    def __hash__(self: object) -> int:
        return hash(values(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if hashed else None}


def _is_field(of: Any, name: str) -> bool:
    """Whether assigning it is refused: a subclass that is no dataclass may have attributes of its own."""
    return "__dataclass_fields__" in vars(type(of)) or name in of.__dataclass_fields__


def _set(self: object, name: str, value: object) -> None:
    if _is_field(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(self: object, name: str) -> None:
    if _is_field(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self: Any, state: list[object]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


_FROZEN = {"__setattr__": _set, "__delattr__": _delete}
_FROZEN_SLOTS = _FROZEN | {"__getstate__": _state, "__setstate__": _restore}  # pickle assigns slots
