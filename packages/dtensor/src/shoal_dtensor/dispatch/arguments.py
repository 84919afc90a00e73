"""What the arguments of an operator add to the key of its decision, and what its local call gets for them.

The schema says once per operator how each argument is read, so that a call looks at values only: a float is a float,
a list of tensors is not searched for numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from shoal_mesh import DeviceMesh

from .._torch import OpOverload, is_collective
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta, constant, flatten, is_list, mapped, traced_with
from .plain_tensors import is_candidate, keep_gradient_plain

_SPEC, _LOCAL = attrgetter("_spec"), attrgetter("_local_tensor")
_NUMBERS = frozenset({int, float, bool, complex})
_NUMERIC = frozenset({"IntType", "SymIntType", "FloatType", "BoolType", "ComplexType", "NumberType"})
_CONSTANT = _NUMERIC - {"NumberType"} | {"StringType", "DeviceObjType"}

# (argument, the key so far, types of the call's tensors as torch hands them over) -> the local argument.
Reader = Callable[[Any, list[Any], Any], Any]
# None where the value itself is the key.
Readers = Mapping[str, Reader | None]


class Plain(NamedTuple):
    """A plain tensor among the arguments, as part of a key."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    candidate: bool  # whether it has one element, or may be torch's own


def readers_of(op: OpOverload, cls: Any, *, by_value: bool) -> Readers:
    """How the arguments of an operator are read; numbers are part of the key `by_value`, or only by their types."""
    if is_collective(op):  # one decision for all arguments, among which process groups are new objects in every call
        return {argument.name: lambda arg, key, types: arg for argument in op._schema.arguments}
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

    return {argument.name: reader(argument.type) for argument in op._schema.arguments}


def read_keywords(readers: Readers, kwargs: Mapping[str, Any], key: list[Any], types: Any) -> dict[str, Any]:
    """The local keyword arguments; their names and what decides about them are added to `key`."""
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
    # The count of references that `is_candidate` takes depends on this being called with an item of a loop.
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
            key.append(Plain(arg.shape, arg.stride(), arg.dtype, arg.numel() == 1 or is_candidate(cls, arg)))
            if arg.requires_grad and torch.is_grad_enabled():
                keep_gradient_plain(arg)
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


def mesh_of(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of the first DTensor among the arguments."""
    mesh: DeviceMesh = next(item._spec.mesh for item in flatten([*args, *kwargs.values()]) if isinstance(item, cls))
    return mesh


# --- the structure of arguments whose tensors are specs or metas ------------------------------------------------------


def specs_of(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with specs in place of tensors; plain tensors are replicated."""
    mesh = mesh_of(cls, args, kwargs)

    def spec(tensor: Any) -> Spec:
        if isinstance(tensor, cls):
            return tensor._spec  # type: ignore[no-any-return]  # of a DTensor
        return Spec(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tensor.stride(), tensor.dtype)

    return mapped([*args], torch.Tensor, spec), mapped({**kwargs}, torch.Tensor, spec)


def metas_of(value: Any) -> Any:
    """An argument with the `TensorMeta` of every spec in it; lists become tuples."""
    if is_list(value):
        return tuple([metas_of(item) for item in value])
    return value.tensor_meta if isinstance(value, Spec) else value


def specs_in(values: Iterable[Any]) -> list[Spec]:
    """The specs in several arguments, in order."""
    specs: list[Spec] = []
    for value in values:
        mapped(value, Spec, specs.append)
    return specs


def places_of(arguments: Iterable[tuple[int | str, Any]]) -> Iterator[tuple[int | str, int | None]]:
    """Where each tensor is: the position or name of its argument, its index there if that is a list."""
    for place, value in arguments:
        if isinstance(value, TensorMeta):
            yield place, None
        elif is_list(value):
            yield from ((place, i) for i, item in enumerate(value) if isinstance(item, TensorMeta))


# --- sizes that torch.compile keeps as symbols ------------------------------------------------------------------------
#
# One graph serves every length.  What moves is chosen for the sizes that the compiler traces with: any choice is right,
# so it needs no guard.  Whether the operator may then run on the shards is asked of the rule with the symbols
# themselves: each of its comparisons becomes a guard of the graph.  What cannot be answered so is decided for
# constants; the next length is another graph.


class NeedsConstantsError(Exception):
    """A call cannot be decided for symbols; never seen by users."""


def constants_of(value: Any) -> Any:
    """Arguments of a call with constants in place of symbols."""
    return _replaced(value, int, constant)


def example_of(value: Any) -> Any:
    """Anything of a call, with the sizes that the compiler traces with in place of symbols."""
    return _replaced(value, lambda n: traced_with((n,))[0], lambda spec: spec.example)


def _replaced(value: Any, size: Callable[[Any], int], spec: Callable[[Any], Any]) -> Any:
    """A structure with its symbols and specs of symbols replaced."""

    def replaced(item: Any) -> Any:
        if isinstance(item, Spec):
            return item if item.example is None else spec(item)
        if isinstance(item, TensorMeta):
            return TensorMeta(*(_replaced(part, size, spec) for part in item))
        return torch.Size([_replaced(n, size, spec) for n in item]) if isinstance(item, torch.Size) else size(item)

    return mapped(value, (torch.SymInt, Spec, TensorMeta, torch.Size), replaced)
