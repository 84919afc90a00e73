"""What the arguments of an operator add to the key of its decision, and what its local call gets for them.

The schema says once per operator how each argument is read, so that a call looks at values only: a float is a float,
a list of tensors is not searched for numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ._torch import OpOverload, in_backward, is_all_zero
from .errors import MixedTensorError
from .origins import composed_in, draws, is_nameless
from .placements import Replicate
from .rng import check_in_step, generator_of
from .spec import Spec
from .wrapping import tensors_in

__all__ = ["Plain", "Reader", "Readers", "readers_of", "specs_of"]

_SPEC, _LOCAL = attrgetter("_spec"), attrgetter("_local_tensor")
_NUMBERS = frozenset({int, float, bool, complex})
_NUMERIC = frozenset({"IntType", "SymIntType", "FloatType", "BoolType", "ComplexType", "NumberType"})
_CONSTANT = _NUMERIC - {"NumberType"} | {"StringType", "DeviceObjType"}

# (argument, the key so far, types of the call's tensors as torch hands them over) -> the local argument.
Reader = Callable[[Any, list[Any], Any], Any]


@dataclass(frozen=True, slots=True)
class Readers:
    """How the arguments of one operator are read; None where the value itself is the key.

    Attributes:
        positional: by position.
        named: by name.
    """

    positional: tuple[Reader | None, ...]
    named: Mapping[str, Reader | None]

    def keywords(self, kwargs: Mapping[str, Any], key: list[Any], types: Any) -> dict[str, Any]:
        """The local keyword arguments; their names and what decides about them are added to `key`."""
        local: dict[str, Any] = {}
        for name, arg in kwargs.items():
            key.append(name)
            read = self.named[name]
            if read is None or arg is None:
                key.append(arg)
                local[name] = arg
            else:
                local[name] = read(arg, key, types)
        return local


class Plain(NamedTuple):
    """A plain tensor among the arguments, as part of a key.

    Attributes:
        own: whether torch itself made it: inside an operator, inside a function that composes operators in Python, or
            in place of a gradient that nobody gave.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: bool


def readers_of(op: OpOverload, cls: Any, *, by_value: bool) -> Readers:
    """How the arguments of an operator are read.

    Args:
        op: the overload.
        cls: the DTensor class.
        by_value: whether numbers are part of the key, or only their types.
    """
    anything = _reader_of_anything(cls, by_value=by_value)
    tensors = _reader_of_tensors(cls, anything)

    def reader(kind: Any) -> Reader | None:
        while kind.kind() == "OptionalType":
            kind = kind.getElementType()
        name = kind.kind()
        if name == "ListType":
            element = kind.getElementType().kind()
            if element == "TensorType":
                return tensors
            if element in _NUMERIC:
                return _types if not by_value else _values if element in _CONSTANT else _typed_values
            return anything
        if by_value and name in _CONSTANT:
            return None
        return _number if name in _NUMERIC and not by_value else anything

    arguments = op._schema.arguments
    named = {argument.name: reader(argument.type) for argument in arguments}
    return Readers(tuple(named[argument.name] for argument in arguments if not argument.kwarg_only), named)


def _number(arg: Any, key: list[Any], types: Any) -> Any:
    """A number whose value does not matter, or a constant that torch's schemas call a number, such as a dtype."""
    kind = type(arg)
    key.append(kind if kind in _NUMBERS else arg)
    return arg


def _types(arg: Any, key: list[Any], types: Any) -> Any:
    key.append(tuple(map(type, arg)))
    return arg


def _values(arg: Any, key: list[Any], types: Any) -> Any:
    key.append(tuple(arg))
    return arg


def _typed_values(arg: Any, key: list[Any], types: Any) -> Any:
    key += (tuple(arg), tuple(map(type, arg)))
    return arg


def _reader_of_anything(cls: Any, *, by_value: bool) -> Reader:
    # The count of references that `is_nameless` takes depends on this being called with an item of a loop.
    def anything(arg: Any, key: list[Any], types: Any) -> Any:
        kind = type(arg)
        if kind in _NUMBERS:
            key.append(kind)  # 1, 1.0 and True are equal keys but different arguments
            if by_value:
                key.append(arg)
        elif isinstance(arg, cls):
            local = arg._local_tensor  # before the class is looked at: the first use of a pending tensor changes it
            key.append(arg._spec)
            if type(arg) is not cls:
                key.append(type(arg))
            return local
        elif isinstance(arg, torch.Tensor):
            zeros = in_backward() and arg.ndim > 0 and is_all_zero(arg)
            own = arg.ndim > 0 and (is_nameless(arg) or zeros or composed_in(cls, arg) != "")
            key.append(Plain(arg.shape, arg.stride(), arg.dtype, own))
            return arg.resolve_conj().resolve_neg()
        elif isinstance(arg, list | tuple):
            key.append(len(arg))
            return [anything(item, key, types) for item in arg]
        else:
            key.append(torch.Generator if kind is torch.Generator else arg)
        return arg

    return anything


def _reader_of_tensors(cls: Any, anything: Reader) -> Reader:
    only = (cls,)

    def tensors(arg: Any, key: list[Any], types: Any) -> Any:
        specs = _specs(arg) if types == only else None
        if specs is None:
            return anything(arg, key, types)
        key.append(specs)
        return list(map(_LOCAL, arg))

    return tensors


def _specs(tensors: Any) -> tuple[Spec, ...] | None:
    """The specs of DTensors; None if there are plain tensors among them, which torch does not name in `types`."""
    try:
        return tuple(map(_SPEC, tensors))
    except AttributeError:  # this refers to a tensor, which must be over before references are counted
        return None


def specs_of(
    cls: Any,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    key: Sequence[Any],
    *,
    replicated: bool,
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with specs in place of tensors.

    Args:
        cls: the DTensor class.
        op: the overload.
        args, kwargs: the arguments.
        key: what the readers made of them.
        replicated: whether plain tensors count as replicated.

    Raises:
        MixedTensorError: for a plain tensor that has dims and is neither torch's own nor counts as replicated.
    """
    mesh = next(item._spec.mesh for item in tensors_in([*args, *kwargs.values()]) if isinstance(item, cls))
    plain = (entry for entry in key if type(entry) is Plain)

    def specs(value: Any) -> Any:
        if isinstance(value, cls):
            return value._spec
        if isinstance(value, torch.Tensor):
            shape, stride, dtype, own = next(plain)
            if dtype.is_floating_point and shape and draws(composed_in(cls, value)):
                check_in_step(mesh, generator_of(value.device))
            if shape and not own and not replicated:
                raise MixedTensorError(
                    f"{op} got DTensors together with a plain tensor of shape {tuple(shape)}; make it a DTensor with "
                    f"distribute_tensor or DTensor.from_local, or count plain tensors as replicated in "
                    f"implicit_replication()"
                )
            return Spec(mesh, (Replicate(),) * mesh.ndim, shape, stride, dtype)
        return [specs(item) for item in value] if isinstance(value, list | tuple) else value

    return [specs(arg) for arg in args], {name: specs(arg) for name, arg in kwargs.items()}
