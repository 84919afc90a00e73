"""Tensors of a model that no file has, and whether they have values yet.

`UnfilledTensors` gives each of them a value that no initialization writes. A tensor that still has
this value later has not been initialized.
"""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.internal import local_of
from shoal_mesh import DeviceMesh, all_reduce


class Hole(NamedTuple):
    """A tensor that no file has: a parameter that is missing, or a buffer.

    Attributes:
        module: the owner of the tensor.
        table: the owner's dictionary of parameters or of buffers, which has the tensor.
        name: the name of the tensor in this dictionary.
    """

    module: nn.Module
    table: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Tensor:
        """The current tensor of the owner."""
        tensor: Tensor = self.table[self.name]
        return tensor

    @property
    def is_buffer(self) -> bool:
        """True for buffers, False for parameters."""
        return self.table is self.module._buffers


class UnfilledTensors:
    """The tensors of a model on the meta device, until rules of the model have filled them.

    Rules of a model (`_init_weights`, `reset_parameters`) write in place and return nothing: only
    the values show whether a rule has run. Each tensor therefore starts with a value that no rule
    writes, NaN or the largest integer. A bool tensor has no such value.

    Args:
        model: some of its tensors are on the meta device; the others are marked as filled, and
            transformers leaves marked tensors alone.
        mesh: the mesh of the model's DTensors, on whose device the tensors are made.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.holes = _find_holes(model)
        self._ties: dict[int, list[Hole]] = {}
        for hole in self.holes.values():
            self._ties.setdefault(id(hole.tensor), []).append(hole)

    def mark(self) -> None:
        """Give each tensor storage, filled with the value that no rule writes."""
        for hole in self.holes.values():
            hole.table[hole.name] = _unset_values(hole.tensor, self._mesh.device_type)

    def share_ties(self) -> None:
        """Make tied tensors one tensor again: all names get the tensor of the first name.

        After `mark` each name has a tensor of its own, and rules write values to all of them.
        """
        for first, *others in self._ties.values():
            for other in others:
                other.table[other.name] = first.tensor

    def left(self) -> list[str]:
        """Return the paths of tensors that still lack values on some rank."""
        tensors = [hole.tensor for hole in self.holes.values()]
        lacks_values = [_has_unset_values(tensor) for tensor in tensors]
        # A rank with an empty shard finds no missing values, so the ranks add their answers.
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            flags = torch.tensor(lacks_values, dtype=torch.int, device=self._mesh.device_type)
            lacks_values = all_reduce(flags, self._mesh.comm(0)).tolist()
        return [path for path, lacks in zip(self.holes, lacks_values, strict=True) if lacks]

    def modules_left(self) -> Iterator[tuple[nn.Module, AbstractSet[str]]]:
        """Yield each module that has tensors without values, with the names of all its holes."""
        modules = dict.fromkeys(self.holes[path].module for path in self.left())
        for module in modules:
            names = {hole.name for hole in self.holes.values() if hole.module is module}
            yield module, names

    def buffers_left(self) -> list[str]:
        """Return the paths of buffers that lack values on some rank, and of all bool buffers."""
        left = set(self.left())
        buffers = []
        for path, hole in self.holes.items():
            if hole.is_buffer and (path in left or hole.tensor.dtype is torch.bool):
                buffers.append(path)
        return sorted(buffers)


def _find_holes(model: nn.Module) -> dict[str, Hole]:
    """Return the tensors on the meta device, by path; mark the other tensors as filled."""
    holes: dict[str, Hole] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if local_of(tensor).is_meta:
                    holes[prefix + name] = Hole(module, table, name)
                else:
                    tensor._is_hf_initialized = True
    return holes


def _unset_values(tensor: Tensor, device_type: str) -> Tensor:
    """Return a tensor of the same kind on the device, with values that no rule writes."""
    with torch.no_grad():
        unset = _unset_value(tensor.dtype)
        local = torch.full_like(local_of(tensor), unset, device=device_type)
        value: Any = DTensor(local, tensor.spec) if isinstance(tensor, DTensor) else local
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    unset_tensor: Tensor = value
    return unset_tensor


def _has_unset_values(tensor: Tensor) -> bool:
    """Tell whether this rank's part of a tensor has values that no rule writes."""
    local = local_of(tensor)
    unset = _unset_value(tensor.dtype)
    is_unset = local.isnan() if isnan(unset) else local == unset
    return bool(is_unset.any())


def _unset_value(dtype: torch.dtype) -> float:
    """Return a value that no rule writes: NaN, or the largest integer.

    For bool it is NaN too: `full_like` writes True then, and `isnan` finds no element.
    """
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if is_inexact or dtype is torch.bool:
        return torch.nan
    return torch.iinfo(dtype).max
