"""Hints for names that a package does not have.

A hint says which package has the name, or what replaces it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Never

_NAMES_BY_PACKAGE = {
    "shoal_mesh": "CommDebugMode DeviceMesh init_device_mesh",
    "shoal_dtensor": (
        "DTensor Partial Placement Replicate Shard StridedShard clip_grad_norm_ distribute_module "
        "distribute_tensor get_model_state_dict get_optimizer_state_dict local_map "
        "set_model_state_dict"
    ),
    "shoal_data_parallel": (
        "CPUOffloadPolicy FSDPModule MixedPrecisionPolicy OffloadPolicy UnshardHandle fully_shard "
        "register_fsdp_forward_method replicate"
    ),
    "shoal_context_parallel": (
        "context_parallel context_parallel_attention context_parallel_unshard set_rotate_method"
    ),
    "shoal_tp_styles": (
        "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput "
        "PrepareModuleOutput RowwiseParallel SequenceParallel input_reshard loss_parallel "
        "parallelize_module"
    ),
    "shoal_lab": "certify",
    "shoal_models": "auto_plan hf load_sharded propose save_sharded",
    "shoal_same_bits": (
        "accumulate_in_tree check_arithmetic compare_runs invariant_arithmetic record_run"
    ),
    "shoal_shard_api": "ShardedTensor ShardingPlan shard_module shard_parameter",
    "shoal_spmd_types": (
        "assert_type convert get_local_type invariant_to_replicate reinterpret set_current_mesh "
        "typecheck unshard"
    ),
    "shoal_transfer": "Manifest TransferPlan WeightMapping describe plan_transfer",
}

HOMES: Mapping[str, str] = {
    name: package for package, names in _NAMES_BY_PACKAGE.items() for name in names.split()
}
"""The package of names that people look for in another package."""


def facade(
    package: str, names: list[str], instead: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[], list[str]], Callable[[str], Never]]:
    """Return the functions `__dir__` and `__getattr__` of a package.

    `__getattr__` always raises. The error says where the name is, if that is known. It is an
    AttributeError, so that `hasattr` returns False. Only for `from package import name` it is an
    ImportError, because the import system would replace an AttributeError by an error without the
    hint.

    Args:
        package: the name of its module.
        names: its public names.
        instead: names of torch's stack that no package of shoal has, and their replacements.
    """

    def raise_with_hint(name: str) -> Never:
        hint = _hint(package, name, instead)
        if not hint:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        text = f"{package} has no {name}: {hint}"
        is_import = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        if is_import:
            raise ImportError(text, name=package)
        raise AttributeError(text)

    return lambda: names, raise_with_hint


def replaced_names(module: str, replacements: Mapping[str, type]) -> Callable[[str], type]:
    """Return the `__getattr__` of a module that has dropped classes in favour of others.

    Each old name gives the class that replaces it, with a DeprecationWarning.

    Args:
        module: the name of the module.
        replacements: the class for each old name.

    Example:
        >>> old_name = replaced_names("shapes", {"Circle": complex})
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     old_name("Circle")
        <class 'complex'>
        >>> print(caught[0].message)
        shapes.Circle is now builtins.complex
    """

    def replacement(name: str) -> type:
        if name not in replacements:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = replacements[name]
        text = f"{module}.{name} is now {new.__module__}.{new.__qualname__}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return new

    return replacement


class OldAttribute:
    """An old name of an attribute of a class, which gives the attribute and a DeprecationWarning.

    Args:
        new: the name of the attribute now.

    Example:
        >>> class Circle:
        ...     radius = 1
        ...     size = OldAttribute("radius")
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     Circle().size
        1
        >>> print(caught[0].message)
        Circle.size is now Circle.radius
    """

    def __init__(self, new: str) -> None:
        self._new = new
        self._text = ""
        self.__doc__ = f"Old name of `{new}`."

    def __set_name__(self, owner: type, name: str) -> None:
        self._text = f"{owner.__name__}.{name} is now {owner.__name__}.{self._new}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warnings.warn(self._text, DeprecationWarning, stacklevel=2)
        return getattr(instance, self._new)


def _hint(package: str, name: str, instead: Mapping[str, str]) -> str:
    """Return a text that says where a name is, or its replacement; '' if nothing is known."""
    if name in instead:
        return instead[name]
    if name in HOMES:
        # "project.vendor.shoal_mesh": "project.vendor.", where the packages are vendored
        prefix = package.rpartition("shoal_")[0]
        return f"it is in {prefix}{HOMES[name]}"
    if name.startswith("_"):
        return ""
    for part in ("errors", "internal"):
        module = f"{package}.{part}"
        if find_spec(module) and name in vars(import_module(module)):
            return f"it is in {module}"
    return ""
