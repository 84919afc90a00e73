"""Names that a facade has not: in which package they are, or what does their work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Never

HOMES: Mapping[str, str] = {
    name: package
    for package, names in {
        "shoal_mesh": "CommDebugMode DeviceMesh init_device_mesh",
        "shoal_dtensor": "DTensor Partial Placement Replicate Shard StridedShard clip_grad_norm_ distribute_module "
        "distribute_tensor get_model_state_dict get_optimizer_state_dict local_map "
        "set_model_state_dict",
        "shoal_data_parallel": "CPUOffloadPolicy FSDPModule MixedPrecisionPolicy OffloadPolicy UnshardHandle "
        "fully_shard register_fsdp_forward_method replicate",
        "shoal_context_parallel": "context_parallel context_parallel_attention context_parallel_unshard "
        "set_rotate_method",
        "shoal_tp_styles": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput "
        "PrepareModuleOutput RowwiseParallel SequenceParallel input_reshard loss_parallel "
        "parallelize_module",
        "shoal_models": "auto_plan hf load_sharded propose save_sharded",
        "shoal_same_bits": "accumulate_in_tree check_arithmetic compare_runs invariant_arithmetic record_run",
        "shoal_shard_api": "ShardedTensor ShardingPlan shard_module shard_parameter",
    }.items()
    for name in names.split()
}
"""Where the names are that people look for in another package."""


def facade(
    package: str, names: list[str], instead: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[], list[str]], Callable[[str], Never]]:
    """The functions `__dir__` and `__getattr__` of a package; the latter has no value for who checks types.

    `from package import name` first asks for the attribute, and would replace an AttributeError by
    an error without the hint; so where the import system asks, it is an ImportError. `hasattr` is
    False, as it must be.

    Args:
        package: its module.
        names: its public names.
        instead: names of torch's stack that are in no package of shoal, and what does their work.
    """

    def attribute(name: str) -> Never:
        around = package.rpartition("shoal_")[0]  # where the layers are vendored
        hint = instead.get(name) or (f"it is in {around}{HOMES[name]}" if name in HOMES else "")
        for part in () if hint or name.startswith("_") else ("errors", "internal"):
            if (
                not hint
                and find_spec(f"{package}.{part}")
                and name in vars(import_module(f"{package}.{part}"))
            ):
                hint = f"it is in {package}.{part}"
        if hint and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(f"{package} has no {name}: {hint}", name=package)
        raise AttributeError(
            f"{package} has no {name}: {hint}"
            if hint
            else f"module {package!r} has no attribute {name!r}"
        )

    return lambda: names, attribute
