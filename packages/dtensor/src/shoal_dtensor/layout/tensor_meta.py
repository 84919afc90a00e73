"""Properties of a tensor without a mesh: shape, stride and dtype; sizes may be symbols.

A `torch.SymInt`, which torch.compile keeps for a size so that one graph serves every length, cannot
be hashed, and each comparison of it in Python becomes a guard of the graph. Values that are
interned by their sizes (`Spec`) use the expressions of symbols as keys. The choice between plans by
their price uses the sizes that the compiler traces with, because this needs no guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


class TensorMeta(NamedTuple):
    """Shape, stride (in elements) and dtype of a global tensor.

    Attributes:
        shape: the sizes of its dims.
        stride: elements from one index of a dim to the next.
        dtype: the dtype of the elements.

    Example:
        >>> TensorMeta((4, 6), (6, 1), torch.float32).ndim
        2
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.shape)


class ShardOrderEntry(NamedTuple):
    """One entry of a shard order under torch's names: a dim and the mesh axes that shard it.

    Attributes:
        tensor_dim: the dim.
        mesh_dims: indices of the mesh axes that shard it, outermost first.

    Example:
        >>> [*ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0))]  # axis 1 shards, then axis 0
        [0, (1, 0)]
    """

    tensor_dim: int
    mesh_dims: tuple[int, ...]


def flatten(value: Any) -> Iterator[Any]:
    """Yield the tensors or `TensorMeta` values in an argument or result, in order.

    Args:
        value: an argument or result of an operator, or a nested list of them.
    """
    if isinstance(value, Tensor | TensorMeta):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)


_LISTS = (list, tuple)
_ONE_TENSOR = (TensorMeta, torch.Size)


def is_list(value: Any) -> bool:
    """Tell whether an argument is several values; a tuple that describes one tensor is not."""
    return isinstance(value, _LISTS) and not isinstance(value, _ONE_TENSOR)


def map_instances(
    value: Any, kinds: type | tuple[type, ...], function: Callable[[Any], Any]
) -> Any:
    """Apply `function` to each instance of `kinds` in arguments or results, in order.

    Lists and dicts are walked.
    """
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, dict):
        return {name: map_instances(item, kinds, function) for name, item in value.items()}
    if not is_list(value):
        return value
    items = [map_instances(item, kinds, function) for item in value]
    return items if isinstance(value, list) else tuple(items)


def with_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return arguments or results with other tensors in the place of theirs.

    Args:
        value: the arguments or results; their tensors may be `TensorMeta` values.
        tensors: the replacements, in the order in which `mapped` finds the tensors.
    """
    replacements = iter(tensors)
    return map_instances(value, (Tensor, TensorMeta), lambda _: next(replacements))


# --- sizes that torch.compile keeps as symbols ----------------------------------------------------


def has_symbols(values: Iterable[Any]) -> bool:
    """Tell whether there is a symbol among some values and their nested tuples and lists.

    A `Spec` among the values counts if it has an `example`, which means that its sizes are symbols.
    """
    for value in values:
        cls = type(value)
        if cls is int:
            continue
        if cls is torch.SymInt or getattr(value, "example", None) is not None:
            return True
        if issubclass(cls, (tuple, list)) and has_symbols(value):
            return True
    return False


def hashable(value: Any) -> Any:
    """Return a value with every symbol replaced by its expression and its symbolic environment."""
    if type(value) is torch.SymInt:
        return value.node.expr, value.node.shape_env
    return tuple(map(hashable, value)) if isinstance(value, tuple) else value


def settle_sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes with an integer in place of every symbol that guards have made constant."""
    settled_sizes = []
    for size in sizes:
        is_constant = type(size) is torch.SymInt and size.node.expr.is_number
        settled_sizes.append(int(size) if is_constant else size)
    return tuple(settled_sizes)


def traced_with(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes that the compiler traces with in place of symbols, without guards.

    Use them only for choices that are correct for any sizes.
    """
    return tuple(map(_hint_of, sizes))


def _hint_of(size: Any) -> int:
    return size if type(size) is int else int(size.node.hint)


def constant(spec: Any) -> Any:
    """Return a spec with constants in place of symbols; the compiler adds a guard for each."""
    shape = tuple(map(int, spec.shape))
    return spec.with_(shape=shape, stride=tuple(map(int, spec.stride)))


def cache_last(count: int) -> Callable[[Function], Function]:
    """Decorate a function of a `Spec` or `Plan` to cache its last `count` results.

    A result for symbolic sizes is not cached, because symbols would keep their compiler alive.
    """

    def decorate(function: Function) -> Function:
        cached = lru_cache(maxsize=count)(function)

        @wraps(function)
        def call(spec_or_plan: Any, *rest: Any) -> Any:
            if spec_or_plan.example is None:
                return cached(spec_or_plan, *rest)
            return function(spec_or_plan, *rest)

        return cast(Function, call)

    return decorate
