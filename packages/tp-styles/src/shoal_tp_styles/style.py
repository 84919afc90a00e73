"""`ParallelStyle`, the point of extension, and `DeclaredStyle`, the base of the built-in styles.

Styles are values: applying one changes the module, never the style, so one style can serve any
number of modules, meshes and threads.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, Self

from torch import nn

from shoal_mesh import DeviceMesh

from .apply import apply_sharding
from .errors import LayoutError, UnsupportedModuleError
from .sharding import ModuleSharding

__all__ = ["DeclaredStyle", "ParallelStyle", "unsupported"]


class ParallelStyle(ABC):
    """How a module is made parallel.  Subclass it and write `_apply` for a style of your own.

    Attributes:
        src_data_rank: rank along the axis whose parameters are the truth; None keeps every rank's own part.
            `parallelize_module` hands each use of a style a copy with the value of that call.
        axis: name or index of the mesh axis that the style uses; None where the mesh has one axis.
        lower: run known module types as local computation; `parallelize_module` sets it like `src_data_rank`.
    """

    src_data_rank: int | None = 0
    axis: str | int | None = None
    lower: bool = True

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make `module` parallel on a one-axis mesh, and return it."""

    def on(self, axis: str | int) -> Self:
        """The same style for one axis of an n-D mesh.

        Example:
            >>> from shoal_tp_styles import ColwiseParallel
            >>> ColwiseParallel().on("tp").axis
            'tp'
        """
        return self._with(axis=axis)

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed


@dataclass(frozen=True, kw_only=True, repr=False)
class DeclaredStyle(ParallelStyle):
    """A style that is a pure function from a module to its `ModuleSharding`."""

    src_data_rank: int | None = field(default=0, init=False, repr=False)
    axis: str | int | None = field(default=None, init=False)
    lower: bool = field(default=True, init=False, repr=False)
    multiple_of: int = field(default=1, init=False)

    def __repr__(self) -> str:
        changed = (f for f in fields(self) if f.repr and getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @abstractmethod
    def sharding(self, module: nn.Module) -> ModuleSharding:
        """What the style declares for a module.

        Raises:
            UnsupportedModuleError: if the style has no sharding for this type of module.
        """

    def aligned(self, multiple_of: int) -> Self:
        """The same style, cutting features only at multiples of so many elements (the size of an attention head).

        Raises:
            LayoutError: if `multiple_of` is below 1.
        """
        if multiple_of < 1:
            raise LayoutError(f"aligned: features are cut at multiples of a positive number, got {multiple_of}")
        return self._with(multiple_of=multiple_of)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharding = self.sharding(module)
        return apply_sharding(module, sharding, device_mesh, src_data_rank=self.src_data_rank, lower=self.lower)


def unsupported(style: str, module: nn.Module, supported: tuple[type[nn.Module], ...]) -> UnsupportedModuleError:
    """The error of a style for a type of module that it cannot shard."""
    names = ", ".join(kind.__name__ for kind in supported)
    return UnsupportedModuleError(
        f"{style} has no sharding for {type(module).__name__}; it supports {names} and their subclasses. "
        "Write a ParallelStyle of your own, or distribute the module with shoal_dtensor.distribute_module."
    )
