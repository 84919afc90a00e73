"""accelerate's own FSDP2, with shoal's sharding in place of torch's.

accelerate imports torch's names inside of its functions, when `Accelerator.prepare` shards a model
and when a `ParallelismConfig` makes a mesh. While one of these runs, `torch_names_replaced` gives
those names shoal's functions and classes; before and afterwards they are torch's. What accelerate
has made earlier, with torch's classes, is made again: the mesh and the policies of the plugin.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any

from shoal_data_parallel import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from shoal_dtensor import DTensor, Replicate, distribute_tensor
from shoal_dtensor.errors import PlanError
from shoal_mesh import init_device_mesh

# What stands for the names that accelerate 1.15 imports, by torch's module.
_REPLACED: Mapping[str, tuple[Any, ...]] = {
    "torch.distributed.fsdp": (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    ),
    "torch.distributed.tensor": (DTensor, Replicate, distribute_tensor),
    "torch.distributed.device_mesh": (init_device_mesh,),
}


@contextmanager
def torch_names_replaced() -> Iterator[None]:
    """Replace the names that accelerate imports from torch, inside the block.

    Imports of all threads of the process are affected while the block runs.
    """
    with ExitStack() as restored:
        for path, replacements in _REPLACED.items():
            module = import_module(path)
            for replacement in replacements:
                name = replacement.__name__
                restored.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, replacement)
        yield


def shard_with_shoal(accelerator: Any) -> None:
    """Have an `Accelerator` with FSDP2 shard models by `shoal_data_parallel.fully_shard`.

    Args:
        accelerator: the accelerator, which has prepared nothing yet; it is changed in place.

    Raises:
        PlanError: if it has prepared a model, or its `ParallelismConfig` has other axes than data
            axes.
    """
    if accelerator._models:
        raise PlanError(
            "prepare_accelerator: this accelerator has prepared a model, which torch has sharded; "
            "call prepare_accelerator first"
        )
    _make_mesh_again(accelerator)
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = _copy_policy(
            MixedPrecisionPolicy, plugin.mixed_precision_policy
        )
    offloads = hasattr(plugin.cpu_offload, "pin_memory")
    plugin.cpu_offload = _copy_policy(
        CPUOffloadPolicy if offloads else OffloadPolicy, plugin.cpu_offload
    )
    prepare = accelerator.prepare

    def prepare_with_shoal(*args: Any, **kwargs: Any) -> Any:
        with torch_names_replaced():
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_with_shoal


def _make_mesh_again(accelerator: Any) -> None:
    """Give the accelerator a mesh of shoal in place of torch's."""
    config = accelerator.parallelism_config
    if config is None:
        return
    others = {"tp_size": config.tp_size, "cp_size": config.cp_size, "sp_size": config.sp_size}
    for name, size in others.items():
        if size > 1:
            raise PlanError(
                f"prepare_accelerator: {name}={size} of the ParallelismConfig is not a data axis; "
                "load the model with hf.from_pretrained and a DistributedConfig, create the "
                "accelerator inside `with hf.single_process():`, and pass data="
            )
    with torch_names_replaced():
        mesh = config.build_device_mesh(accelerator.device.type)
    config.device_mesh = mesh
    accelerator.state.device_mesh = mesh


def _copy_policy(cls: Any, policy: Any) -> Any:
    """Return a policy of the class `cls` with the fields of a policy of torch."""
    own_fields = {field.name for field in fields(cls)}
    values = {
        field.name: getattr(policy, field.name)
        for field in fields(policy)
        if field.name in own_fields
    }
    return cls(**values)
