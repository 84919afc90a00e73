"""Data parallelism: parameters sharded (FSDP, HSDP), replicated (DDP) or updated in shards."""

from shoal_dtensor.errors import LayoutError, StyleError, TiedWeightError, UnsupportedModuleError
from shoal_dtensor.internal import on_first_check
from shoal_mesh.internal import facade

from .__about__ import __version__
from .fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from .fully_shard import fully_shard
from .gradients.communication import AllGather, ReduceScatter
from .gradients.equal_rows import EqualRowsWarning
from .owned_shards import owned_shards
from .parameters.parameter_meshes import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    mesh_info,
)
from .parameters.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from .pipeline_stages import prepare_pipeline, reduce_after_last_microbatch
from .replicate import ReplicateModule, replicate

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "EqualRowsWarning",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LayoutError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ReplicateModule",
    "ShardPlacementResult",
    "StyleError",
    "TiedWeightError",
    "UnshardHandle",
    "UnsupportedModuleError",
    "__version__",
    "fully_shard",
    "mesh_info",
    "owned_shards",
    "prepare_pipeline",
    "reduce_after_last_microbatch",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]

__dir__, __getattr__ = facade(__name__, __all__)


@on_first_check
def _declare_types() -> None:
    from . import declared_types as declared_types
