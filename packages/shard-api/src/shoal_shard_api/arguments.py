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
    """Raise ``error`` unless an argument of a call has one of the types.

    A bool counts as an int only if bool is among the types.

    Args:
        call: The name of the call, for the message.
        name: The name of the argument, for the message.
        value: The argument.
        types: The allowed types.
        optional: Allow None.
        error: The class of the error.
    """
    if optional and value is None:
        return
    is_bool_for_int = isinstance(value, bool) and bool not in types
    if isinstance(value, types) and not is_bool_for_int:
        return
    names = [kind.__name__ for kind in types]
    hint = ""
    for kind in type(value).__mro__:
        if kind.__name__ in names:
            hint = f"; use shoal_shard_api.{kind.__name__} instead of torch's own class"
            break
    if optional:
        names.append("None")
    allowed = " or ".join(names)
    raise error(f"{call}: {name} must be {allowed}, got {kind_of(value)}{hint}")


def expect_all(
    call: str, name: str, values: Any, *types: Any, error: type[Exception] = ArgumentTypeError
) -> None:
    """Raise ``error`` unless an argument is a sequence of values of the types, and not a string."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise error(f"{call}: {name} must be a sequence, got {kind_of(values)}")
    for index, value in enumerate(values):
        name_of_value = f"{name}[{index}]"
        expect(call, name_of_value, value, *types, error=error)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is strided, and not a wrapper such as a ShardedTensor or a DTensor."""
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not is_wrapper and tensor.layout == torch.strided


def expect_plain(call: str, name: str, value: object) -> None:
    """Raise ArgumentTypeError unless given a plain strided tensor."""
    expect(call, name, value, torch.Tensor)
    assert isinstance(value, torch.Tensor), "checked"
    if not is_plain(value):
        raise ArgumentTypeError(
            f"{call}: {name} must be a plain strided tensor, got {kind_of(value)}, {value.layout}"
        )
