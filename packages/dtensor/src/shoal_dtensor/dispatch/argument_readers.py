"""Readers of arguments: a reader adds an argument to the key of a call and returns its local value.

`readers_of` chooses the readers of an operator once, from the types in its schema. Therefore a call
does not test for types that the schema excludes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._torch.operators import OpOverload, is_collective, signature_of
from ..argument_types import CONVERT, is_torch_dtensor
from ..errors import MixedTensorError
from .plain_tensors import Plain, is_candidate, note_gradient

_NUMBERS = frozenset({int, float, bool, complex})
_NUMERIC = frozenset(
    {"IntType", "SymIntType", "FloatType", "BoolType", "ComplexType", "NumberType"}
)
_CONSTANT = _NUMERIC - {"NumberType"} | {"StringType", "DeviceObjType"}

# (argument, the key so far, types of the call's tensors as torch passes them) -> the local
# argument.
Reader = Callable[[Any, list[Any], Any], Any]
# By the name of the argument. None if its value is a part of the key as it is.
Readers = Mapping[str, Reader | None]


def readers_of(op: OpOverload, cls: Any, *, by_value: bool) -> Readers:
    """Return the readers of an operator's arguments.

    Numbers are part of the key with their values (`by_value`), or with their types only.
    """
    # A collective has one decision for all arguments. Its process groups are new objects in every
    # call, so they must not be part of a key.
    if is_collective(op):
        return dict.fromkeys(
            [argument.name for argument in signature_of(op).arguments], _value_without_key
        )
    anything = _reader_of_anything(op, cls, by_value=by_value)
    tensors = _reader_of_tensors(cls, anything)

    def reader_of(argument_type: Any) -> Reader | None:
        while argument_type.kind() == "OptionalType":
            argument_type = argument_type.getElementType()
        name = argument_type.kind()
        if name == "ListType":
            element = argument_type.getElementType().kind()
            if element == "TensorType":
                return tensors
            if element in _NUMERIC and not by_value:
                return _types
            return _values if element in _CONSTANT else anything
        if by_value and name in _CONSTANT:
            return None
        return _number if name in _NUMERIC and not by_value else anything

    return {argument.name: reader_of(argument.type) for argument in signature_of(op).arguments}


def read_keywords(
    readers: Readers, kwargs: Mapping[str, Any], key: list[Any], types: Any
) -> dict[str, Any]:
    """Return the local keyword arguments; add their names and deciding properties to `key`."""
    local: dict[str, Any] = {}
    for name, arg in kwargs.items():
        key.append(name)
        read = readers[name]
        if read is None or arg is None:
            key.append(arg)
            local[name] = arg
        else:
            local[name] = read(arg, key, types)
    return local


def _value_without_key(arg: Any, key: list[Any], types: Any) -> Any:
    return arg


def _number(arg: Any, key: list[Any], types: Any) -> Any:
    """Read a number whose value does not matter, or a constant that schemas call a number.

    Such a constant is a dtype, for example.
    """
    arg_type = type(arg)
    key.append(arg_type if arg_type in _NUMBERS else arg)
    return arg


def _types(arg: Any, key: list[Any], types: Any) -> Any:
    key.append(tuple(map(type, arg)))
    return arg


def _values(arg: Any, key: list[Any], types: Any) -> Any:
    key.append(tuple(arg))
    return arg


def _reader_of_anything(op: OpOverload, cls: Any, *, by_value: bool) -> Reader:
    """Return the reader of an argument that may be of any type."""

    # The count of references that `is_candidate` takes depends on this being called with an item of
    # a loop.
    def anything(arg: Any, key: list[Any], types: Any) -> Any:
        arg_type = type(arg)
        if arg_type in _NUMBERS:
            # 1, 1.0 and True are equal keys but different arguments
            key.append(arg_type)
            if by_value:
                key.append(arg)
        elif isinstance(arg, cls):
            # Read before the class is compared, because the first use of a pending tensor changes
            # the class.
            local = arg._local_tensor
            key.append(arg._spec)
            if type(arg) is not cls:
                key.append(type(arg))
            return local
        elif isinstance(arg, torch.Tensor):
            if is_torch_dtensor(arg):
                raise MixedTensorError(
                    f"{op} got DTensors together with a DTensor of torch.distributed.tensor, of "
                    f"shape {tuple(arg.shape)}; convert it with {CONVERT}"
                )
            is_made_by_torch = arg.numel() == 1 or is_candidate(cls, arg)
            key.append(Plain(arg.shape, arg.stride(), arg.dtype, is_made_by_torch))
            if arg.requires_grad:
                note_gradient(arg)
            return arg.resolve_conj().resolve_neg()
        elif isinstance(arg, list | tuple):
            key.append(len(arg))
            return [anything(item, key, types) for item in arg]
        else:
            key.append(torch.Generator if arg_type is torch.Generator else arg)
        return arg

    return anything


def _reader_of_tensors(cls: Any, anything: Reader) -> Reader:
    """Return the reader of a list of tensors, which is fast if all are DTensors."""
    only = (cls,)

    def tensors(arg: Any, key: list[Any], types: Any) -> Any:
        if types == only:
            try:
                key.append(tuple([tensor._spec for tensor in arg]))
            except AttributeError:
                # There is a plain tensor in the list, which torch does not name in `types`. The
                # list is read after the handler, because the exception holds a reference to `arg`
                # and `is_candidate` counts references.
                pass
            else:
                return [tensor._local_tensor for tensor in arg]
        return anything(arg, key, types)

    return tensors
