"""Checks of what users pass: a wrong type is a typed error that says what was expected and how to get it.

May import: errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh

from .errors import ArgumentTypeError


def check_mesh(where: str, mesh: object) -> None:
    """Refuse what is no mesh of shoal.

    Args:
        where: the function that was called.
        mesh: what it got.

    Raises:
        ArgumentTypeError: if it is another type; for torch's own meshes and tensors with the way to convert them.
    """
    if not isinstance(mesh, DeviceMesh) and not hasattr(mesh, "axis_names"):  # threads stand in for ranks in `testing`
        raise ArgumentTypeError(f"{where}: expected a DeviceMesh of shoal_mesh, got {_described(mesh)}{_hint(mesh)}")


def check_type(where: str, name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value of a wrong type.

    Args:
        where: the function that was called.
        name: of the argument; value: what it got.
        kinds: the types allowed; expected: the same in words.

    Raises:
        ArgumentTypeError: if the value is of another type.
    """
    if not isinstance(value, kinds):
        raise ArgumentTypeError(f"{where}: expected {name} to be {expected}, got {_described(value)}{_hint(value)}")
    if kinds is Tensor and isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        kind, way_out = (
            (f"{value.layout}", "to_dense()") if not value.is_nested else ("nested", "to_padded_tensor(0.0)")
        )
        raise ArgumentTypeError(f"{where}: shards are strided tensors, and {name} is {kind}: give it {name}.{way_out}")


def check_callable(where: str, name: str, value: Callable[..., Any] | None) -> None:
    """Refuse what is neither callable nor None.

    Raises:
        ArgumentTypeError: if it is something else.
    """
    if value is not None and not callable(value):
        raise ArgumentTypeError(f"{where}: expected {name} to be a function, got {_described(value)}")


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__} {text if len(text) <= 80 else text[:77] + '...'}"


def _hint(value: object) -> str:
    """How to convert torch's own meshes and DTensors."""
    module, name = type(value).__module__, type(value).__name__
    if module.startswith("torch.distributed"):
        if name == "DeviceMesh":
            return "; shoal_dtensor.interop.mesh_from_torch converts it"
        if name == "DTensor":
            return "; shoal_dtensor.interop.from_torch converts it"
    return ""
