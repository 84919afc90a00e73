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
    """Raise ``error`` unless an argument of a call has one of the types, of which bool is no int; or is None."""
    if optional and value is None:
        return
    if isinstance(value, types) and (not isinstance(value, bool) or bool in types):
        return
    allowed = " or ".join([*(kind.__name__ for kind in types), *(["None"] if optional else [])])
    names = {kind.__name__ for kind in types}
    namesake = next((kind.__name__ for kind in type(value).__mro__ if kind.__name__ in names), "")
    hint = f"; use shoal_shard_api.{namesake}, torch's own class is another one" if namesake else ""
    raise error(f"{call}: {name} must be {allowed}, got {kind_of(value)}{hint}")


def expect_all(
    call: str, name: str, values: Any, *types: Any, error: type[Exception] = ArgumentTypeError
) -> None:
    """Raise ``error`` unless an argument is a sequence, no string, whose entries have one of the types."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise error(f"{call}: {name} must be a sequence, got {kind_of(values)}")
    for index, value in enumerate(values):
        expect(call, f"{name}[{index}]", value, *types, error=error)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and no wrapper of other tensors, as a ShardedTensor or DTensor is."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout == torch.strided
    )


def expect_plain(call: str, name: str, value: object) -> None:
    """Raise ArgumentTypeError unless an argument is a plain strided tensor: no ShardedTensor or DTensor, not sparse."""
    expect(call, name, value, torch.Tensor)
    assert isinstance(value, torch.Tensor), "checked"
    if not is_plain(value):
        raise ArgumentTypeError(
            f"{call}: {name} must be a plain strided tensor, got {kind_of(value)}, {value.layout}"
        )
