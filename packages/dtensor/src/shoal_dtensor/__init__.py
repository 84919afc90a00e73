"""Sharded tensors on a device mesh: placements, redistribution, sharding rules and random numbers."""

from .__about__ import __version__
from .dispatch import cache_info, clear_cache
from .distribute import distribute_module, distribute_tensor
from .errors import (
    CommunicationForbiddenError,
    InPlaceError,
    MixedTensorError,
    NoRuleError,
    PlacementError,
    RandomStateError,
    RedistributeError,
    ShoalTensorError,
)
from .explain import Explanation, explain
from .factory import empty, full, ones, rand, randn, zeros
from .local_map import local_map
from .placements import Partial, Placement, Replicate, Shard, StridedShard
from .policy import checked_replicas, communication, implicit_replication, unknown_ops
from .redistribute import coalesce
from .register import register_rule, register_sharding
from .spec import Spec, TensorMeta, compute_local_shape_and_global_offset
from .tensor import DTensor
from .visualize import draw_sharding, visualize_sharding

__all__ = [
    "CommunicationForbiddenError",
    "DTensor",
    "Explanation",
    "InPlaceError",
    "MixedTensorError",
    "NoRuleError",
    "Partial",
    "Placement",
    "PlacementError",
    "RandomStateError",
    "RedistributeError",
    "Replicate",
    "Shard",
    "ShoalTensorError",
    "Spec",
    "StridedShard",
    "TensorMeta",
    "__version__",
    "cache_info",
    "checked_replicas",
    "clear_cache",
    "coalesce",
    "communication",
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "draw_sharding",
    "empty",
    "explain",
    "full",
    "implicit_replication",
    "local_map",
    "ones",
    "rand",
    "randn",
    "register_rule",
    "register_sharding",
    "unknown_ops",
    "visualize_sharding",
    "zeros",
]
