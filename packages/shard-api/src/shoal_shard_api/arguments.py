"""Checks of argument types, each raised before any communication.

May import: errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal_mesh.internal import kind_of

from .errors import ArgumentTypeError


def expect(
    call: str,
    name: str,
    value: object,
    *types: Any,
    optional: bool = False,
    error: type[Exception] = ArgumentTypeError,
) -> None:
    """Check the type of an argument.

    Args:
        call: The function that was called, for the message.
        name: The argument.
        value: What was passed.
        types: The types that it may have; bool is no int here.
        optional: Whether None is allowed.
        error: The class of the error.

    Raises:
        ArgumentTypeError: It has another type; or ``error``.
    """
    if optional and value is None:
        return
    if isinstance(value, types) and (not isinstance(value, bool) or bool in types):
        return
    allowed = " or ".join([*(kind.__name__ for kind in types), *(["None"] if optional else [])])
    raise error(f"{call}: {name} must be {allowed}, got {kind_of(value)}{_hint(value, types)}")


def expect_all(call: str, name: str, values: Any, *types: Any, error: type[Exception] = ArgumentTypeError) -> None:
    """Check that an argument is a sequence, no string, whose entries have one of the types.

    Raises:
        ArgumentTypeError: It is not; or ``error``.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise error(f"{call}: {name} must be a sequence, got {kind_of(values)}")
    for index, value in enumerate(values):
        expect(call, f"{name}[{index}]", value, *types, error=error)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and no wrapper of other tensors, as a ShardedTensor or DTensor is."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and tensor.layout == torch.strided


def expect_plain(call: str, name: str, value: object) -> None:
    """Check that an argument is a plain strided tensor: no ShardedTensor, no DTensor, not sparse.

    Raises:
        ArgumentTypeError: It is not.
    """
    expect(call, name, value, torch.Tensor)
    assert isinstance(value, torch.Tensor), "checked"
    if not is_plain(value):
        raise ArgumentTypeError(f"{call}: {name} must be a plain strided tensor, got {kind_of(value)}, {value.layout}")


def _hint(value: Any, types: tuple[Any, ...]) -> str:
    """Where the class of the same name is, for a value of torch's own shard API."""
    namesake = next((kind for kind in type(value).__mro__ for own in types if kind.__name__ == own.__name__), None)
    return f"; use shoal_shard_api.{namesake.__name__}, torch's own class is another one" if namesake else ""
