"""Data parallelism: parameters sharded over data axes (FSDP, HSDP), replicated (DDP), or updated in shards (ZeRO-1)."""

from shoal_dtensor.errors import LayoutError, StyleError, TiedWeightError, UnsupportedModuleError
from shoal_mesh.internal import facade

from .__about__ import __version__
from .fully_shard import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    reduce_after_last_microbatch,
    register_fsdp_forward_method,
)
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .replicate import ReplicateModule, replicate

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "LayoutError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "StyleError",
    "TiedWeightError",
    "UnshardHandle",
    "UnsupportedModuleError",
    "__version__",
    "fully_shard",
    "reduce_after_last_microbatch",
    "register_fsdp_forward_method",
    "replicate",
]

__dir__, __getattr__ = facade(__name__, __all__)
