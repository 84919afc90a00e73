"""`ParallelStyle`, the base of all styles, and `DeclaredStyle`, which declares a `ModuleSharding`.

Applying a style changes the module, never the style, so one style can serve any number of modules,
meshes and threads.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from torch import nn

from shoal_dtensor import Placement
from shoal_dtensor.errors import (
    LayoutError,
    LayoutTypeError,
    StyleError,
    StyleTypeError,
    UnsupportedModuleError,
)
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import check_keywords

from ..apply.apply import apply_sharding
from ..sharding.module_kinds import keeps_forward
from ..sharding.module_sharding import ModuleSharding

# Methods that torch's styles call on themselves, and that their subclasses override.
_TORCH_HOOKS = {
    "_partition_embedding_fn",
    "_partition_fn",
    "_partition_linear_fn",
    "_prepare_input_arg",
    "_prepare_input_fn",
    "_prepare_input_kwarg_fn",
    "_prepare_out_fn",
    "_prepare_output_fn",
    "_replicate_module_fn",
}


class LayoutField:
    """A field that is read like torch's style fields, as a tuple of placements.

    One placement may be assigned too. A field that was left out is kept as None, so that a style
    can tell whether a layout was given; it reads as the default.
    """

    def __init__(self, default: tuple[Placement, ...]) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = f"_{name}"

    def __get__(self, style: object, owner: type | None = None) -> Any:
        if style is None:
            # the default of the dataclass field
            return None
        layouts = vars(style)[self._attribute]
        return self._default if layouts is None else layouts

    def __set__(self, style: object, value: Placement | tuple[Placement, ...] | None) -> None:
        if isinstance(value, Placement):
            value = (value,)
        vars(style)[self._attribute] = None if value is None else tuple(value)


class ParallelStyle(ABC):
    """Base class of all styles.

    Subclass it and write `_apply` for a style that changes the module itself.

    Attributes:
        src_data_rank: rank along the axis whose parameters are broadcast; None keeps every rank's
            own values. `parallelize_module` applies a copy of the style with the value of its own
            argument.
        axis: name or index of the mesh axis that the style uses, or several names; None where the
            mesh has one axis.
        lower: run known module types as local computation; `parallelize_module` sets it like
            `src_data_rank`.
    """

    src_data_rank: int | None = 0
    axis: str | int | tuple[str, ...] | None = None
    lower: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_keywords(cls.__name__, cls.__init__, kwargs, StyleTypeError)
        return super().__new__(cls)

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make `module` parallel on a one-axis mesh, and return it."""

    def on(self, axis: str | int | tuple[str, ...]) -> Self:
        """Return the same style for one axis of an n-D mesh, or for two axes.

        Only some styles act on two axes.

        Example:
            >>> from shoal_tp_styles import ColwiseParallel
            >>> ColwiseParallel().on("tp").axis
            'tp'
        """
        return self._with(axis=axis)

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class DeclaredStyle(ParallelStyle):
    """A style that is a function from a module to its `ModuleSharding`.

    Subclass it and write `sharding`.

    `parallelize_module`, `unparallelize_module`, `verify`, `preview` and `load_sharded` act on the
    declaration.

    Raises:
        StyleError: when a subclass is defined that overrides one of torch's extension points
            (`_prepare_input_fn`, ...) but not `_apply`: nothing would call the overridden method.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_tp_styles import Port
        >>> class FeatureParallel(DeclaredStyle):
        ...     def sharding(self, module):
        ...         ports = (Port(Shard(-1), Shard(-1)),)
        ...         weight = {"weight": Shard(0)}
        ...         return ModuleSharding("FeatureParallel", weight, inputs=ports, outputs=ports)
        >>> FeatureParallel().sharding(nn.RMSNorm(4)).parameters
        {'weight': Shard(dim=0)}
    """

    src_data_rank: int | None = field(default=0, init=False, repr=False)
    axis: str | int | tuple[str, ...] | None = field(
        default=None, init=False, metadata={"call": ".on({!r})"}
    )
    lower: bool = field(default=True, init=False, repr=False)
    multiple_of: int = field(default=1, init=False, metadata={"call": ".aligned({})"})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        attributes = {name for kind in cls.__mro__ for name in vars(kind)}
        unused = sorted(_TORCH_HOOKS & attributes)
        if unused and cls._apply is DeclaredStyle._apply:
            raise StyleError(
                f"{cls.__name__} overrides {', '.join(unused)}, but these methods are never "
                "called, because torch's extension points are not part of a declared style. "
                "Override sharding(module), which declares the layouts, or _apply(module, "
                "device_mesh), which changes the module itself"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("layouts"):
            self._check_layouts(name, value)
        super().__setattr__(name, value)

    def _check_layouts(self, name: str, value: object) -> None:
        """Refuse a value that is not a placement in a field of layouts.

        A field whose name ends with `layouts` holds a placement or a tuple of placements; a field
        of keyword inputs, whose name ends with `kwarg_layouts`, holds a dict of them.
        """
        entries: tuple[object, ...] = (value,)
        if name.endswith("kwarg_layouts") and isinstance(value, Mapping):
            entries = tuple(value.values())
        elif isinstance(value, list | tuple):
            entries = tuple(value)
        for entry in entries:
            if entry is None or isinstance(entry, Placement):
                continue
            is_of_torch = type(entry).__module__.startswith("torch")
            hint = (
                " (a placement of torch; use the placements of shoal_dtensor)"
                if is_of_torch
                else ""
            )
            raise LayoutTypeError(
                f"{type(self).__name__}: {name} must be a placement such as Replicate() or "
                "Shard(-1), a tuple of placements, or for keyword inputs a dict of placements, "
                f"got {type(entry).__name__} {entry!r:.60}{hint}"
            )

    def __repr__(self) -> str:
        arguments = []
        calls = []
        for item in fields(self):
            value = self.field_value(item.name)
            if not item.repr or value in (item.default, {}):
                continue
            call = item.metadata.get("call")
            if call is None:
                arguments.append(f"{item.name}={value!r}")
            else:
                calls.append(call.format(value))
        return f"{type(self).__name__}({', '.join(arguments)}){''.join(calls)}"

    def field_value(self, name: str) -> Any:
        """Return the value of a field: None if layouts were left out, a single layout by itself."""
        attributes = vars(self)
        if f"_{name}" not in attributes:
            return getattr(self, name)
        layouts = attributes[f"_{name}"]
        is_single = layouts is not None and len(layouts) == 1
        return layouts[0] if is_single else layouts

    @abstractmethod
    def sharding(self, module: nn.Module) -> ModuleSharding:
        """Declare the sharding of a module.

        Raises:
            UnsupportedModuleError: if the style has no sharding for this type of module.
        """

    def aligned(self, multiple_of: int) -> Self:
        """Return the same style, with shard sizes that are multiples of `multiple_of` features.

        The multiple is for example the size of a head.

        Raises:
            LayoutError: if `multiple_of` is below 1.
        """
        if multiple_of < 1:
            raise LayoutError(
                f"aligned: multiple_of must be a positive number of features, got {multiple_of}"
            )
        return self._with(multiple_of=multiple_of)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharding = self.sharding(module)
        return apply_sharding(
            module, sharding, device_mesh, src_data_rank=self.src_data_rank, lower=self.lower
        )


def check_forward(style: str, module: nn.Module, cls: type[nn.Module]) -> None:
    """Refuse a module with its own forward if a style computes the forward of its kind."""
    if not keeps_forward(module, cls):
        name = type(module).__name__
        raise UnsupportedModuleError(
            f"{style}: {name} overrides forward, which would not be called"
        )


def unsupported_error(
    style: str, module: nn.Module, supported: tuple[type[nn.Module], ...], *others: str
) -> UnsupportedModuleError:
    """Return the error of a style for a type of module that it cannot shard."""
    names = ", ".join([*(cls.__name__ for cls in supported), *others])
    if isinstance(module, nn.RNNBase):
        batch = 0 if module.batch_first else 1
        way_out = (
            f"Shard its batch with SequenceParallel(sequence_dim={batch}), or its hidden units "
            "with ColwiseParallel(output_layouts=Replicate())"
        )
    else:
        way_out = (
            "Write a style (docs/how-to/write-a-style.md), or distribute the module with "
            "shoal_dtensor.distribute_module."
        )
    return UnsupportedModuleError(
        f"{style} does not support {type(module).__name__}, only {names} and their subclasses. "
        f"{way_out}"
    )
