"""Data parallelism: parameters sharded over data axes (FSDP, HSDP), replicated (DDP), or updated in shards (ZeRO-1)."""

from typing import Never

from shoal_dtensor.errors import LayoutError, StyleError, TiedWeightError, UnsupportedModuleError
from shoal_mesh.internal import no_such_name

from .__about__ import __version__
from .fsdp_module import FSDPModule, UnshardHandle, reduce_after_last_microbatch, register_fsdp_forward_method
from .fully_shard import fully_shard
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


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Never:
    raise no_such_name(__name__, name, {})
