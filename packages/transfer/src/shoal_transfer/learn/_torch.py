"""Private names of torch that recording needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Operator = Callable[..., Any]

_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_CONSTANTS = {"fill", "fill_", "zero", "zero_", "zeros_like", "ones_like", "full_like"}
_SETS_STORAGE = {"aten::set_", "aten::set_data"}


def operator_name(operator: Operator) -> str:
    """Return the name of an operator, such as ``aten::copy_``."""
    name: str = operator._schema.name  # type: ignore[attr-defined]  # every OpOverload has it
    return name


@cache
def makes_views(operator: Operator) -> bool:
    """Return whether the operator's results are views of its arguments, and nothing is written."""
    schema = operator._schema  # type: ignore[attr-defined]  # every OpOverload has it
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@cache
def written_arguments(operator: Operator) -> tuple[list[int], list[str]]:
    """Return the positions and the keywords of the arguments that an operator writes to."""
    schema = operator._schema  # type: ignore[attr-defined]  # every OpOverload has it
    positions = []
    keywords = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        positions.append(position)
        keywords.append(argument.name)
    return positions, keywords


def leaves_memory_unset(operator: Operator) -> bool:
    """Return whether the operator's result has no defined values."""
    return operator_name(operator) in _EMPTY


def makes_constants(operator: Operator) -> bool:
    """Return whether the operator's result does not depend on the values of its arguments."""
    name = operator_name(operator).removeprefix("aten::")
    return name in _CONSTANTS or name.startswith(("new_", "empty"))


def sets_storage(operator: Operator) -> bool:
    """Return whether the operator gives a tensor another storage, and writes no element."""
    return operator_name(operator) in _SETS_STORAGE


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share exactly if they share a storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def meta_twin(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same class, geometry and Python attributes.

    The storage of the twin has the size of the original's storage.
    """
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = torch.empty(elements, dtype=tensor.dtype, device="meta")
    view = storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if type(tensor) is Tensor:
        return view
    twin: Tensor = Tensor._make_subclass(type(tensor), view, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin
